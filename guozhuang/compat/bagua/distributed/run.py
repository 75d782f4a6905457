"""``python -m bagua.distributed.run``: torchrun's options and Bagua's. It is ``guozhuang run``, which has torchrun's."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch.distributed.run import get_args_parser

from guozhuang.compat.bagua.distributed.options import add_options, launch
from guozhuang.errors import UsageError, explain

__all__ = ["main"]

# Defaults that differ from those of ``guozhuang run``. A PET_ variable goes before them.
_DEFAULTS = {"nproc_per_node": "auto", "max_restarts": 3}


def words_for(argv: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
    """Return the command line of ``guozhuang run``, and the parsed options.

    Raises:
        UsageError: a PET_ variable has a value that its option does not accept.
    """
    try:
        parser = get_args_parser()
    except ValueError as error:
        what = f"an option that is on or off is neither by its PET_ variable: {error}"
        raise UsageError(explain(what, fix="set the variable to 1 or 0, or unset it")) from error
    parser.prog = "python -m bagua.distributed.run"
    of_torchrun = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    add_options(parser)
    ours = {name: value for name, value in _DEFAULTS.items() if f"PET_{name.upper()}" not in os.environ}
    parser.set_defaults(**ours)
    found = parser.parse_args(argv)
    words: list[str] = []
    for action in of_torchrun:
        value = getattr(found, action.dest)
        if action.dest in ours or value != action.default:
            words += [action.option_strings[-1], *([] if action.nargs == 0 else [str(value)])]
    return [*words, found.training_script, *found.training_script_args], found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; see ``options.launch`` for what it returns."""
    return launch(words_for, argv)


if __name__ == "__main__":
    sys.exit(main())
