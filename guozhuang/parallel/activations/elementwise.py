"""Operations that compute each place of a dimension from the same place of all operands, and what a tensor says of itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UsageError, explain
from ..random import divided as draws_part
from ..random import undivided
from .names import changes_in_place, name_of, words
from .tensor import DividedTensor, all_whole, cut_where_it_meets, divided_among, handles, whole_of


@handles("elementwise")  # the handler of all that are, whatever their names
def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute this rank's part of an operation on each element, with broadcasting."""
    name = name_of(func)
    changed = args[0] if args and isinstance(args[0], Tensor) else None
    in_place = changed is not None and changes_in_place(name)
    if name == "where" and len(args) + len(kwargs) < 3:
        return NotImplemented  # where the condition holds
    if in_place and not isinstance(changed, DividedTensor):  # a whole tensor is changed
        return func(*all_whole(args), **all_whole(kwargs))
    ours = list(divided_among((args, kwargs)))
    if name in ("to", "type_as") and not isinstance(changed, DividedTensor):  # the divided one says only which type
        return func(*[each.local if isinstance(each, DividedTensor) else each for each in args], **kwargs)
    # Of operands that are divided in several dimensions, as positions that are compared with each other, one stays divided.
    lead = changed if in_place else min(ours, key=lambda each: each.position)
    assert isinstance(lead, DividedTensor)
    place, position = lead.place, lead.position
    may_change = in_place or kwargs.get("inplace") or any(each is True for each in args)
    watched = [each for each in ours if not each.local.is_inference()] if may_change else []
    versions = [each.local._version for each in watched]
    args = tuple(cut_where_it_meets(each, place, position) for each in args)
    found = func(*args, **{key: cut_where_it_meets(each, place, position) for key, each in kwargs.items()})
    for each, version in zip(watched, versions, strict=True):
        if each.local._version != version:
            check_change(each)
    if in_place:
        return changed
    if isinstance(found, tuple):
        return type(found)([lead.like(each, each.dim() + position) for each in found])
    return lead.like(found, found.dim() + position) if isinstance(found, Tensor) else found


def mark_lost(copy: Tensor, why: str) -> Tensor:
    """Say of a part why a change in place of it would be lost, because PyTorch's own result would be a view. Returns it."""
    for each in (copy, copy._base):
        if each is not None:
            each.__dict__["change_is_lost"] = why
    return copy


def check_change(divided: DividedTensor) -> None:
    """Raise if a change in place would be lost."""
    local = divided.local
    if local.is_inference():
        return
    base = local if local._base is None else local._base
    why = getattr(base, "change_is_lost", None)
    if any(part is base for *_, parts in divided.place.ranks.copies for part in parts):
        why = "an activation of which the model has picked a view before"
    if why is not None:
        what, fix = (
            f"a change in place of {why} would be lost",
            "use an operation that returns its result, or train with",
        )
        value, rank = tuple(divided.shape), divided.place.ranks.rank
        raise UsageError(explain(what, value=value, rank=rank, fix=f"{fix} another strategy"))


