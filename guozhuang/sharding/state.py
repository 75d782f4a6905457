"""The optimizer's state, converted between whole parameters, as in PyTorch's checkpoints, and a rank's blocks.

A value in the state is *elementwise* if it has an element for each element of its weight; it is cut and joined like
the weight. Every other value must be one number (or an object that is no tensor): it belongs to the whole parameter, and
parameters may share a block only if these values are equal.

A *whole* parameter has one owner, which keeps its state as the optimizer made it: tensors of any shape, in dicts, lists and
tuples of any depth.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from ..errors import UsageError, explain
from ..gradients.buckets import dense_stride
from ..parallel.state import of_owners
from ..world.versions import all_gather_single
from .parts import Block, BucketLayout, Piece, in_memory_order

#: State of one parameter or one block, by name.
Values: TypeAlias = dict[str, Any]
# Keys under which PyTorch's optimizers keep one number per parameter: for a weight of 0 dimensions the shape does not tell.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})


def is_elementwise(key: str, value: object, weight: Tensor, who: str) -> bool:
    """Tell whether a value of an optimizer's state has an element for each element of the weight.

    Args:
        key: name of the value.
        value: the value in the optimizer's state.
        weight: the block or parameter it belongs to.
        who: name of the optimizer's class, for the error.

    Raises:
        UsageError: the value is a tensor that is neither elementwise nor one number.
    """
    if not isinstance(value, Tensor):
        return False
    if value.shape == weight.shape and not (value.dim() == 0 and key in _NUMBERS):
        return True
    if value.numel() == 1:
        return False
    what = (
        f"{who} keeps {key!r} of shape {tuple(value.shape)} for a weight of shape {tuple(weight.shape)}: neither one value per "
        "element nor one number"
    )
    raise UsageError(explain(what, fix="train with the strategy ddp, which leaves the optimizer whole"))


def regroup(old: Sequence[tuple[Block, Values]], blocks: Sequence[Block], weights: Sequence[Tensor]) -> list[Values]:
    """Convert the state of one rank to other blocks of the same elements. Not collective.

    Args:
        old: the present blocks with their state.
        blocks: the new, finer blocks.
        weights: the new blocks' weights, for the shapes.
    """
    holders: dict[int, list[tuple[Block, Piece, Values]]] = {}
    whole_ones: dict[int, Values] = {}
    for block, values in old:
        for piece in block.pieces:
            if block.is_whole:
                whole_ones[piece.parameter] = values
            else:
                holders.setdefault(piece.bucket, []).append((block, piece, values))
    found = []
    for block, weight in zip(blocks, weights, strict=True):
        if block.is_whole:
            found.append(whole_ones[block.pieces[0].parameter])
            continue
        new: Values = {}
        for source, piece, values in holders.get(block.bucket, ()):
            low, high = max(piece.offset, block.start), min(piece.offset + piece.end - piece.start, block.end)
            if low >= high:
                continue
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == (source.num_elements,):
                    into = new.setdefault(key, torch.zeros(weight.shape, dtype=value.dtype, device=value.device))
                    into[low - block.start : high - block.start] = value[low - source.start : high - source.start]
                else:
                    new.setdefault(key, copy.deepcopy(value))
        found.append(new)
    return found


def apart(full: Mapping[int, Values], layout: BucketLayout, parameters: Sequence[Tensor], who: str) -> frozenset[int]:
    """Return the parameters that cannot share blocks: numbers in their state differ from the usual ones of their group.

    Args:
        full: state by index of the parameter; parameters without state may be missing.
        layout: layout of the parameters.
        parameters: by index.
        who: name of the optimizer's class, for errors.
    """
    signs: dict[int, dict[int, str]] = {}
    for i, member in enumerate(layout.members):
        if member.is_whole:
            continue
        signs.setdefault(member.group, {})[i] = _sign(full.get(i, {}), parameters[i], who)
    odd: set[int] = set()
    for group in signs.values():
        usual = Counter(group.values()).most_common(1)[0][0]
        odd |= {i for i, sign in group.items() if sign != usual}
    return frozenset(odd)


def cut(
    full: Mapping[int, Values],
    parameters: Sequence[Tensor],
    blocks: Sequence[Block],
    weights: Sequence[Tensor],
    who: str,
) -> list[Values]:
    """Cut the state of one rank's blocks out of the state of whole parameters. Not collective.

    Args:
        full: state by index of the parameter. Parameters that share a block have equal numbers (see :func:`apart`).
        parameters: by index.
        blocks: this rank's blocks.
        weights: one per block.
        who: name of the optimizer's class, for errors.
    """
    found = []
    for block, weight in zip(blocks, weights, strict=True):
        if block.is_whole:
            found.append(copy.deepcopy(full.get(block.pieces[0].parameter, {})))
            continue
        new: Values = {}
        for piece in block.pieces:
            parameter = parameters[piece.parameter]
            for key, value in full.get(piece.parameter, {}).items():
                if is_elementwise(key, value, parameter, who):
                    into = new.setdefault(key, torch.zeros(weight.shape, dtype=value.dtype, device=weight.device))
                    start = piece.offset - block.start
                    part = in_memory_order(value, parameter)[piece.start : piece.end]
                    into[start : start + part.numel()].copy_(part)
                else:
                    new.setdefault(key, copy.deepcopy(value))
        found.append(new)
    return found


def whole(
    layout: BucketLayout,
    parameters: Sequence[Tensor],
    blocks: Sequence[Block],
    values: Sequence[Values],
    group: dist.ProcessGroup,
) -> dict[int, Values]:
    """Assemble the state of whole parameters from all ranks' blocks. Every rank must call it, with the same layout.

    Returns:
        For each parameter that has state: its values, with the parameter's shape, strides and device; the same on all ranks.
    """
    in_parts = [k for k, block in enumerate(blocks) if not block.is_whole]
    known = _known_by_any([blocks[k] for k in in_parts], [values[k] for k in in_parts], group)
    found: dict[int, Values] = {
        i: {key: value for key, (elementwise, value) in known[i].items() if not elementwise} for i in sorted(known)
    }
    for bucket in layout.buckets:
        if bucket.is_whole:
            continue
        kinds = sorted(
            {
                (key, str(value))
                for i in bucket.parameters
                for key, (elementwise, value) in known.get(i, {}).items()
                if elementwise
            }
        )
        for key, dtype_name in kinds:
            dtype = getattr(torch, dtype_name)
            flat = _gather_flat(layout, bucket.index, key, dtype, blocks, values, group)
            for i, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                if known.get(i, {}).get(key) == (True, dtype_name):
                    like = parameters[i]
                    new = torch.empty_strided(like.shape, dense_stride(like), dtype=dtype, device=like.device)
                    in_memory_order(new, like).copy_(flat[offset : offset + like.numel()])
                    found[i][key] = new
    # Give each parameter's values the order in which the optimizer made them.
    ordered = {i: {key: found[i][key] for key in known[i]} for i in found}
    if not any(bucket.is_whole for bucket in layout.buckets):
        return ordered
    mine = {b.pieces[0].parameter: v for b, v in zip(blocks, values, strict=True) if b.is_whole and v}
    theirs = of_owners(mine, parameters[0].device, group)
    return {i: (ordered | theirs)[i] for i in sorted({*ordered, *theirs})}


def _gather_flat(
    layout: BucketLayout,
    bucket: int,
    key: str,
    dtype: torch.dtype,
    blocks: Sequence[Block],
    values: Sequence[Values],
    group: dist.ProcessGroup,
) -> Tensor:
    flat_bucket = layout.buckets[bucket]
    start, end = flat_bucket.slice_of(group.rank())
    own = torch.zeros(end - start, dtype=dtype, device=flat_bucket.device)
    for block, state in zip(blocks, values, strict=True):
        if block.bucket == bucket and key in state and state[key].dtype == dtype:
            own[block.start - start : block.end - start] = state[key]
    flat = torch.empty(flat_bucket.num_elements, dtype=dtype, device=flat_bucket.device)
    all_gather_single(flat, own, group=group)
    return flat


def _known_by_any(
    blocks: Sequence[Block], values: Sequence[Values], group: dist.ProcessGroup
) -> dict[int, dict[str, tuple[bool, Any]]]:
    """Return for each parameter and key of its state, as any rank has it: (True, dtype) if elementwise, else (False, value)."""
    own: dict[int, dict[str, tuple[bool, Any]]] = {}
    for block, state in zip(blocks, values, strict=True):
        for piece in block.pieces:
            if state and piece.parameter not in own:
                own[piece.parameter] = {key: _summary(value, block) for key, value in state.items()}
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    known: dict[int, dict[str, tuple[bool, Any]]] = {}
    for theirs in reversed(everyone):
        known.update(theirs)
    return known


def _summary(value: object, block: Block) -> tuple[bool, Any]:
    if isinstance(value, Tensor) and value.shape == (block.num_elements,):
        return True, str(value.dtype).removeprefix("torch.")
    # Clone the tensor, because the optimizer will change its own, and the checkpoint must not change with it.
    return False, value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _sign(values: Values, parameter: Tensor, who: str) -> str:
    """Describe the state of a parameter: two parameters may share a block if their descriptions are equal."""
    parts: list[str] = []
    for key in sorted(values):
        value = values[key]
        if is_elementwise(key, value, parameter, who):
            parts.append(f"{key}: {value.dtype}")
        else:
            parts.append(f"{key} = {value.item()!r}" if isinstance(value, Tensor) else f"{key} = {value!r}")
    return ", ".join(parts)


def signs(full: Mapping[int, Values], parameters: Sequence[Tensor], are_whole: bool, who: str) -> list[str]:
    """Return a text for each parameter's state, with its keys, dtypes and numbers; ranks compare these texts."""
    return [
        f"parameter {i}: {_sign_of_whole(full[i]) if are_whole else _sign(full[i], parameters[i], who)}"
        for i in sorted(full)
    ]


def _sign_of_whole(values: Values) -> str:
    leaves, form = _pytree.tree_flatten(values)
    texts = [
        f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) and leaf.numel() != 1 else repr(leaf)
        for leaf in leaves
    ]
    return f"{form}: {', '.join(texts)}"


def check_kinds(pairs: Iterable[tuple[Tensor, Values]], who: str) -> None:
    """Raise if a value of the state is neither elementwise nor one number per parameter.

    Raises:
        UsageError: see :func:`is_elementwise`.
    """
    for weight, values in pairs:
        for key, value in values.items():
            is_elementwise(key, value, weight, who)
