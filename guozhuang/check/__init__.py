"""``guozhuang check``: collects facts about the hosts, ranks and links of a run, and finds problems by rules.

Modules: ``results`` (the records), ``facts`` (about one rank), ``worker`` (one rank; rank 0 leads), ``steps`` (of a check),
``measure`` (pairs of ranks, all_reduce), ``verdict`` (rules; with ``netrules``, ``linkrules``, ``noderules``), ``table`` (the
terminal output), ``command`` (the command line).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run ``guozhuang check``; see ``command.main``."""
    # Not at the top: ``command`` imports ``worker``, which ``python -m guozhuang.check.worker`` would then load twice.
    from guozhuang.check import command

    return command.main(arguments)