@handles("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
def _new(func: Any, tensor: DividedTensor, *args: Any, **kwargs: Any) -> Any:
    """Make a whole tensor, equal on all ranks, of the divided one's type and device."""
    return func(tensor.local, *args, **kwargs)


@handles("requires_grad", "grad_fn", "grad", "_version", "output_nr")
def _of_local(func: Any, tensor: DividedTensor) -> Any:
    return func(tensor.local)


@handles("requires_grad_")
def _require_gradient(func: Any, tensor: DividedTensor, *args: Any, **kwargs: Any) -> DividedTensor:
    func(tensor.local, *args, **kwargs)
    return tensor


@handles(
    *words(
        "dropout dropout_ alpha_dropout bernoulli bernoulli_ rand_like randn_like randint_like normal_ uniform_ random_"
    ),
    *words(
        "exponential_ geometric_ cauchy_ log_normal_ feature_dropout dropout1d dropout2d dropout3d feature_alpha_dropout"
    ),
)
def _draw(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw this rank's part of what one process draws; whether a channel is dropped is drawn alike on all ranks."""
    if not isinstance(input, DividedTensor) or any(True for _ in divided_among((args, kwargs))):
        return NotImplemented
    place, version = input.place, None if input.local.is_inference() else input.local._version
    is_of_channels = place.dim > 1 and ("feature" in func.__name__ or func.__name__.endswith("d"))
    with undivided() if is_of_channels else draws_part(place.dim, place.own_ranges, place.size):
        found = func(input.local, *args, **kwargs)
    if version is not None and input.local._version != version:
        check_change(input)
    return input if found is input.local else input.like(found)


# Operations along one dimension or some, with the place of ``dim`` among their arguments and its default (None: over all).
_ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(
        words("sum mean var std amax amin max min argmax argmin softmax log_softmax softmin logsumexp"), (1, None)
    ),
    **dict.fromkeys(
        words("cumsum cumprod logcumsumexp cummax cummin any all prod var_mean std_mean median nansum"), (1, None)
    ),
    **dict.fromkeys(words("nanmean count_nonzero aminmax flip"), (1, None)),
    **dict.fromkeys(words("norm linalg_norm linalg_vector_norm roll repeat_interleave"), (2, None)),
    **dict.fromkeys(words("sort argsort glu"), (1, -1)),
    **dict.fromkeys(words("topk kthvalue diff"), (2, -1)),
    "normalize": (2, 1),
}


def dims_of(name: str, num_dims: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return along which dimensions an operation works, given those behind the tensor; None if along all, or unknown."""
    place, default = _ALONG[name]
    given = kwargs.get(
        "dim", kwargs.get("dims", kwargs.get("axis", args[place - 1] if len(args) >= place else default))
    )
    if name in ("flip", "count_nonzero") and len(args) > 1:
        given = args
    if not isinstance(given, int | tuple | list) or isinstance(given, bool):
        return None
    return tuple(each % num_dims for each in ([given] if isinstance(given, int) else given))


@handles(*_ALONG)
def _along(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute what goes along other dimensions than the divided one from this rank's part alone."""
    other = args[0] if args else kwargs.get("other")
    if func.__name__ in ("max", "min") and isinstance(other, Tensor) and len(args) + len(kwargs) == 1:
        return (torch.maximum if func.__name__ == "max" else torch.minimum)(input, other)  # of two, element by element
    if not isinstance(input, DividedTensor) or any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
        return NotImplemented
    dims = dims_of(func.__name__, input.dim(), args, kwargs)
    if not dims or input.at in dims:
        return NotImplemented
    found = func(input.local, *args, **kwargs)
    before = sum(dim < input.at for dim in set(dims))

    def divided(local: Tensor) -> DividedTensor:
        return input.like(local, input.at - (before if local.dim() < input.dim() else 0))

    return type(found)([divided(each) for each in found]) if isinstance(found, tuple) else divided(found)


@handles("layer_norm", "rms_norm", "native_layer_norm", "linear", "prelu", "local_response_norm", "channel_shuffle")
def _within(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute what looks at features or channels of each place only, where these are not divided."""
    name = func.__name__
    if not isinstance(input, DividedTensor) or any(True for _ in divided_among((args, kwargs))):
        return NotImplemented
    if name in ("prelu", "local_response_norm", "channel_shuffle"):
        is_within = input.at > 1 or (name == "prelu" and input.at == 0)
    else:
        shape = (args[0] if args else kwargs["normalized_shape"]) if "norm" in name else 1
        is_within = input.at < input.dim() - (1 if isinstance(shape, int) else len(shape))
    return input.like(func(input.local, *args, **kwargs)) if is_within else NotImplemented


@handles("embedding")
def _embed(
    func: Any, input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    """Look up each place; what depends on all of them (how often each number occurs) needs the whole."""
    ids = input if func is F.embedding else weight  # torch.embedding takes them in the other order
    if max_norm is not None or scale_grad_by_freq or not isinstance(ids, DividedTensor):
        return NotImplemented
    local = [each.local if each is ids else whole_of(each) for each in (input, weight)]
    return ids.like(func(*local, padding_idx, sparse=sparse))


@handles("one_hot")
def _one_hot(func: Any, input: DividedTensor, num_classes: int = -1) -> Any:
    return NotImplemented if num_classes == -1 else input.like(F.one_hot(input.local, num_classes))
