"""Sums over memory whose pages of zeros are known: they are neither written by the one side nor read by the other.

The gradient of an embedding has values in the few rows that a batch names, and it is most of a small language model.
Each rank's buffer has one byte per page of 4 KiB, its *mark*: 0 says that the page holds zeros only. A mark of 1 says
nothing; so whoever writes to a page by other means than :func:`take` sets its mark to 1 once and for all. The buffer
itself is exact either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

try:
    from . import _sparse
except ImportError:  # it was not built, so there are no shared-memory groups either
    _sparse = None  # type: ignore[assignment]

PAGE_BYTES: Final = 4096

#: (address to write, address to read, bytes, address of the mark of the page that is written first or 0: a plain copy).
Piece = tuple[int, int, int, int]


def take(pieces: Sequence[Piece]) -> None:
    """Copy memory into buffers, without the GIL, but for whole pages of zeros: they are only marked as such.

    Marks of pages that a piece covers in part become 1. A page that held something and becomes zero is cleared.

    Args:
        pieces: what to copy.
    """
    _sparse.take(pieces)


def add(dst: int, srcs: tuple[int, ...], marks: tuple[int, ...], num_bytes: int, dtype: int, scale: float) -> None:
    """Write ``scale`` times the sum of all sources, in their order, to ``dst``; without the GIL.

    float16 and bfloat16 are added and scaled in float32, and rounded once.

    Args:
        dst: address; apart from the sources.
        srcs: addresses that begin at the same place of a page.
        marks: for each source the address of the mark of its first page.
        num_bytes: of one source; whole elements.
        dtype: a ``program.DType`` of floating point.
        scale: factor.
    """
    _sparse.add(dst, srcs, marks, num_bytes, dtype, scale)


def num_pages(address: int, num_bytes: int) -> int:
    """How many pages the memory touches."""
    return (address + num_bytes - 1) // PAGE_BYTES - address // PAGE_BYTES + 1 if num_bytes else 0
