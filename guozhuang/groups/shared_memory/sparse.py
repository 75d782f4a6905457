"""Sums over memory in which pages of zeros are marked, so that they are neither written by one side nor read by the other.

The gradient of an embedding is non-zero only in the few rows of a batch, and is most of a small language model.
Each rank's buffer has one byte per page of 4 KiB, its *mark*: 0 means that the page holds only zeros, 1 means that it may
hold anything; so code that writes to a page without :func:`take` must set the page's mark to 1 permanently. The buffer's
contents are exact in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

try:
    from . import _sparse
except ImportError:  # the C part was not built, so there are no shared-memory groups either
    _sparse = None  # type: ignore[assignment]

PAGE_BYTES: Final = 4096

#: (address to write, address to read, bytes, address of the mark of the first page written, or 0 for a plain copy).
Piece = tuple[int, int, int, int]


def take(pieces: Sequence[Piece]) -> None:
    """Copy memory into buffers without the GIL; a whole page of zeros is not copied, only marked as zero.

    The marks of partly covered pages become 1. A page that held other values and becomes zero is cleared.

    Args:
        pieces: the copies to make.
    """
    _sparse.take(pieces)


def add(dst: int, srcs: tuple[int, ...], marks: tuple[int, ...], num_bytes: int, dtype: int, scale: float) -> None:
    """Write ``scale`` times the sum of all sources, in the given order, to ``dst``; without the GIL.

    float16 and bfloat16 are added and scaled in float32, and rounded once.

    Args:
        dst: address; its memory must not overlap the sources.
        srcs: addresses that have the same offset within a page.
        marks: for each source, the address of its first page's mark.
        num_bytes: the size of one source; whole elements.
        dtype: a ``program.DType``, floating point only.
        scale: factor.
    """
    _sparse.add(dst, srcs, marks, num_bytes, dtype, scale)


def num_pages(address: int, num_bytes: int) -> int:
    """Return the number of pages that a memory range touches."""
    return (address + num_bytes - 1) // PAGE_BYTES - address // PAGE_BYTES + 1 if num_bytes else 0
