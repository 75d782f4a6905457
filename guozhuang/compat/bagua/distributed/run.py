"""``python -m bagua.distributed.run``: torchrun's options and Bagua's. It is ``guozhuang run``, which has torchrun's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch.distributed.run import get_args_parser

from guozhuang.compat.bagua.distributed.options import add_options, launch

__all__ = ["main"]

_RESTARTS = "3"


def words_for(argv: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
    """Return the command line of ``guozhuang run``, and the parsed options."""
    parser = get_args_parser()
    parser.prog = "python -m bagua.distributed.run"
    of_torchrun = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    add_options(parser)
    parser.set_defaults(max_restarts=None)
    found = parser.parse_args(argv)
    words: list[str] = []
    for action in of_torchrun:
        value = getattr(found, action.dest)
        if action.dest == "max_restarts":
            words += ["--max-restarts", str(_RESTARTS if value is None else value)]
        elif value != action.default:
            words += [action.option_strings[-1], *([] if action.nargs == 0 else [str(value)])]
    return [*words, found.training_script, *found.training_script_args], found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; see ``options.launch`` for what it returns."""
    return launch(words_for, argv)


if __name__ == "__main__":
    sys.exit(main())
