"""C kernels for the CPU, which run without the GIL: they code gradients, and find the used rows of a table.

A code that is composed of torch operations reads and writes the gradients eight times or more. Here a row is read once to find
its scale and once to write its code, and the mean over ranks is computed while the codes are decoded. The results have the bits
of the codec's torch operations, which are used if the C module was not built, and on other devices.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

try:
    from . import _codes
except ImportError:  # the C module was not built, so torch operations are used
    _codes = None  # type: ignore[assignment]
try:
    from . import _rows
except ImportError:
    _rows = None  # type: ignore[assignment]

_MAX_ROWS = 4096


class CodeKind(enum.IntEnum):
    """The lossy codes that the C kernel can compute; the numbers must be those in _codes.c."""

    MIN_MAX_8 = 0
    DITHERING = 1
    SIGNS = 2
    SIGNS_ALONE = 3
    NATURAL_DITHERING = 4


class Task(enum.IntEnum):
    """The tasks of the C kernel; the numbers must be those in _codes.c.

    MEAN writes one row: the decoded values of all codes, added in the order of the codes, and divided by their number.
    """

    ENCODE = 0
    DECODE = 1
    MEAN = 2


def serves(rows: Tensor, codes: Tensor) -> bool:
    """Return whether :func:`run` can be called: the C module was built, and it supports these tensors."""
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
    """Encode or decode rows in the C kernel; :func:`serves` must have returned True for these tensors.

    Args:
        kind: the code.
        task: whether to encode, to decode, or to decode to the mean.
        rows: (rows, elements), or (1, elements) for the mean; ENCODE reads them, the other tasks write them.
        codes: (rows, bytes), of the length that the codec's ``row_bytes`` returns.
        bits: the bits of an element, for codes by blocks.
        block: how many elements share a scale.
        seeds: two seeds of the random numbers, both below 2 ** 32.
        lost: for codes by blocks: if given, ``rows + lost`` is encoded, and its error is written here; shaped like ``rows``.
    """
    assert rows.shape[0] == (1 if task is Task.MEAN else codes.shape[0])
    where = (rows.data_ptr(), rows.stride(0)), (codes.data_ptr(), codes.stride(0))
    feedback = (0, 0) if lost is None else (lost.data_ptr(), lost.stride(0))
    _codes.code(kind, task, *where, feedback, codes.shape[0], rows.shape[1], (bits, block, *seeds))


def used_rows(table: Tensor) -> Tensor:
    """Return the indices of the rows with an element other than 0.0 and -0.0 (NaN counts), ascending, as int64.

    Args:
        table: (rows, columns) of real floating-point numbers of 2, 4 or 8 bytes, contiguous.
    """
    if _rows is None or table.device.type != "cpu":
        return table.ne(0).any(1).nonzero().view(-1)
    numbers = torch.empty(table.shape[0], dtype=torch.int64)
    row_bytes = table.shape[1] * table.element_size()
    found = _rows.used(table.data_ptr(), table.shape[0], row_bytes, table.element_size(), numbers.data_ptr())
    return numbers[:found].clone()
