"""The rule for ``scaled_dot_product_attention``: by heads (Ulysses) or by a ring.

By heads (Jacobs et al., DeepSpeed Ulysses, 2023, arXiv:2309.14509): an all-to-all turns parts of the tokens with all heads into
all tokens with a part of the heads, attention runs as in one process, and another all-to-all turns its output back. It needs a
number of heads that divides by the ranks. A ring takes any number of heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from guozhuang.errors import UsageError, explain

from ..random import divided as draws_part
from .divided import Place, by_gathering, cut, cut_where_it_meets, divided, place_of, rule, whole_of
from .kernels import Tile
from .ring import RingOfKeys, ring_attention
from .spans import Span
from .team import to_heads, to_tokens

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@rule("scaled_dot_product_attention")
def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, **dict(zip(_NAMES, args, strict=False)), **kwargs}
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    here, of_key, of_value = (place_of(each) for each in (query, key, value))
    positions = [
        None if p is None else p.dim - each.dim() for p, each in ((here, query), (of_key, key), (of_value, value))
    ]
    if here is None:
        mask = whole_of(given.pop("attn_mask"))
        return func(query, whole_of(key), whole_of(value), attn_mask=mask, **given)
    if positions[0] == -1:
        return by_gathering(func, args, kwargs)
    if positions[0] != -2:
        return _independent(func, query, key, value, here, given)
    if positions[1:] != [-2, -2] or not of_key.is_like(of_value):  # type: ignore[union-attr, arg-type]
        return _to_whole(query, whole_of(key), whole_of(value), here, given)
    assert of_key is not None
    if not here.outer == here.inner == of_key.outer == of_key.inner == 1:
        return by_gathering(func, args, kwargs)
    result = _to_divided(query, key, value, here, of_key, given)
    return divided(result, here.at(result.dim() - 2))


def _independent(func: Any, query: Tensor, key: Tensor, value: Tensor, place: Place, given: dict[str, Any]) -> Tensor:
    """Attention that is divided by what it does not join: samples, or heads."""
    position, mask = place.dim - query.dim(), given.pop("attn_mask")

    def fit(each: Tensor) -> Tensor:
        there = place_of(each)
        is_same = there is not None and there.dim - each.dim() == position and there.is_like(place)
        return each if is_same else cut_where_it_meets(whole_of(each), place, position)

    mask = None if mask is None else fit(mask)
    with _dropping(given["dropout_p"], place.dim, place.own_ranges, place.size):
        result: Tensor = func(query, fit(key), fit(value), attn_mask=mask, **given)
    return divided(result, place.at(result.dim() + position))


def _to_whole(query: Tensor, key: Tensor, value: Tensor, place: Place, given: dict[str, Any]) -> Tensor:
    """Attention of divided queries to keys that every rank has whole, as those of a cache."""
    mask = given.pop("attn_mask")
    if given.pop("is_causal"):
        mask = torch.ones(place.size, key.shape[-2], dtype=torch.bool, device=query.device).tril()
    with _dropping(given["dropout_p"], place.dim, place.own_ranges, place.size):
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=_rows(mask, place), **given)
    return divided(result, place.at(result.dim() - 2))


def _dropping(dropped: float, dim: int, spans: Iterable[Span], size: int) -> AbstractContextManager[object]:
    """Attention within draws these spans of the weights that one process drops."""
    return draws_part(dim, spans, size) if dropped else contextlib.nullcontext()


def _rows(mask: Tensor | None, place: Place) -> Tensor | None:
    """This rank's rows of a mask, unless one row serves all queries."""
    there = place_of(mask)
    if mask is None or (there is not None and there.dim == mask.dim() - 2 and there.is_like(place)):
        return mask
    mask = whole_of(mask)
    assert mask is not None
    return cut(mask, place, -2) if mask.dim() > 1 and mask.shape[-2] != 1 else mask


def _four(tensor: Tensor) -> Tensor:
    """With the dimensions batch and heads, whatever stands before the tokens."""
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor


def _to_divided(
    query: Tensor, key: Tensor, value: Tensor, place: Place, of_key: Place, given: dict[str, Any]
) -> Tensor:
    team, shape, width = place.team, query.shape, value.shape[-1]
    mask, dropped, is_causal = given["attn_mask"], given["dropout_p"], given["is_causal"]
    scale = given.get("scale")
    if mask is not None and mask.dim() > 4:
        mask = whole_of(mask).expand(*shape[:-2], *mask.shape[-2:])
    leading = torch.broadcast_shapes(
        *(each.shape[: -2 if not given.get("enable_gqa") else -3] for each in (query, key, value))
    )
    query, key, value = (
        each.expand(*leading, *each.shape[-2 if not given.get("enable_gqa") else -3 :]) for each in (query, key, value)
    )
    query, key, value = (_four(each) for each in (query, key, value))
    num_heads, num_groups = query.shape[1], key.shape[1]
    way = team.attention
    if way == "auto":
        way = "ring" if num_heads % team.size else "ulysses"
    if way == "ulysses":
        if num_heads % team.size:
            raise UsageError(
                explain(
                    f"Attention cannot be divided by heads over {team.size} ranks",
                    value=f"{num_heads} heads",
                    rank=team.rank,
                    fix='leave the choice to "auto", take attention="ring", or a number of ranks that divides the heads',
                )
            )
        # Groups of keys are repeated as often as it takes for their number to divide by the ranks.
        factor = next(
            f for f in range(1, num_heads + 1) if not num_groups * f % team.size and not num_heads % (num_groups * f)
        )
        key, value = (each.repeat_interleave(factor, 1) if factor > 1 else each for each in (key, value))
        own = num_heads // team.size
        heads = (team.rank * own, (team.rank + 1) * own)
        mask = None if mask is None else _four(whole_of(mask))
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, slice(*heads)].contiguous()  # a copy: the whole mask need not be kept for the backward
        query, key, value = (
            to_heads(each, spans, team)
            for each, spans in ((query, place.spans), (key, of_key.spans), (value, of_key.spans))
        )
        with _dropping(dropped, 1, (heads,), num_heads):
            result = F.scaled_dot_product_attention(
                *(query, key, value, mask, dropped, is_causal),
                scale=scale,
                enable_gqa=num_groups * factor != num_heads,
            )
        result = to_tokens(result, place.spans, team)
    else:
        if mask is not None and is_causal:
            raise RuntimeError(
                "scaled_dot_product_attention takes an attn_mask or is_causal=True, not both"
            )  # as torch's
        rows = _rows(mask, place)
        keep = None
        if dropped:
            ones = query.new_ones(*query.shape[:-1], of_key.spans.length)
            with draws_part(2, place.spans.of_ranks[team.rank], place.spans.length):
                keep = F.dropout(ones, dropped) != 0
        team.sees_causal |= is_causal
        tile = Tile(query.shape[-1] ** -0.5 if scale is None else scale, is_causal, None, keep, dropped)
        if rows is not None:
            rows = _four(rows).expand(-1, -1, -1, of_key.spans.length)
        query, key, value = _cast(query, key, value)
        result = ring_attention(query, key, value, rows, RingOfKeys(team, place.spans, of_key.spans), tile)
    return result.reshape(*shape[:-1], width)


def _cast(*tensors: Tensor) -> list[Tensor]:
    """The operands in the type that autocast gives to attention."""
    kind = tensors[0].device.type
    return (
        [each.to(torch.get_autocast_dtype(kind)) for each in tensors]
        if torch.is_autocast_enabled(kind)
        else list(tensors)
    )
