"""The options for several hosts (``-H`` and others): those that the launcher reads, and those that it passes to the agents."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from guozhuang.errors import UsageError, explain
from guozhuang.launch.job import Policy

DEFAULT_START_TIMEOUT_S = 60.0
# Options on the rendezvous, which -H does not accept because it decides the rendezvous itself.
_EXCLUDED = (
    "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--standalone", "--local-addr",
)  # fmt: skip
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # always end an agent, also if --signals-to-handle does not name them


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options for several hosts."""

    def add(*names: str, **more: Any) -> None:
        underscored = ["--" + name[2:].replace("-", "_") for name in names if "-" in name[2:]]
        parser.add_argument(*names, *underscored, **more)

    add(
        "-H",
        dest="hosts",
        action="append",
        metavar="H:N,...",
        help="Start N ranks on each host, over ssh (default N: 1).",
    )
    add(
        "--hostfile",
        metavar="FILE",
        help="Hosts from a file: lines like 'host slots=2' or 'host:2'; # begins a comment.",
    )
    add(
        "-x",
        dest="exported",
        action="append",
        metavar="NAME[=VALUE]",
        help="Give every host this environment variable.",
    )
    add("--ssh-port", type=int, metavar="PORT", help="Port of ssh on the hosts.")
    add("--ssh-identity", metavar="FILE", help="Private key for ssh.")
    add("--ssh-config", metavar="FILE", help="Configuration file for ssh, instead of ~/.ssh/config.")
    add(
        "--start-timeout",
        type=float,
        metavar="SECONDS",
        help=f"How long hosts may take to be reached, and again to be ready (default: {DEFAULT_START_TIMEOUT_S:g}).",
    )
    add(
        "--interface",
        metavar="NAME",
        help="Network interface for gloo and NCCL, and with -H for the meeting point (default: the one that leads to the "
        "master).",
    )


def add_server_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options for parameter servers."""
    parser.add_argument(
        "--servers",
        type=int,
        metavar="K",
        help="Parameter servers to start beside the ranks of this node, for the exchange ParameterServer (default: 0). With -H "
        "they are spread over its hosts.",
    )
    parser.add_argument(
        "--server-hosts",
        "--server_hosts",
        action="append",
        metavar="H:N,...",
        help="With -H: start N parameter servers on each of these hosts instead, which get no ranks (default N: 1).",
    )


def read(head: Sequence[str], environ: Mapping[str, str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate the launcher's options from those of the agents.

    Args:
        head: the words after ``guozhuang run`` and before the script. ``plan`` parsed them before, so they have no errors.
        environ: the launcher's environment; a variable like PET_NPROC_PER_NODE stands for the option, as with torchrun.

    Returns:
        The launcher's options, and the words for the agents.

    Raises:
        UsageError: an option or variable excludes ``-H``, or an option is abbreviated.
    """
    found, rest = _parser().parse_known_args(list(head))
    rest = [each for each in rest if each != "--"]
    _check_rest(rest)
    _take_variables(found, environ)
    if found.max_restarts < 0:
        raise UsageError(explain("--max-restarts cannot be negative", value=found.max_restarts, fix="leave it out"))
    if found.on_failure == Policy.KEEP_SURVIVORS.value:  # each agent replaces its own ranks, within its limit
        rest += [f"--on-failure={found.on_failure}", f"--max-restarts={found.max_restarts}"]
        found.max_restarts = 0
    if found.shutdown_timeout is not None:
        rest.append(f"--shutdown-timeout={found.shutdown_timeout}")
    found.signals = _signals(found.signals_to_handle or "")
    if found.signals_to_handle is not None:
        rest.append(f"--signals-to-handle={','.join([_SIGNALS, *(each.name for each in found.signals)])}")
    return found, rest


def _parser() -> argparse.ArgumentParser:
    """Return a parser of the launcher's options only."""
    parser = argparse.ArgumentParser(prog="guozhuang run", add_help=False, allow_abbrev=False)
    add_arguments(parser)
    add_server_arguments(parser)
    parser.add_argument("-np", dest="num_ranks", type=int)
    parser.add_argument("--nproc-per-node", "--nproc_per_node", dest="per_host")
    parser.add_argument(
        "--max-restarts", "--max_restarts", type=int
    )  # the launcher restarts the ranks of all hosts together
    parser.add_argument("--on-failure", "--on_failure")
    parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int)
    parser.add_argument("--signals-to-handle", "--signals_to_handle")
    parser.add_argument("--timeline")
    parser.add_argument("--master-addr", "--master_addr")
    parser.add_argument("--master-port", "--master_port", type=int)
    return parser


def _check_rest(rest: Sequence[str]) -> None:
    """Check that the agents' words contain no option on hosts or rendezvous, also not abbreviated, as torchrun allows."""
    ours = [name for action in _parser()._actions for name in action.option_strings if "_" not in name]
    for word in rest:
        name = word.partition("=")[0].replace("_", "-")
        if name in _EXCLUDED:
            raise UsageError(_exclude(name))
        full = [
            each for each in (*ours, *_EXCLUDED) if len(name) > 2 and name.startswith("--") and each.startswith(name)
        ]
        if full:
            raise UsageError(explain("with -H options are written in full", value=word, fix=f"write {full[0]}"))


def _exclude(name: str) -> str:
    what = f"{name} and -H exclude each other: -H says which nodes there are, and they meet by themselves"
    return explain(what, fix=f"leave {name} out; --master-addr, --master-port and --interface are taken")


def _take_variables(found: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Set options that were not given from their PET_ variables, as torchrun does."""
    for option in _EXCLUDED:
        name = f"PET_{option[2:].replace('-', '_').upper()}"
        if environ.get(name, "") not in ("", "0" if name == "PET_STANDALONE" else ""):
            raise UsageError(_exclude(name))
    numbers = {"MAX_RESTARTS": "max_restarts", "MASTER_PORT": "master_port", "SHUTDOWN_TIMEOUT": "shutdown_timeout"}
    texts = {"MASTER_ADDR": "master_addr", "SIGNALS_TO_HANDLE": "signals_to_handle"}
    if found.num_ranks is None:
        texts["NPROC_PER_NODE"] = "per_host"
    for short, option in (numbers | texts).items():
        value = environ.get(f"PET_{short}")
        if value is None or getattr(found, option) is not None:
            continue
        if short in numbers and not re.fullmatch(r"\s*-?[0-9]{1,9}\s*", value):
            raise UsageError(explain(f"PET_{short} is not a number", value=value, fix="unset it, or give a number"))
        setattr(found, option, int(value) if short in numbers else value)
    found.max_restarts = found.max_restarts or 0


def _signals(names: str) -> list[signal.Signals]:
    """Return the signals of ``--signals-to-handle`` that are not in ``_SIGNALS``."""
    found: list[signal.Signals] = []
    for name in filter(None, map(str.strip, names.split(","))):
        number = getattr(signal, name, None)
        if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
            what = "--signals-to-handle names something that is no signal, or one that cannot be caught"
            raise UsageError(explain(what, value=name, fix="give names like SIGUSR1, with commas between"))
        if name not in _SIGNALS.split(","):
            found.append(number)
    return found
