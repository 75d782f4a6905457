"""The command ``guozhuang``: finds the subcommand and loads the module that carries it out, only when it is called.

Torch is imported when a command line has been understood and is carried out, so that ``--help``, ``--version``, mistakes and
completion take a tenth of a second. So parsers stand in modules that do not import it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib.metadata
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch.console.say import say

_INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it


# What stands for a path in parsers, as "metavar" or "dest" of an option.
_PATHS = frozenset({"FILE", "DIR", "FOLDER", "DATA", "MODEL", "log_dir", "training_script", "training_script_args"})


@dataclass(frozen=True)
class Command:
    """A subcommand: a line for ``guozhuang --help``, a function that returns its parser, and one that carries it out.

    Attributes:
        help: what it does, in a line.
        parser: returns the parser, whose ``prog`` is "guozhuang NAME", without importing torch.
        run: takes the words after the subcommand, and returns the exit code.
    """

    help: str
    parser: Callable[[], argparse.ArgumentParser]
    run: Callable[[Sequence[str]], int]


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
    command = COMMANDS.get(arguments[0]) if arguments else None
    try:
        if command is not None:
            return command.run(arguments[1:])
        if arguments and not arguments[0].startswith("-"):
            raise UsageError(_unknown(arguments[0]))
        _suggesting(parser()).parse_args(arguments or ["--help"])  # ends the process: no command was given
        return 2
    except (UsageError, WorldError) as error:
        say(str(error), "guozhuang")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        say("interrupted", "guozhuang")
        return _INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``guozhuang`` with those of all its subcommands, for its help and for completion."""
    made = argparse.ArgumentParser(
        prog="guozhuang",
        description="Train one PyTorch model on many processes, and see which way is best.",
    )
    made.add_argument("--version", action=_Version, nargs=0, help="show the versions of guozhuang, torch and Python")
    commands = made.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    return made


def _unknown(word: str) -> str:
    near = difflib.get_close_matches(word, COMMANDS, 1)
    fix = f"write guozhuang {near[0]}" if near else "see guozhuang --help"
    return explain(f"there is no such command; there are {', '.join(COMMANDS)}", value=word, fix=fix)


def _suggesting(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let a parser name the nearest option where an unknown one was given; return the parser."""
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    parser.error = functools.partial(_error, parser.error, known)  # type: ignore[method-assign]
    return parser


def _error(end: Callable[[str], NoReturn], known: Iterable[str], message: str) -> NoReturn:
    if message.startswith("unrecognized arguments"):
        unknown = [word.partition("=")[0] for word in re.findall(r"(?<=\s)--[^\s]+", message)]
        near = [each for word in unknown for each in difflib.get_close_matches(word, known, 1)]
        message += f". Did you mean {' '.join(dict.fromkeys(near))}?" if near else ""
    end(message)


class _Version(argparse.Action):
    """Prints the versions, which are looked up only then, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"guozhuang {_version('guozhuang')} (torch {_version('torch')}, Python {platform.python_version()})")
        parser.exit()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed; run from its source)"


