"""What the launcher of several hosts tells the agent of one, which that agent could not know by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Outer:
    """The launcher around an agent; as it stands, there is none.

    Attributes:
        attempt: how many times the launcher has started all ranks before.
        max_restarts: how many times it may; None: the agent restarts its ranks itself.
        terminals: for standard output and standard error, whether what is written there ends on a terminal, and whether it
            is to be coloured; None: as the agent's own say.
        finished: called when the ranks of the node have ended well, and those of other nodes are waited for.
    """

    attempt: int = 0
    max_restarts: int | None = None
    terminals: tuple[tuple[bool, bool], tuple[bool, bool]] | None = None
    finished: Callable[[], None] = _nothing
