"""Run ``horovodrun`` with a fixed number of processes, by translating its options into those of ``guozhuang run``."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence

from guozhuang.compat.horovod.common import variables as horovod_variables
from guozhuang.compat.horovod.common.extension import EXTENSION, OF_HOROVODRUN
from guozhuang.compat.horovod.runner import engine_options
from guozhuang.errors import UsageError, explain
from guozhuang.launch import agent
from guozhuang.launch.console.say import say
from guozhuang.launch.hosts import placement, ssh
from guozhuang.launch.hosts.placement import Host
from guozhuang.launch.options import nodes
from guozhuang.launch.request import Request, RunReport

_HERE = "localhost"
_log = logging.getLogger("guozhuang")


def run(found: argparse.Namespace, failed: Callable[[str], None], more: Mapping[str, str] | None = None) -> int:
    """Start the fixed number of processes, and wait until the last one has ended.

    Args:
        found: the command line, as ``arguments.parse`` returns it.
        failed: called with a text if a process ended with anything but 0, or a host was lost. The others have been ended.
        more: further variables for the processes.

    Returns:
        0 if all processes ended with 0; else the exit code of the first that did not, or 128 + the number of the signal that
        ended this process.

    Raises:
        UsageError: the options cannot work; nothing was started.
    """
    placed = places(found)
    words, of_the_job = words_for(found, placed)
    _log.info("guozhuang run %s", shlex.join(words))
    variables = {**of_the_job, **variables_for(found), **(more or {})}

    def report(found: RunReport) -> None:
        if found.text:
            say(found.text)
        if found.code and found.host:
            failed(text_of(found.title, found.code))

    return agent.main(words, Request(OF_HOROVODRUN, placed[0][0], variables, report=report, is_here=ssh.is_here))


def text_of(who: str, code: int) -> str:
    """Return the message for a run that failed: its first failed process and the exit code."""
    return (
        "Horovod detected that one or more processes exited with non-zero status, and ended the others. The first one was:\n"
        f"Process name: {who}\nExit code: {code}"
    )


def hosts_of(found: argparse.Namespace) -> list[Host]:
    """Return the hosts that the command line or its hostfile names; empty if there are none.

    Raises:
        UsageError: they cannot be read.
    """
    if found.hostfile is not None:
        return placement.read_hostfile(found.hostfile)
    return [] if found.hosts is None else placement.parse_hosts(found.hosts)


def places(found: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the name of each host and its number of processes, in the order of their ranks.

    Raises:
        UsageError: more processes than slots.
    """
    named = hosts_of(found)
    if not named:
        return [(_HERE, found.num_proc)]
    return [(name, int(count)) for name, count in placement.place(named, found.num_proc, None)]


def words_for(found: argparse.Namespace, placed: Sequence[tuple[str, int]]) -> tuple[list[str], dict[str, str]]:
    """Translate the options to a command line of ``guozhuang run``; return it, and the variables to send to other hosts.

    Raises:
        UsageError: an option that has no use without other hosts; srun or mpirun started several horovodruns, and no host was
            named.
    """
    words = ["-np", str(found.num_proc)]
    of_the_job: dict[str, str] = {}
    if len(placed) == 1 and ssh.is_here(placed[0][0]):
        words.append("--standalone")  # one node only, even if a scheduler's variables name more
        if found.hosts is None and found.hostfile is None:
            nodes.refuse_others("horovodrun")
            if found.ssh_identity_file is not None:
                what = "--ssh-identity-file serves only hosts that are reached over ssh, and none is named"
                raise UsageError(explain(what, fix="give -H host:slots,... or leave it out"))
    else:
        words += ["-H", found.hosts] if found.hosts is not None else ["--hostfile", found.hostfile]
        for option, value in (("--ssh-port", found.ssh_port), ("--ssh-identity", found.ssh_identity_file)):
            words += [] if value is None else [option, str(value)]
        start_timeout_s = found.start_timeout or horovod_variables.read().start_timeout
        words += [] if not start_timeout_s else ["--start-timeout", f"{start_timeout_s:g}"]
        of_the_job = ssh.of_the_job(os.environ, EXTENSION)
    if found.nics:
        words += ["--interface", found.nics[0]]
    if found.output_filename is not None:
        words += ["--copy-output", found.output_filename]
    if found.prefix_output_with_timestamp:
        words.append("--timestamps")
    return [*words, "--no-python", *found.command], of_the_job


def variables_for(found: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that the command line sets for the processes.

    Raises:
        UsageError: a number that is not allowed.
    """
    values = {"PYTHONUNBUFFERED": "1", **engine_options.variables(found)}
    if found.tcp_flag:
        values["NCCL_IB_DISABLE"] = "1"
    if found.start_timeout is not None:
        values["HOROVOD_START_TIMEOUT"] = f"{found.start_timeout:g}"
    horovod_variables.read(values)  # a value that the processes would refuse raises here
    return values