def _open_closed() -> None:
    """Open standard streams that were closed (``2>&-``): else a file or socket would get their number, and what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
            os.set_inheritable(opened, True)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Let Ctrl-C end the process at once inside of the ``with`` block: an import of torch can swallow the exception."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        say("interrupted", "guozhuang")
        os._exit(_INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run_parser() -> argparse.ArgumentParser:
    from guozhuang.launch.options.arguments import parser

    return parser()


def _run(arguments: Sequence[str]) -> int:
    from guozhuang.launch.options.arguments import read

    with _importing():
        found = read(arguments, _suggesting)  # torchrun's parser is torch's
        from guozhuang import compat, public  # noqa: F401
        from guozhuang.launch import agent, local_run  # noqa: F401
        from guozhuang.launch.request import Request

    return agent.execute(found, Request(compat.extension()))


def _compare_parser() -> argparse.ArgumentParser:
    from guozhuang.lab.options import parser

    return parser()


def _compare(arguments: Sequence[str]) -> int:
    from guozhuang.lab.config import with_config

    found = with_config(_suggesting(_compare_parser()).parse_args(list(arguments)), arguments)
    with _importing():
        from guozhuang import compat, public  # noqa: F401
        from guozhuang.lab import compare

    return compare.run(found, compat.extension().python_path)


def _tune_parser() -> argparse.ArgumentParser:
    from guozhuang.lab.tune.arguments import parser

    return parser()


def _tune(arguments: Sequence[str]) -> int:
    found = _suggesting(_tune_parser()).parse_args(list(arguments))
    with _importing():
        from guozhuang import compat, public  # noqa: F401
        from guozhuang.lab.tune import command

    return command.run(found, compat.extension().python_path)


def _predict_parser() -> argparse.ArgumentParser:
    from guozhuang.lab.predict.arguments import parser

    return parser()


def _predict(arguments: Sequence[str]) -> int:
    found = _suggesting(_predict_parser()).parse_args(list(arguments))
    with _importing():
        from guozhuang import compat, public  # noqa: F401
        from guozhuang.lab.predict import command

    return command.run(found, compat.extension().python_path)


def _check_parser() -> argparse.ArgumentParser:
    from guozhuang.check.arguments import parser

    return parser()


def _check(arguments: Sequence[str]) -> int:
    found = _suggesting(_check_parser()).parse_args(list(arguments))
    with _importing():
        from guozhuang import public  # noqa: F401
        from guozhuang.check import command

    return command.execute(found)


def _plan_parser() -> argparse.ArgumentParser:
    from guozhuang.lab.planner.arguments import parser

    return parser()


def _plan(arguments: Sequence[str]) -> int:
    found = _suggesting(_plan_parser()).parse_args(list(arguments))
    from guozhuang.lab.planner import command

    if found.workload is None and found.profile is None and found.training_script is None:
        return command.execute(found)  # formulas alone, which need no torch
    with _importing():
        from guozhuang import compat, public  # noqa: F401

    return command.execute(found, compat.extension().python_path)


def _checkpoint_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="guozhuang checkpoint",
        description="Look into the checkpoints that gz.save and `run --checkpoint` have saved.",
    )
    actions = made.add_subparsers(title="actions", dest="action", required=True, metavar="ACTION")
    for name, does in (
        ("list", "list the checkpoints of a folder, the newest first"),
        ("show", "show what the newest whole one holds"),
        ("verify", "read everything and compare it with its hashes; exit code 1 if something differs"),
        ("export", "write the plain model of the newest whole one to a file"),
    ):
        action = actions.add_parser(name, help=does)
        action.add_argument(
            "path", type=Path, metavar="DIR", help="the DIR of --checkpoint, or one folder step-N in it"
        )
        if name == "show":
            action.add_argument("--tensors", action="store_true", help="list each parameter too")
        if name == "export":
            action.add_argument("output", metavar="FILE", help="FILE.safetensors, or FILE.pt for torch.load")
            action.add_argument("--model", type=int, default=0, metavar="N", help="which prepared model (default: 0)")
    return made


def _checkpoint(arguments: Sequence[str]) -> int:
    found = _suggesting(_checkpoint_parser()).parse_args(list(arguments))
    from guozhuang.checkpoint import command

    return command.execute(found)


def _completion_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="guozhuang completion",
        description="Print a shell script that completes commands, options and their choices. "
        'For bash: eval "$(guozhuang completion bash)" in ~/.bashrc. For zsh: guozhuang completion zsh > FOLDER/_guozhuang, '
        "where FOLDER is one of $fpath.",
    )
    made.add_argument("shell", choices=("bash", "zsh"), help="the shell to complete in")
    return made


def _completion(arguments: Sequence[str]) -> int:
    shell = _completion_parser().parse_args(list(arguments)).shell
    try:
        import shtab
    except ImportError:
        what = "completion needs the package shtab, which is not installed"
        raise UsageError(explain(what, fix=f"{sys.executable} -m pip install shtab")) from None
    made = argparse.ArgumentParser(prog="guozhuang")
    made.add_argument("--version", action=_Version, nargs=0, help="show versions")
    commands = made.add_subparsers()
    for name, command in COMMANDS.items():
        parser = command.parser()
        _add_completions(parser, shtab.FILE)
        commands.add_parser(name, help=command.help, parents=[parser], add_help=False)
    print(shtab.complete(made, shell))
    return 0


def _add_completions(parser: argparse.ArgumentParser, of_paths: Mapping[str, object]) -> None:
    """Let the options of a parser and of its subcommands complete paths, and choices that the command itself checks."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                _add_completions(subcommand, of_paths)
        elif action.metavar in _PATHS or action.dest in _PATHS:
            action.complete = of_paths  # type: ignore[attr-defined]
        elif isinstance(action.metavar, str) and "|" in action.metavar:
            action.choices = action.metavar.split("|")


COMMANDS = {
    "run": Command("start the ranks of a training script (takes torchrun's options)", _run_parser, _run),
    "check": Command("measure links and compare hosts, and say what is wrong", _check_parser, _check),
    "compare": Command("train the same workload under several strategies, side by side", _compare_parser, _compare),
    "predict": Command("measure one process for a minute, and predict many", _predict_parser, _predict),
    "plan": Command(
        "find the layout that is fastest within memory and money, and why not another", _plan_parser, _plan
    ),
    "tune": Command("race settings of a training here, and write a plan of the fastest", _tune_parser, _tune),
    "checkpoint": Command("list, show, verify and export checkpoints", _checkpoint_parser, _checkpoint),
    "completion": Command("print what lets bash or zsh complete this command line", _completion_parser, _completion),
}
