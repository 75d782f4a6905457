"""Views, cuts and joins: in which dimension of the result the parts are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .names import words
from .tensor import DividedTensor, Place, cut_where_it_meets, divided_among, handles


@handles("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "H", "mH")
def _permute(func: Any, input: DividedTensor, *args: Any, **kwargs: Any) -> Any:
    marked = func(
        torch.empty(tuple(range(2, input.dim() + 2)), device="meta"), *args, **kwargs
    )  # no two sizes are equal
    return input.like(func(input.local, *args, **kwargs), list(marked.shape).index(input.at + 2))


@handles("unsqueeze")
def _unsqueeze(func: Any, input: DividedTensor, dim: int) -> Any:
    dim %= input.dim() + 1
    return input.like(input.local.unsqueeze(dim), input.at + (dim <= input.at))


@handles("squeeze")
def _squeeze(func: Any, input: DividedTensor, dim: Any = None) -> Any:
    dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d for each in dims if input.shape[d := each % input.dim()] == 1}
    return input.like(input.local.squeeze(tuple(sorted(gone))), input.at - sum(d < input.at for d in gone))


def _viewed(place: Place, whole: torch.Size, shape: torch.Size) -> Place | None:
    """Return the place in a view of this shape; None if it would join the parts with the dimension before or behind in part."""
    before, at = math.prod(whole[: place.dim]) * place.outer, 1
    for dim, size in enumerate(shape):
        if before * place.spans.length <= at * size and at <= before:
            outer, left = divmod(before, at)
            inner, over = divmod(size, outer * place.spans.length)
            return None if left or over else Place(dim, place.spans, place.ranks, outer, inner)
        at *= size
    return None


@handles("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
def _view(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, DividedTensor) or (args and isinstance(args[0], torch.dtype)):
        return NotImplemented
    args = tuple(torch.empty(each.shape, device="meta") if isinstance(each, Tensor) else each for each in args)
    shape = func(torch.empty(input.shape, device="meta"), *args, **kwargs).shape
    place = _viewed(input.place, input.shape, shape)
    if place is None:
        return NotImplemented
    local = [*shape[: place.dim], place.local_size, *shape[place.dim + 1 :]]
    found = input.local.reshape(local)
    # Of one place the part may be viewed so where the whole is copied: what the model then changes in place is no view.
    is_copy = input.place.local_size == 1 and not _can_be_viewed(input, shape)
    return DividedTensor(found.clone() if is_copy else found, place)


def _can_be_viewed(input: DividedTensor, shape: torch.Size) -> bool:
    """Return whether the whole tensor, with its dimensions in memory in the order of the part's, has a view of this shape."""
    strides, sizes = input.local.stride(), input.local.shape
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], sizes[dim] == 1))
    try:
        torch.empty_permuted(input.shape, order, device="meta").view(shape)
    except RuntimeError:
        return False
    return True


@handles("expand", "expand_as", "broadcast_to", "repeat", "tile")
def _expand(func: Any, input: Any, *given: Any, **kwargs: Any) -> Any:
    name = func.__name__
    if name == "expand_as" and not isinstance(input, DividedTensor):
        like = given[0]
        return like.like(cut_where_it_meets(input, like.place, like.position).expand_as(like.local))
    first = given[0] if given else next(iter(kwargs.values()))
    sizes = list(first.shape if name == "expand_as" else given if isinstance(first, int) else first)
    position, repeats = input.position, name in ("repeat", "tile")
    sizes = [1] * (-position - len(sizes) if name == "tile" else 0) + sizes
    if sizes[position] not in ((1,) if repeats else (-1, input.shape[position])):
        return NotImplemented
    sizes[position] = 1 if repeats else -1
    local = input.local.repeat(sizes) if repeats else input.local.expand(sizes)
    return input.like(local, local.dim() + position)


@handles(*words("chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split unbind narrow select"))
def _pieces(func: Any, input: DividedTensor, *args: Any, **kwargs: Any) -> Any:
    takes_one, name = func.__name__ in ("unbind", "select"), func.__name__
    place = 0 if takes_one or name == "narrow" else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else 0) % input.dim()
    if dim == input.at:
        return NotImplemented
    found, at = func(input.local, *args, **kwargs), input.at - (takes_one and dim < input.at)
    return input.like(found, at) if isinstance(found, Tensor) else tuple(input.like(each, at) for each in found)


def index_of(input: Any, index: Any) -> tuple[list[Any], int] | None:
    """Return an index with one entry for each dimension, and None where it adds one, and where in it the divided dimension is.

    None is returned for an index by other things than slices, None and numbers.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(input, DividedTensor) or any(
        isinstance(each, bool) or not (each is None or each is Ellipsis or isinstance(each, slice | int))
        for each in given
    ):
        return None
    missing = input.dim() - sum(each is not None and each is not Ellipsis for each in given)
    where = given.index(Ellipsis) if Ellipsis in given else len(given)
    given[where : where + 1] = [slice(None)] * missing
    of_dims = [i for i, each in enumerate(given) if each is not None]
    return (given, of_dims[input.at]) if len(of_dims) == input.dim() else None


@handles("__getitem__")
def _pick(func: Any, input: Any, index: Any) -> Any:
    """Pick by slices, None, and numbers, all entries of the divided dimension."""
    given, i = index_of(input, index) or ([0], 0)
    if isinstance(given[i], int) or given[i].indices(input.shape[input.at]) != (0, input.shape[input.at], 1):
        return NotImplemented
    given[i] = slice(None)
    return input.like(input.local[tuple(given)], sum(not isinstance(each, int) for each in given[:i]))


@handles("cat", "concat", "concatenate", "stack")
def _join(func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    is_stack, lead = func.__name__ == "stack", next(divided_among(tensors))
    dim = kwargs.get("axis", dim) % (lead.dim() + is_stack)
    if not is_stack:
        tensors = [each for each in tensors if tuple(each.shape) != (0,)]  # which torch allows anywhere
        if len(tensors) == 1:
            return lead.like(lead.local.clone())
        if dim == lead.at:
            return NotImplemented
    local = func([cut_where_it_meets(each, lead.place, lead.position) for each in tensors], dim=dim)
    return lead.like(local, lead.at + (is_stack and dim <= lead.at))


@handles("pad", "constant_pad_nd")
def _pad(func: Any, input: Any, pad: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """Pad other dimensions; the pairs of the last one stand first."""
    if not isinstance(input, DividedTensor) or any(pad[-2 * input.position - 2 : -2 * input.position]):
        return NotImplemented
    return input.like(func(input.local, pad, *args, **kwargs))
