"""Operations that move, pick or sum rows of divided images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F

from ..activations.elementwise import dims_of, mark_lost
from ..activations.tensor import DividedTensor
from ..activations.views import index_of
from ..spans import parts
from .exchange import extreme, fetch, total
from .ranges import RowPiece, padded_rows, ranges_plan, rows_plan
from .region import handles_rows, made_of_rows


def _made_of(input: DividedTensor, pieces: tuple[RowPiece, ...], length: int, fill: float = 0.0) -> DividedTensor:
    """Return ``length`` rows that are made of pieces of the divided tensor's rows."""
    ranks = input.place.ranks
    plan = rows_plan(pieces, length, input.place.size, ranks.size, ranks.rank)
    return made_of_rows(input, fetch(ranks, input.local, input.at, plan, fill), length)


@handles_rows("__getitem__")
def _pick(func: Any, input: Any, index: Any) -> Any:
    """Pick rows by a slice; they are moved so that all ranks have their parts again."""
    given, i = index_of(input, index) or ([0], 0)
    if isinstance(given[i], int):
        return NotImplemented
    rows = range(input.place.size)[given[i]]
    if len(rows) < input.place.ranks.size or len(rows) == input.place.size == rows.stop:
        return NotImplemented
    given[i] = slice(None)
    moved = _made_of(input, (RowPiece(0, rows),), len(rows))
    mark_lost(moved.local, "rows picked from an activation")
    input.place.ranks.watch(moved.local, [input.local])
    return moved[tuple(given)]


@handles_rows("narrow")
def _narrow(func: Any, input: DividedTensor, dim: int, start: Any, length: int) -> Any:
    start, dim = int(start), dim % input.dim()
    start = start + input.shape[dim] if start < 0 else start
    if dim != input.at or start + length > input.shape[dim]:
        return NotImplemented  # PyTorch says what is wrong
    return input[(slice(None),) * dim + (slice(start, start + length),)]


@handles_rows("pad", "constant_pad_nd")
def _pad(
    func: Any, input: DividedTensor, pad: Sequence[int], mode: Any = "constant", value: float | None = None
) -> Any:
    if not isinstance(mode, str):
        mode, value = "constant", mode
    of_rows = slice(-2 * input.position - 2, -2 * input.position)  # the pairs of the last dimension stand first
    pads = [int(each) for each in pad]
    before, after = pads[of_rows] or (0, 0)
    size = input.place.size
    length = size + before + after
    wraps = size if mode == "circular" else size - 1 if mode == "reflect" else max(before, after, 0)
    if not (before or after) or length < input.place.ranks.size or max(before, after) > wraps:
        return NotImplemented
    pads[of_rows] = [0, 0]
    moved = _made_of(input, padded_rows(size, before, after, mode), length, value or 0.0)
    return F.pad(moved, pads, mode, value) if any(pads) else moved


@handles_rows("flip")
def _flip(func: Any, input: DividedTensor, *args: Any, **kwargs: Any) -> Any:
    dims = dims_of("flip", input.dim(), args, kwargs) or ()
    if input.at not in dims:
        return NotImplemented
    moved = _made_of(input, (RowPiece(0, range(input.place.size - 1, -1, -1)),), input.place.size)
    others = sorted(set(dims) - {input.at})
    return moved.like(moved.local.flip(others)) if others else moved


@handles_rows("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(func: Any, input: DividedTensor, factor: int) -> Any:
    """Turn channels into rows or rows into channels: ``factor`` rows that belong together lie on one rank meanwhile."""
    ranks, size, makes_rows = input.place.ranks, input.place.size, func.__name__ == "pixel_shuffle"
    num_rows = size * factor if makes_rows else size // factor
    if input.at != input.dim() - 2 or num_rows < ranks.size or (not makes_rows and size % factor):
        return NotImplemented
    together = tuple((a * factor, b * factor) for a, b in parts(size if makes_rows else num_rows, ranks.size))
    if makes_rows:
        plan = ranges_plan(num_rows, parts(num_rows, ranks.size), ranks.rank, together)
        local = fetch(ranks, func(input.local, factor), input.at, plan)
    else:
        local = func(fetch(ranks, input.local, input.at, ranges_plan(size, together, ranks.rank)), factor)
    return made_of_rows(input, local, num_rows)


@handles_rows("sum", "mean", "amax", "amin")
def _over_rows(func: Any, input: DividedTensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dim = kwargs.pop("axis", dim)
    dims = tuple(range(input.dim())) if dim in (None, (), []) else dims_of(func.__name__, input.dim(), (dim,), {})
    if dims is None or input.at not in dims:
        return NotImplemented
    if func.__name__ in ("amax", "amin"):
        found = extreme(input.place.ranks, input.local, dims, func.__name__ == "amax")
        return found if keepdim else found.squeeze(dims)
    mine = func(input.local, dims, keepdim=keepdim, **kwargs)
    if func.__name__ == "mean":  # a sum could overflow in 16 bits
        mine = mine * (input.local.shape[input.at] / input.place.size)
    return total(input.place.ranks, mine)
