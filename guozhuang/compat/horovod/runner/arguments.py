"""The command line of ``horovodrun``: its options, read and checked. Nothing is started here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from guozhuang.compat.horovod.runner import engine_options
from guozhuang.compat.horovod.version import __version__
from guozhuang.errors import UsageError, explain
from guozhuang.launch.options import script

_HOSTS_FIX = "leave out all but one of them"
_START_HELP = "Seconds for hosts to be reached, and again to be ready; elastic: for a process to call hvd.init()."


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line, and the file that ``--config-file`` names.

    Args:
        arguments: the words after ``horovodrun``.

    Returns:
        A field for each option; ``command``: the program and its arguments.

    Raises:
        UsageError: options that cannot work, or not together.
        SystemExit: an unknown option, ``--help`` or ``--version``; the parser has printed a message.
    """
    found = script.read(parser(), arguments)
    found.command = [*filter(None, [found.program]), *found.training_script_args]
    if found.config_file is not None:
        engine_options.take_file(found, _read(found.config_file), found.config_file)
    if not found.check_build:
        check(found)
    return found


def is_elastic(found: argparse.Namespace) -> bool:
    """Return whether the options ask for an elastic run, in which workers may join and leave."""
    return found.host_discovery_script is not None or found.min_num_proc is not None


def parser() -> argparse.ArgumentParser:
    """Return the parser, with every option of ``horovodrun``."""
    found = argparse.ArgumentParser(
        prog="horovodrun",
        usage="horovodrun -np N [options] program [arguments ...]",
        description="Start the processes of a script that was written for Horovod, by Guozhuang's launcher.",
        epilog="For example: horovodrun -np 4 -H host1:2,host2:2 python train.py",
    )
    add = found.add_argument
    add("-v", "--version", action="version", version=__version__)
    add(
        "-np",
        "--num-proc",
        dest="num_proc",
        type=int,
        metavar="N",
        help="How many processes to start; elastic: at first.",
    )
    add("-cb", "--check-build", action="store_true", help="Show what there is, and end.")
    add("--verbose", action=engine_options.StoreOption, nargs=0, const=True, default=False, help="Say what is done.")
    add("--disable-cache", action="store_true", help="Nothing is cached anyway: hosts are looked at in every run.")
    add("--start-timeout", type=float, metavar="S", help=_START_HELP)
    add(
        "--network-interfaces",
        dest="nics",
        type=_names,
        action="extend",
        metavar="A,B",
        help="Network interface to use on every host; of several the first.",
    )
    add("--network-interface", dest="nics", type=_names, action="extend", metavar="A", help="The same.")
    add(
        "--output-filename",
        metavar="FOLDER",
        help="Write what each process prints into FOLDER/rank.N/stdout and stderr too, on the host it runs on.",
    )
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="Put the time before each line.",
    )
    add("--config-file", action=_ConfigFile, metavar="FILE", help="Options from a YAML file; later ones override it.")
    _add_hosts(found)
    _add_elastic(found)
    _add_controllers(found)
    engine_options.add_arguments(found)
    add("program", nargs="?", help=argparse.SUPPRESS)
    return found


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("hosts").add_argument
    add("-H", "--hosts", metavar="H:N,...", help="Hosts and how many processes each can take (default: this one).")
    add("-hostfile", "--hostfile", metavar="FILE", help="The same from a file: a line 'host slots=N' each.")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="Port of ssh on the hosts.")
    add("-i", "--ssh-identity-file", metavar="FILE", help="Private key for ssh.")


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("elastic runs").add_argument
    add(
        "--host-discovery-script",
        metavar="PROGRAM",
        help="Prints a host a line, as name or name:slots; it is asked again and again.",
    )
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int, metavar="N", help="Processes that must be left.")
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int, metavar="N", help="Processes that there may be.")
    add("--slots-per-host", dest="slots", type=int, metavar="N", help="For hosts whose number of slots is not given.")
    add(
        "--elastic-timeout",
        type=float,
        metavar="S",
        help="Seconds to wait for processes after a change (default: 600).",
    )
    add(
        "--reset-limit",
        type=int,
        metavar="N",
        help="How often the processes may change (default: any number of times).",
    )
    add(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="Seconds for which a host that failed gets no further processes (default: for ever).",
    )


def _add_controllers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how processes are started: always by Guozhuang's launcher")
    add = group.add_argument
    add("--gloo", dest="use_gloo", action="store_true", help="As it is anyway.")
    add("--mpi", dest="use_mpi", action="store_true", help="Accepted; a message says that it changes nothing.")
    add(
        "--jsrun",
        dest="use_jsrun",
        action="store_true",
        help="Refused: give -H, or start `guozhuang run` on each host by jsrun.",
    )
    add("--mpi-args", metavar="WORDS", help="Accepted; a message says that it means nothing here.")
    add("--binding-args", metavar="WORDS", help="Accepted; a message says that it means nothing here.")
    add("--tcp", dest="tcp_flag", action="store_true", help="No InfiniBand: NCCL_IB_DISABLE=1.")


