"""Operations that move, pick, join or sum rows and dimensions of divided tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_iter

from .exchange import extreme, fetch, total
from .ranges import RowPiece, padded_rows, parts, ranges_plan, rows_plan
from .tensor import SpaceTensor, divided_among, handles, mark_lost


def _positive(dim: int, num_dims: int) -> int:
    return dim + num_dims if dim < 0 else dim


def _made_of(
    divided: SpaceTensor, local: Tensor, pieces: tuple[RowPiece, ...], length: int, fill: float = 0.0
) -> SpaceTensor:
    """Return ``length`` rows that are made of pieces of the divided tensor's rows."""
    region = divided.region
    plan = rows_plan(pieces, length, divided.rows, region.size, region.index)
    return divided.like(fetch(region, local, divided.at, plan, fill), size=length)


@handles("enter", "summed", "gathered")
def _between_ranks_of_tensor_parallelism(func: Any, input: SpaceTensor, *args: Any) -> Any:
    return input.like(func(input.local, *args))


@handles("permute")
def _permute(func: Any, input: SpaceTensor, *dims: Any, **kwargs: Any) -> Any:
    order = kwargs.get("dims", dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)
    order = [_positive(each, input.dim()) for each in order]
    return input.like(input.local.permute(order), order.index(input.at))


@handles("transpose", "swapaxes", "swapdims")
def _transpose(func: Any, input: SpaceTensor, dim0: int, dim1: int) -> Any:
    first, second = _positive(dim0, input.dim()), _positive(dim1, input.dim())
    at = {first: second, second: first}.get(input.at, input.at)
    return input.like(input.local.transpose(first, second), at)


@handles("movedim", "moveaxis")
def _movedim(func: Any, input: SpaceTensor, source: Any, destination: Any) -> Any:
    marks = torch.arange(input.dim())
    shaped = torch.empty([int(each) + 2 for each in marks], device="meta").movedim(source, destination)
    return input.like(input.local.movedim(source, destination), list(shaped.shape).index(input.at + 2))


@handles("unsqueeze")
def _unsqueeze(func: Any, input: SpaceTensor, dim: int) -> Any:
    dim = _positive(dim, input.dim() + 1)
    return input.like(input.local.unsqueeze(dim), input.at + (dim <= input.at))


@handles("squeeze")
def _squeeze(func: Any, input: SpaceTensor, dim: Any = None) -> Any:
    dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d for each in dims if input.shape[d := _positive(each, input.dim())] == 1}
    return input.like(input.local.squeeze(tuple(sorted(gone))), input.at - sum(d < input.at for d in gone))


