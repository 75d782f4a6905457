"""Rules for views, cuts and joins: in which dimension of the result the tokens are."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .divided import Place, by_gathering, cut_where_it_meets, divided, place_of, rule, whole_of


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Sizes or dimensions that may be given one by one, as one sequence, or by name."""
    rest = [*args[1:], *(kwargs[name] for name in names if name in kwargs)]
    return list(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest


@rule("transpose", "transpose_", "swapaxes", "swapdims", "t", "T", "mT", "permute", "movedim", "moveaxis", "H", "mH")
def _permuted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, name = args[0], str(getattr(func, "__name__", ""))
    place: Place = tensor.place
    num = tensor.dim()
    order = list(range(num))  # order[i] is where dimension i of the result comes from
    name = str(func.__self__.__name__) if name == "__get__" else name.strip("_")
    if name in ("transpose", "swapaxes", "swapdims", "mT", "mH", "t", "T", "H"):
        pair = (
            _given(args, kwargs, "dim0", "dim1", "axis0", "axis1")
            if name[0] in "s" or name == "transpose"
            else [-2, -1]
        )
        if name == "T" and num != 2:
            order.reverse()
        else:
            one, other = (each % num for each in pair)
            order[one], order[other] = other, one
    elif name == "permute":
        order = [each % num for each in _given(args, kwargs, "dims")]
    else:
        moved, to = args[1], args[2]
        sources = [each % num for each in ([moved] if isinstance(moved, int) else moved)]
        targets = [each % num for each in ([to] if isinstance(to, int) else to)]
        rest = iter(each for each in order if each not in sources)
        order = [sources[targets.index(i)] if i in targets else next(rest) for i in range(num)]
    return divided(func(*args, **kwargs), place.at(order.index(place.dim)))


def _viewed(tensor: Tensor, place: Place, shape: list[int]) -> tuple[list[int], Place] | None:
    """The local sizes and the place of a view; None if it would join tokens with the dimension before or behind in part."""
    whole = [*tensor.shape[: place.dim], place.size, *tensor.shape[place.dim + 1 :]]
    if -1 in shape:
        known = -math.prod(shape)
        shape = [math.prod(whole) // known if each == -1 and known else each for each in shape]
    before = math.prod(whole[: place.dim]) * place.outer
    at = 1
    for dim, size in enumerate(shape):
        if before * place.spans.length <= at * size and at <= before:
            outer, left = divmod(before, at)
            inner, over = divmod(size, outer * place.spans.length)
            if left or over:
                return None
            new = Place(dim, place.spans, place.team, outer, inner)
            return [*shape[:dim], new.local_size, *shape[dim + 1 :]], new
        at *= size
    return None


@rule("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, name = args[0], str(func.__name__)
    place = place_of(tensor)
    if place is None or (name == "view" and not isinstance(_given(args, kwargs, "shape", "size")[0], int)):
        return by_gathering(func, args, kwargs)  # `view_as` a divided tensor; a view of another type
    whole = [*tensor.shape[: place.dim], place.size, *tensor.shape[place.dim + 1 :]]
    if name == "flatten":
        start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0) % len(whole)
        end = kwargs.get("end_dim", args[2] if len(args) > 2 else -1) % len(whole)
        shape = [*whole[:start], math.prod(whole[start : end + 1]), *whole[end + 1 :]]
    elif name == "unflatten":
        dim, sizes = kwargs.get("dim", args[1] if len(args) > 1 else 0) % len(whole), kwargs.get("sizes", args[-1])
        missing = whole[dim] // max(1, -math.prod(sizes))
        shape = [*whole[:dim], *(missing if each == -1 else each for each in sizes), *whole[dim + 1 :]]
    elif name.endswith("_as"):
        like = args[1]
        there = place_of(like)
        shape = list(like.shape)
        if there is not None:
            shape[there.dim] = there.size
    else:
        shape = _given(args, kwargs, "shape", "size")
    found = _viewed(tensor, place, shape)
    if found is None:
        return by_gathering(func, args, kwargs)
    local, new = found
    return divided(tensor.view(local) if name.startswith("view") else tensor.reshape(local), new)


@rule("unsqueeze", "squeeze")
def _squeezed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims = args[0], _given(args, kwargs, "dim")
    place, num = tensor.place, tensor.dim()
    if func.__name__ == "unsqueeze":
        new = dims[0] % (num + 1)
        return divided(func(*args, **kwargs), place.at(place.dim + (new <= place.dim)))
    dims = [each % num for each in dims] if dims else list(range(num))
    dims = [each for each in dims if tensor.shape[each] == 1 and each != place.dim]
    return divided(tensor.squeeze(tuple(dims)), place.at(place.dim - sum(each < place.dim for each in dims)))


@rule("expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave")
def _expanded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, name = args[0], str(func.__name__)
    place = place_of(tensor)
    if name == "repeat_interleave":
        dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
        if place is None or dim is None or dim % tensor.dim() == place.dim:
            return by_gathering(func, args, kwargs)
        return divided(func(*args, **kwargs), place)
    if name == "expand_as":
        like = place_of(args[1])
        if place is None and like is not None:
            position = like.dim - args[1].dim()
            return divided(cut_where_it_meets(tensor, like, position).expand_as(args[1]), like)
        sizes = list(args[1].shape)
    else:
        sizes = _given(args, kwargs, "size", "sizes", "repeats", "dims")
    if place is None:
        return by_gathering(func, args, kwargs)
    position = place.dim - tensor.dim()
    repeats = name in ("repeat", "tile")
    if len(sizes) < -position and name == "tile":
        return divided(func(*args, **kwargs), place)
    if sizes[position] not in ((1,) if repeats else (-1, place.size, place.local_size if name == "expand_as" else -1)):
        return by_gathering(func, args, kwargs)
    if not repeats:
        sizes[position] = place.local_size
    result = tensor.repeat(*sizes) if repeats else tensor.expand(*sizes)
    return divided(result, place.at(result.dim() + position))


@rule(
    "chunk", "split", "unbind", "tensor_split", "narrow", "select", "split_with_sizes", "unsafe_chunk", "unsafe_split"
)
def _pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, name = args[0], str(func.__name__)
    place: Place = tensor.place
    position = 1 if name in ("unbind", "narrow", "select") else 2
    dim = kwargs.get("dim", args[position] if len(args) > position else 0) % tensor.dim()
    if dim == place.dim:
        return by_gathering(func, args, kwargs)
    new = place.at(place.dim - (dim < place.dim)) if name in ("unbind", "select") else place
    result = func(*args, **kwargs)
    return divided(result, new) if isinstance(result, Tensor) else type(result)([divided(each, new) for each in result])


@rule("__getitem__")
def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    place = place_of(tensor)
    simple = all(each is None or each is Ellipsis or isinstance(each, slice | int) for each in index)
    if place is None or not simple or any(isinstance(each, bool) for each in index):
        return by_gathering(func, args, kwargs)
    num_named = sum(each is not None and each is not Ellipsis for each in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    at, new = 0, 0  # the dimension of the tensor, and of the result
    found, local = None, list(index)
    for i, each in enumerate(index):
        if each is Ellipsis:
            skipped = tensor.dim() - num_named
            if at <= place.dim < at + skipped:
                found = new + place.dim - at
            at, new = at + skipped, new + skipped
        elif each is None:
            new += 1
        else:
            if at == place.dim:
                if isinstance(each, int) or each.indices(place.size) != (0, place.size, 1):
                    return by_gathering(func, args, kwargs)
                found, local[i] = new, slice(None)
            at, new = at + 1, new + isinstance(each, slice)
    assert found is not None, index
    return divided(tensor[tuple(local)], place.at(found))


@rule("cat", "concat", "concatenate", "stack")
def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    lead = next(each for each in tensors if place_of(each) is not None)
    place: Place = lead.place
    is_stack = func.__name__ == "stack"
    dim %= lead.dim() + is_stack
    if not is_stack:
        tensors = [each for each in tensors if tuple(each.shape) != (0,)]  # which torch allows anywhere
    if len(tensors) == 1 and not is_stack:
        return lead
    if not is_stack and dim == place.dim:
        # Tokens are added: the result is whole, inside of blocks too, as keys that follow those of a cache.
        return func([whole_of(each) for each in tensors], dim=dim)
    position = place.dim - lead.dim()

    def fit(value: Tensor) -> Tensor:
        here = place_of(value)
        if here is not None and here.dim == place.dim and here.is_like(place):
            return value
        return cut_where_it_meets(whole_of(value), place, position)  # type: ignore[no-any-return]

    result = func([fit(each) for each in tensors], dim=dim)
    return divided(result, place.at(place.dim + (is_stack and dim <= place.dim)))


@rule("pad")
def _padded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, pad = args[0], args[1] if len(args) > 1 else kwargs["pad"]
    place = place_of(tensor)
    if place is None or (
        tensor.dim() - place.dim <= len(pad) // 2 and any(pad[2 * (tensor.dim() - 1 - place.dim) :][:2])
    ):
        return by_gathering(func, args, kwargs)
    return divided(func(*args, **kwargs), place)