class _ConfigFile(argparse.Action):
    """The action of ``--config-file``: the file overrides options before it, and options after it override the file."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.config_file = values
        namespace.given_later = set()


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _read(path: str) -> object:
    try:
        import yaml
    except ImportError as error:
        fix = "pip install 'guozhuang[horovod]', or pip install pyyaml"
        raise UsageError(explain("--config-file needs the package pyyaml, which is not installed", fix=fix)) from error
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        what = f"the file of --config-file cannot be read: {error}"
        raise UsageError(explain(what, value=path, fix="check the path, and that it is YAML")) from error


def check_counts(found: argparse.Namespace) -> None:
    """Set a missing number of processes to the smallest one allowed (``--min-np``), and check all counts and time-outs.

    Raises:
        UsageError: a number that makes no sense.
    """
    if found.num_proc is None and found.min_num_proc is not None:
        found.num_proc = found.min_num_proc
    if found.num_proc is None:
        raise UsageError(explain("the number of processes is missing", fix="give -np N"))
    for name, value, least in (
        ("-np", found.num_proc, 1),
        ("--min-np", found.min_num_proc, 1),
        ("--max-np", found.max_num_proc, 1),
        ("--slots-per-host", found.slots, 1),
        ("--reset-limit", found.reset_limit, 0),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageError(explain(f"{name} is a whole number", value=value, fix="give an int"))
        if value is not None and value < least:
            raise UsageError(explain(f"{name} must be at least {least}", value=value, fix="give a larger number"))
    least = found.num_proc if found.min_num_proc is None else found.min_num_proc
    if least > found.num_proc or (found.max_num_proc is not None and found.max_num_proc < found.num_proc):
        numbers = f"--min-np {least} -np {found.num_proc} --max-np {found.max_num_proc}"
        what = "the least number of processes, that at the begin, and the largest one must rise in this order"
        raise UsageError(explain(what, value=numbers, fix="leave --min-np or --max-np out, or change -np"))
    if found.cooldown_range is not None and not 0 < found.cooldown_range[0] <= found.cooldown_range[1]:
        what = "--blacklist-cooldown-range is a least and a most number of seconds, both above 0"
        raise UsageError(explain(what, value=tuple(found.cooldown_range), fix="write it as 60 300"))
    for name, value in (("--elastic-timeout", found.elastic_timeout), ("--start-timeout", found.start_timeout)):
        if value is not None and not 0 < value < 1e6:
            raise UsageError(explain(f"{name} is a number of seconds above 0", value=value, fix="leave it out"))


def check_ssh(found: argparse.Namespace) -> None:
    """Check the port and key file given for ssh, even if no host is reached over ssh.

    Raises:
        UsageError: the port is not one of TCP, or the file cannot be read.
    """
    if found.ssh_port is not None and not 0 < found.ssh_port < 65536:
        raise UsageError(
            explain("--ssh-port is no TCP port", value=found.ssh_port, fix="give 1 to 65535, or leave it out")
        )
    path = found.ssh_identity_file
    if path is not None and not (os.path.isfile(path) and os.access(path, os.R_OK)):
        what = "--ssh-identity-file: there is no such file, or it cannot be read"
        raise UsageError(explain(what, value=path, fix="check the path"))


def check(found: argparse.Namespace) -> None:
    """Check all options: their values, their combinations, and that a program is given.

    Raises:
        UsageError: options that cannot work, or not together.
    """
    if found.use_jsrun:
        fix = "start `guozhuang run` once on each host by jsrun, with torchrun's options, or give -H"
        raise UsageError(explain("--jsrun is not supported: processes are started by Guozhuang's launcher", fix=fix))
    if found.use_gloo and found.use_mpi:
        raise UsageError(explain("--gloo and --mpi exclude each other", fix="leave both out"))
    check_counts(found)
    check_ssh(found)
    named = [
        name
        for name, value in (
            ("-H", found.hosts),
            ("--hostfile", found.hostfile),
            ("--host-discovery-script", found.host_discovery_script),
        )
        if value is not None
    ]
    if len(named) > 1:
        raise UsageError(explain(f"{' and '.join(named)} exclude each other", fix=_HOSTS_FIX))
    if not is_elastic(found):
        alone = {
            "--max-np": found.max_num_proc, "--slots-per-host": found.slots, "--elastic-timeout": found.elastic_timeout,
            "--reset-limit": found.reset_limit, "--blacklist-cooldown-range": found.cooldown_range,
        }  # fmt: skip
        given = [name for name, value in alone.items() if value is not None]
        if given:
            what = f"{', '.join(given)} serves only elastic runs, and this is none"
            raise UsageError(explain(what, fix="give --min-np N or --host-discovery-script, or leave it out"))
    elif found.slots is not None and not named:
        what = "--slots-per-host is for hosts whose number of slots is not given, and no host is named"
        fix = "give -H, --hostfile or --host-discovery-script, or leave it out: this host takes --max-np processes, or -np"
        raise UsageError(explain(what, value=found.slots, fix=fix))
    if not found.command:
        raise UsageError(explain("the program is missing", fix="write it behind the options, as in: python train.py"))