@handles("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
def _reshape(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Reshape what lies before and behind the divided dimension; a shape without that dimension is made of the whole."""
    if not isinstance(input, SpaceTensor) or (args and isinstance(args[0], torch.dtype)):
        return NotImplemented
    args = tuple(torch.empty(each.shape, device="meta") if isinstance(each, Tensor) else each for each in args)
    shape = list(func(torch.empty(input.shape, device="meta"), *args, **kwargs).shape)
    before = input.shape[: input.at].numel()
    for at, size in enumerate(shape):
        if size == input.rows and torch.Size(shape[:at]).numel() == before:
            shape[at] = input.local.shape[input.at]
            return input.like(input.local.reshape(shape), at)
    return NotImplemented


@handles("cat", "concat", "concatenate")
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    dim = kwargs.get("axis", dim)
    first = next(divided_among(tensors))
    dim = _positive(dim, first.dim())
    if dim == first.at or not _agree(first, tensors):
        return NotImplemented
    return first.like(torch.cat([_rows_of(each, first) for each in tensors], dim))


@handles("stack")
def _stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = next(divided_among(tensors))
    dim = _positive(dim, first.dim() + 1)
    if not _agree(first, tensors):
        return NotImplemented
    return first.like(torch.stack([_rows_of(each, first) for each in tensors], dim), first.at + (dim <= first.at))


def _agree(first: SpaceTensor, tensors: Sequence[Tensor]) -> bool:
    return all(
        each.dim() == first.dim()
        and each.shape[first.at] == first.rows
        and (not isinstance(each, SpaceTensor) or each.at == first.at)
        for each in tensors
    )


def _rows_of(tensor: Tensor, like: SpaceTensor) -> Tensor:
    if isinstance(tensor, SpaceTensor):
        return tensor.local
    start, stop = like.span
    return tensor.narrow(like.at, start, stop - start)


@handles("__getitem__")
def _getitem(func: Any, input: Any, index: Any) -> Any:
    """Pick by slices, None, and numbers that are not rows; rows are moved so that all ranks have their parts again."""
    if not isinstance(input, SpaceTensor):
        return NotImplemented
    given = list(index) if isinstance(index, tuple) else [index]
    if not all(each is None or each is Ellipsis or isinstance(each, slice | int) for each in given):
        return NotImplemented
    if any(isinstance(each, bool) for each in given):
        return NotImplemented
    missing = input.dim() - sum(each is not None and each is not Ellipsis for each in given)
    where = given.index(Ellipsis) if Ellipsis in given else len(given)
    given[where : where + 1] = [slice(None)] * missing
    dim, at, rows = 0, 0, range(input.rows)
    local_index = list(given)
    for i, each in enumerate(given):
        if each is None:
            at += dim <= input.at
            continue
        if dim == input.at:
            if isinstance(each, int):
                return NotImplemented
            rows, local_index[i] = rows[each], slice(None)
        elif isinstance(each, int):
            at -= dim < input.at
        dim += 1
    if len(rows) < input.region.size:
        return NotImplemented
    local = input.local
    if rows != range(input.rows):
        input = _made_of(input, local, (RowPiece(0, rows),), len(rows))
        local = mark_lost(input.local, "rows picked from an activation")
    return input.like(local[tuple(local_index)], input.at + at)


@handles("narrow")
def _narrow(func: Any, input: SpaceTensor, dim: int, start: Any, length: int) -> Any:
    start = int(start)
    dim, size = _positive(dim, input.dim()), input.shape[dim]
    start = start + size if start < 0 else start
    if start + length > size:
        return NotImplemented  # PyTorch says what is wrong
    return input[(slice(None),) * dim + (slice(start, start + length),)]


@handles("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_chunk", "unsafe_split")
def _split(func: Any, input: SpaceTensor, *args: Any, **kwargs: Any) -> Any:
    dim_given = kwargs.get(
        "dim", args[0 if func.__name__ == "unbind" else 1] if len(args) > (func.__name__ != "unbind") else 0
    )
    dim = _positive(dim_given, input.dim())
    if dim == input.at:
        return NotImplemented
    at = input.at - (func.__name__ == "unbind" and dim < input.at)
    return tuple(input.like(each, at) for each in func(input.local, *args, **kwargs))


@handles("pad", "constant_pad_nd")
def _pad(func: Any, input: SpaceTensor, pad: Sequence[int], mode: Any = "constant", value: float | None = None) -> Any:
    if not isinstance(mode, str):
        mode, value = "constant", mode
    behind = input.dim() - 1 - input.at  # the pairs of the last dimension stand first
    pads = [int(each) for each in pad]
    before, after = pads[2 * behind : 2 * behind + 2] or (0, 0)
    size, local = input.rows, input.local
    length = size + before + after
    wraps = size if mode == "circular" else size - 1 if mode == "reflect" else max(before, after, 0)
    if length < input.region.size or max(before, after) > wraps:
        return NotImplemented
    if before or after:
        pads[2 * behind : 2 * behind + 2] = [0, 0]
        input = _made_of(input, local, padded_rows(size, before, after, mode), length, value or 0.0)
    if any(pads):
        local = F.pad(input.local, pads, mode, value) if mode == "constant" else F.pad(input.local, pads, mode)
        input = input.like(local)
    return input


@handles("flip")
def _flip(func: Any, input: SpaceTensor, *dims: Any, **kwargs: Any) -> Any:
    given = kwargs.get("dims", dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)
    wanted = {_positive(each, input.dim()) for each in given}
    if input.at in wanted:
        input = _made_of(input, input.local, (RowPiece(0, range(input.rows - 1, -1, -1)),), input.rows)
    others = sorted(wanted - {input.at})
    return input.like(input.local.flip(others)) if others else input


@handles("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(func: Any, input: SpaceTensor, factor: int) -> Any:
    """Turn channels into rows or rows into channels: ``factor`` rows that belong together lie on one rank meanwhile."""
    region, size, makes_rows = input.region, input.rows, func.__name__ == "pixel_shuffle"
    num_rows = size * factor if makes_rows else size // factor
    if input.at != input.dim() - 2 or num_rows < region.size or (not makes_rows and size % factor):
        return NotImplemented
    together = tuple((a * factor, b * factor) for a, b in parts(size if makes_rows else num_rows, region.size))
    if makes_rows:
        plan = ranges_plan(num_rows, parts(num_rows, region.size), region.index, together)
        return input.like(fetch(region, func(input.local, factor), input.at, plan), size=num_rows)
    plan = ranges_plan(size, together, region.index)
    return input.like(func(fetch(region, input.local, input.at, plan), factor), size=num_rows)


def _dims(dim: Any, num_dims: int) -> tuple[int, ...]:
    given = range(num_dims) if dim is None or dim == () or dim == [] else [dim] if isinstance(dim, int) else dim
    return tuple(_positive(each, num_dims) for each in given)


def _reduced_at(input: SpaceTensor, dims: Sequence[int], keepdim: bool) -> int:
    return input.at if keepdim else input.at - sum(d < input.at for d in dims)


@handles("sum", "mean")
def _sum(
    func: Any, input: SpaceTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any
) -> Any:
    dims = _dims(kwargs.get("axis", dim), input.dim())
    if input.at not in dims:
        local = func(input.local, dims, keepdim=keepdim, dtype=dtype)
        return input.like(local, _reduced_at(input, dims, keepdim))
    mine = func(input.local, dims, keepdim=keepdim, dtype=dtype)
    if func.__name__ == "mean":  # a sum could overflow in 16 bits
        mine = mine * (input.local.shape[input.at] / input.rows)
    return total(input.region, mine)


@handles("amax", "amin")
def _extreme(func: Any, input: SpaceTensor, dim: Any = (), keepdim: bool = False) -> Any:
    dims = _dims(dim, input.dim())
    if input.at not in dims:
        return input.like(func(input.local, dims, keepdim), _reduced_at(input, dims, keepdim))
    found = extreme(input.region, input.local, dims, func.__name__ == "amax")
    return found if keepdim else found.squeeze(dims)


# Operations along one dimension, with the place of ``dim`` among their arguments and its default (None: over all).
_ALONG: dict[str, tuple[int, Any]] = {
    "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None), "cumsum": (1, None), "cumprod": (1, None),
    "logcumsumexp": (1, None), "argmax": (1, None), "argmin": (1, None), "max": (1, None), "min": (1, None),
    "prod": (1, None), "any": (1, None), "all": (1, None), "logsumexp": (1, None), "sort": (1, -1), "argsort": (1, -1),
    "topk": (2, -1), "kthvalue": (2, -1), "norm": (2, None), "normalize": (2, 1), "glu": (1, -1), "var": (1, None),
    "std": (1, None), "median": (1, None), "count_nonzero": (1, None), "repeat_interleave": (2, None), "roll": (2, None),
    "cummax": (1, None), "cummin": (1, None), "diff": (2, -1),
}  # fmt: skip


@handles(*_ALONG)
def _along(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute what goes along other dimensions than the divided one from this rank's rows alone."""
    place, default = _ALONG[func.__name__]
    dim = kwargs.get("dim", kwargs.get("dims", args[place - 1] if len(args) >= place else default))
    if not isinstance(input, SpaceTensor) or any(isinstance(each, Tensor) for each in tree_iter((args, kwargs))):
        return _two(func, input, *args, **kwargs)
    if dim is None or isinstance(dim, bool | str) or input.at in (dims := _dims(dim, input.dim())):
        return NotImplemented
    found = func(input.local, *args, **kwargs)

    def divided(local: Tensor) -> SpaceTensor:
        return input.like(local, input.at if local.dim() == input.dim() else _reduced_at(input, dims, False))

    return type(found)([divided(each) for each in found]) if isinstance(found, tuple) else divided(found)


def _two(func: Any, input: Any, other: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Compute ``max`` and ``min`` of two tensors, which go element by element."""
    if func.__name__ in ("max", "min") and not args and not kwargs and isinstance(other, Tensor):
        return (torch.maximum if func.__name__ == "max" else torch.minimum)(input, other)
    return NotImplemented


@handles("linear")
def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(input, SpaceTensor) or isinstance(weight, SpaceTensor) or input.at == input.dim() - 1:
        return NotImplemented
    return input.like(F.linear(input.local, weight, bias))


@handles("prelu")
def _prelu(func: Any, input: Any, weight: Tensor) -> Any:
    """Compute it with a slope for each channel, which lies in dimension 1."""
    if not isinstance(input, SpaceTensor) or isinstance(weight, SpaceTensor) or input.at == 1:
        return NotImplemented
    return input.like(func(input.local, weight))
