"""The command ``guozhuang``: finds the subcommand and loads the module that carries it out, only when it is called."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence

from guozhuang.errors import UsageError, WorldError
from guozhuang.launch.console.say import say


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments without the program's name; None: those of the process.

    Returns:
        0 on success, 2 for a command line or input that cannot work, 1 if processes could not connect, else the
        subcommand's exit code. ``--help``, ``--version`` and unknown options end the process as argparse does.
    """
    _open_closed()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = _COMMANDS.get(arguments[0]) if arguments else None
    try:
        if command is not None:
            return command(arguments[1:])
        _parser().parse_args(arguments or ["--help"])  # ends the process: no known command was given
        return 2
    except (UsageError, WorldError) as error:
        say(str(error), "guozhuang")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        say("interrupted", "guozhuang")
        return 130


def _open_closed() -> None:
    """Open standard streams that were closed (``2>&-``): else a file or socket would get their number, and what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
            os.set_inheritable(opened, True)


def _run(arguments: Sequence[str]) -> int:
    from guozhuang import compat, launch
    from guozhuang.launch.request import Request

    return launch.main(arguments, Request(compat.extension()))


def _compare(arguments: Sequence[str]) -> int:
    from guozhuang import compat
    from guozhuang.lab import compare

    parser = argparse.ArgumentParser(
        prog="guozhuang compare", description="Train the same workload under several strategies, side by side."
    )
    compare.add_arguments(parser)
    return compare.run(parser.parse_args(list(arguments)), compat.extension().python_path)


def _check(arguments: Sequence[str]) -> int:
    from guozhuang import check

    return check.main(arguments)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"check": _check, "compare": _compare, "run": _run}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="guozhuang", description="Train one PyTorch model on many processes, and see which way is best."
    )
    parser.add_argument("--version", action="version", version=f"guozhuang {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    commands.add_parser("run", help="start the ranks of a training script (takes torchrun's options)")
    commands.add_parser("check", help="measure links and compare hosts, and say what is wrong")
    commands.add_parser("compare", help="train the same workload under several strategies, side by side")
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("guozhuang")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed; run from its source)"
