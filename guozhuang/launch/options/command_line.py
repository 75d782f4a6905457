"""Separate the command line of ``guozhuang run`` from that of the script.

``argparse`` inspects every word before it passes the rest to the script, and so refuses a script's ``--max 3`` or ``-n``
because they resemble options of ours. So the command line is cut at the script first; all later words go to the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def read(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the words before the script; the words after it become ``training_script_args`` unchanged.

    Args:
        parser: torchrun's parser, or an extension of it: its positional arguments are the script and the script's arguments.
        arguments: all words after ``guozhuang run``.

    Raises:
        SystemExit: an unknown option, or no script; the parser has printed the error.
    """
    at = _script_at(parser, arguments)
    found = parser.parse_args(list(arguments[: at + 1]))
    found.training_script_args = list(arguments[at + 1 :])
    return found


def _script_at(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Return the index of the script: the first word that is no option or its value; the end if an option is unknown."""
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
    """Return the option that a word names, by argparse's rules, and whether the word contains its value."""
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
