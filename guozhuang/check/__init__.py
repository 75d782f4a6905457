"""``guozhuang check``: the facts about hosts, ranks and links of a run, and rules that find what is wrong with them.

To read: ``results`` (the records), ``facts`` (about one rank), ``worker`` (one rank; rank 0 leads), ``steps`` (of a check),
``measure`` (pairs of ranks, all_reduce), ``verdict`` (rules; with ``netrules``, ``linkrules``, ``noderules``), ``table`` (the
terminal), ``command``.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Do what ``guozhuang check`` was asked for; see ``command.main``."""
    from guozhuang.check import command  # here, because a rank is a module of this package that is run by itself

    return command.main(arguments)
