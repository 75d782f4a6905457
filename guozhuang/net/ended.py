"""Which ranks have ended with exit code 0, as their launchers tell ranks that may wait for them.

A rank that fails ends the others: its launcher sees to that. One that ends with 0 may have done its part, and a rank that waits
for it learns from nobody else that it will never come.
"""

from __future__ import annotations

import contextlib
from typing import Any

from guozhuang.net.store import innermost

_KEY = "guozhuang/ended ranks"  # in the store of the world, each followed by a space


def tell_ended(store: Any, rank: int) -> None:
    """Tell ranks that wait that the process of a rank has ended with 0; launchers call it.

    Args:
        store: the store of the world, without a prefix.
        rank: the rank that has ended.
    """
    store.append(_KEY, f"{rank} ")


def forget_ended(store: Any) -> None:
    """Remove what was told about the ranks of an earlier attempt, whose numbers other processes have from now on."""
    store.delete_key(_KEY)


def ended_with_0(store: Any) -> list[int]:
    """Return the ranks of which a launcher has told that they have ended with 0; none where the store does not answer.

    Args:
        store: the store of the world, or any part of it.
    """
    root = innermost(store)
    with contextlib.suppress(RuntimeError):
        if root.check([_KEY]):
            return sorted({int(text) for text in root.get(_KEY).split()})
    return []
