"""Where the command line of ``guozhuang run`` ends and that of the script begins.

``argparse`` looks at every word before it gives the rest to the script, and so refuses a script's ``--max 3`` or ``-n`` for
being like an option of ours. So the command line is cut at the script first; what is behind belongs to the script alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def read(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse what stands before the script; what stands behind it becomes ``training_script_args``, untouched.

    Args:
        parser: torchrun's, or an extension of it: its positional arguments are the script and the script's own.
        arguments: all words after ``guozhuang run``.

    Raises:
        SystemExit: an unknown option, or no script; the parser has said so.
    """
    at = _script_at(parser, arguments)
    found = parser.parse_args(list(arguments[: at + 1]))
    found.training_script_args = list(arguments[at + 1 :])
    return found


def _script_at(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """The index of the first word that is no option and no option's value; the end where the parser has to say something."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return at + 1
        if not word.startswith("-") or word == "-":
            return at
        option, has_value = _option(parser, word)
        if option is None:
            return len(arguments)
        num_values = option.nargs if isinstance(option.nargs, int) else 1
        at += 1 if has_value else 1 + num_values
    return at


def _option(parser: argparse.ArgumentParser, word: str) -> tuple[argparse.Action | None, bool]:
    """The option that a word means, by argparse's rules, and whether its value is in the same word."""
    known = parser._option_string_actions
    name, equals, _ = word.partition("=")
    if word in known:
        return known[word], False
    if name in known:
        return known[name], bool(equals)
    if not word.startswith("--"):
        return known.get(word[:2]), True  # -Hhost:2
    fitting = {id(action): action for option, action in known.items() if option.startswith(name)}
    return (next(iter(fitting.values())) if len(fitting) == 1 else None), bool(equals)
