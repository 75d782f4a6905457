"""The rule for ``scaled_dot_product_attention``: by heads (Ulysses) or by a ring.

By heads (Jacobs et al., DeepSpeed Ulysses, 2023, arXiv:2309.14509): an all-to-all turns parts of the tokens with all heads into
all tokens with a part of the heads, attention runs as in one process, and another all-to-all turns its output back. It needs a
number of heads that divides by the ranks. A ring takes any number of heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UsageError, explain
from ..activations.products import autocast, dropping
from ..activations.tensor import DividedTensor, cut_where_it_meets, handles, whole_of
from ..random import divided as draws_part
from .kernels import Tile
from .ring import RingOfKeys, ring_attention
from .team import Team, to_heads, to_tokens


@handles("scaled_dot_product_attention", ranks=Team)
def _attend(
    func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    **given: Any,
) -> Any:  # fmt: skip
    """Compute attention of queries, keys and values that are divided by tokens."""
    for each in (query, key, value):
        if not isinstance(each, DividedTensor) or each.position != -2 or each.place.is_folded:
            return NotImplemented
    if not key.place.is_like(value.place):
        return NotImplemented
    result = _to_divided(query, key, value, attn_mask, dropout_p, is_causal, **given)
    return query.like(result, result.dim() - 2)


def _four(tensor: Tensor) -> Tensor:
    """With the dimensions batch and heads, whatever stands before the tokens."""
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor


def _to_divided(
    query: Any, key: Any, value: Any, mask: Any, dropped: float, is_causal: bool, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    place, of_key, team = query.place, key.place, query.place.ranks
    query, key, value = query.local, key.local, value.local
    shape, width, trailing = query.shape, value.shape[-1], -3 if enable_gqa else -2
    if mask is not None and mask.dim() > 4:
        mask = whole_of(mask)
        mask = mask.expand(*shape[:-2], *mask.shape[-2:])
    leading = torch.broadcast_shapes(*(each.shape[:trailing] for each in (query, key, value)))
    query, key, value = (_four(each.expand(*leading, *each.shape[trailing:])) for each in (query, key, value))
    num_heads, num_groups = query.shape[1], key.shape[1]
    way = team.attention
    if way == "auto":
        way = "ring" if num_heads % team.size else "ulysses"
    if way == "ulysses":
        if num_heads % team.size:
            what = f"Attention cannot be divided by heads over {team.size} ranks"
            fix = 'leave the choice to "auto", take attention="ring", or a number of ranks that divides the heads'
            raise UsageError(explain(what, value=f"{num_heads} heads", rank=team.rank, fix=fix))
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
        with dropping(dropped, 1, (heads,), num_heads):
            is_grouped = num_groups * factor != num_heads
            result = F.scaled_dot_product_attention(
                query, key, value, mask, dropped, is_causal, scale=scale, enable_gqa=is_grouped
            )
        result = to_tokens(result, place.spans, team)
    else:
        if mask is not None and is_causal:
            raise RuntimeError(
                "scaled_dot_product_attention takes an attn_mask or is_causal=True, not both"
            )  # as torch's
        rows = cut_where_it_meets(mask, place, -2)
        keep = None
        if dropped:
            ones = query.new_ones(*query.shape[:-1], of_key.spans.length)
            with draws_part(2, place.spans.of_ranks[team.rank], place.spans.length):
                keep = F.dropout(ones, dropped) != 0
        team.sees_causal |= is_causal
        tile = Tile(query.shape[-1] ** -0.5 if scale is None else scale, is_causal, None, keep, dropped)
        if rows is not None:
            rows = _four(rows).expand(-1, -1, -1, of_key.spans.length)
        query, key, value = autocast(query, key, value)
        result = ring_attention(query, key, value, rows, RingOfKeys(team, place.spans, of_key.spans), tile)
    return result.reshape(*shape[:-1], width)
