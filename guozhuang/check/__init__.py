"""``guozhuang check``: what the hosts, ranks and links of a run are like, and what is wrong with them.

To read: ``results`` (what is found out), ``facts`` (what one rank tells of itself), ``links`` (measuring a pair of ranks),
``conductor`` (rank 0 leads the others), ``rank`` (one rank's part; ``leader`` is rank 0's, ``board`` what they tell each other
before they are connected, ``serving`` what they do after that, ``ending`` signals), ``verdict`` (rules, with ``netrules``,
``linkrules`` and ``noderules``), ``table`` (the terminal), ``command`` (with ``reach`` and ``capturing``).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Do what ``guozhuang check`` was asked for; see ``command.main``."""
    from guozhuang.check import command  # here, because a rank is a module of this package that is run by itself

    return command.main(arguments)
