"""Codes of gradients, and the rows of a table that are used, on the CPU in as few passes over memory as they need, in C and
without the GIL.

A code that is put together from torch operations reads and writes the gradients eight times or more. Here a row is read once to
measure it and once to write its code, and the mean over ranks is taken while the codes are decoded. The bits are those of the
torch operations of the codec, which do the work where the C module was not built, and on other devices.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

try:
    from . import _codes
except ImportError:  # it was not built: torch does the work
    _codes = None  # type: ignore[assignment]
try:
    from . import _rows
except ImportError:
    _rows = None  # type: ignore[assignment]

_MAX_ROWS = 4096


class CodeKind(enum.IntEnum):
    """Which code; the numbers stand in _codes.c too."""

    MIN_MAX_8 = 0
    DITHERING = 1
    SIGNS = 2
    SIGNS_ALONE = 3
    NATURAL_DITHERING = 4


class Task(enum.IntEnum):
    """What to do; the numbers stand in _codes.c too.

    MEAN writes one row: the codes' values added in their order, and divided by their number.
    """

    ENCODE = 0
    DECODE = 1
    MEAN = 2


def serves(rows: Tensor, codes: Tensor) -> bool:
    """Tell whether :func:`run` can do it: it was built, and the tensors are what it takes."""
    return (
        _codes is not None
        and rows.device.type == codes.device.type == "cpu"
        and rows.dtype == torch.float32
        and rows.numel() > 0
        and rows.stride(1) == codes.stride(1) == 1
        and codes.shape[0] <= _MAX_ROWS
    )


def run(
    kind: CodeKind,
    task: Task,
    rows: Tensor,
    codes: Tensor,
    bits: int = 8,
    block: int = 8,
    seeds: tuple[int, int] = (0, 0),
    lost: Tensor | None = None,
) -> None:
    """Do a task; :func:`serves` holds.

    Args:
        kind: of the code.
        task: what is read and what is written.
        rows: (rows, elements), or (1, elements) for the mean.
        codes: (rows, bytes), as long as the codec says.
        bits: of an element, for codes by blocks.
        block: elements that share a scale.
        seeds: of what is drawn at random, both below 2 ** 32.
        lost: to encode ``rows + lost``, by blocks, and to write there what the code loses; as ``rows``.
    """
    assert rows.shape[0] == (1 if task is Task.MEAN else codes.shape[0])
    where = (rows.data_ptr(), rows.stride(0)), (codes.data_ptr(), codes.stride(0))
    feedback = (0, 0) if lost is None else (lost.data_ptr(), lost.stride(0))
    _codes.code(kind, task, *where, feedback, codes.shape[0], rows.shape[1], (bits, block, *seeds))


def used_rows(table: Tensor) -> Tensor:
    """Return the numbers of the rows that are not all zeros of either sign, rising, as int64. NaN is not zero.

    Args:
        table: (rows, columns) of real floating-point numbers of 2, 4 or 8 bytes, contiguous.
    """
    if _rows is None or table.device.type != "cpu":
        return table.ne(0).any(1).nonzero().view(-1)
    numbers = torch.empty(table.shape[0], dtype=torch.int64)
    row_bytes = table.shape[1] * table.element_size()
    found = _rows.used(table.data_ptr(), table.shape[0], row_bytes, table.element_size(), numbers.data_ptr())
    return numbers[:found].clone()
