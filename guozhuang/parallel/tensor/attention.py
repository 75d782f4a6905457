"""``nn.MultiheadAttention`` of which each rank has some heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ..random import divided
from ..spans import SpansOfRanks
from . import functions
from .layers import Cutter, TensorRegion, can_be_divided, check_heads, holds_parameters, rows


class DividedAttention(nn.MultiheadAttention):
    """The module with this rank's heads. Its arguments and results are whole, as are ``embed_dim`` and ``num_heads``.

    There is no fast path: in evaluation mode too it computes by ``scaled_dot_product_attention``.
    """

    region: TensorRegion
    own_heads: tuple[int, int]
    heads_of_all: SpansOfRanks

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        is_batched = query.dim() == 3
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as PyTorch's own
        entered = {id(each): self._batch_first(self.region.enter(each), is_batched) for each in (query, key, value)}
        q, k, v = self._projected(*(entered[id(each)] for each in (query, key, value)))
        if not is_batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], -1, -1)], 1)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (q, k, v))
        if self.add_zero_attn:
            k, v = (F.pad(each, (0, 0, 0, 1)) for each in (k, v))
        use_hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if use_hint else self._mask(attn_mask, key_padding_mask, q, k)
        rate = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            with divided(-3, (self.own_heads,), self.num_heads):
                weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), rate)
            heads = weights @ v
        else:
            with divided(-3, (self.own_heads,), self.num_heads):
                heads = F.scaled_dot_product_attention(q, k, v, mask, rate, use_hint)
        # As in PyTorch's own forward the output lies time first in memory, for the mask of a dropout behind it lies as it does.
        output = self.out_proj(heads.permute(2, 0, 1, 3).flatten(2))
        if weights is not None:
            weights = functions.gathered(weights, 1, self.heads_of_all, self.region.group)
            weights = weights.mean(1) if average_attn_weights else weights
        if not is_batched:
            return output.squeeze(1), None if weights is None else weights.squeeze(0)
        return output.transpose(0, 1) if self.batch_first else output, weights

    def _batch_first(self, given: Tensor, is_batched: bool) -> Tensor:
        if not is_batched:
            return given.unsqueeze(0)
        return given if self.batch_first else given.transpose(0, 1)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is not None and query is key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)  # type: ignore[return-value]
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        q, k, v = (F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """What is added to the scores: of shape (batch, own heads, queries, keys), or with 1 where it is the same for all."""
        found = []
        if mask is not None:
            mask = _added(mask, q.dtype)
            if mask.dim() == 3:
                whole = mask.unflatten(0, (q.shape[0], self.num_heads))
                mask = whole[:, self.own_heads[0] : self.own_heads[1]]
            found.append(mask)
        if padding is not None:
            found.append(_added(padding, q.dtype)[:, None, None])
        if not found:
            return None
        total = found[0] if len(found) == 1 else found[0] + found[1]
        return F.pad(total, (0, k.shape[2] - total.shape[-1]))  # keys that the module itself appends are never masked


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def is_plain(module: nn.Module) -> bool:
    """Whether the module is an unchanged ``nn.MultiheadAttention``."""
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
    return (
        type(module) is nn.MultiheadAttention and holds_parameters(module, *names) and can_be_divided(module.out_proj)
    )


def divide_attention(attention: nn.MultiheadAttention, cutter: Cutter, name: str) -> None:
    """Leave this rank its heads of the module, in place.

    Raises:
        UsageError: the heads do not divide by the ranks.
    """
    check_heads(name, {"heads": attention.num_heads}, cutter.num_ranks)
    width = attention.embed_dim
    packed, one = cutter.spans(3 * width, 3), cutter.spans(width)
    cutter(attention.in_proj_weight, 0, packed)
    cutter(attention.in_proj_bias, 0, packed)
    for weight in (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight):
        cutter(weight, 0, one)
    for bias in (attention.bias_k, attention.bias_v):
        cutter(bias, 2, one)
    divided: Any = attention
    divided.region = cutter.region
    cutter.layers.add(id(attention))
    rows(attention.out_proj, cutter, name=f"{name}.out_proj")
    divided.heads_of_all = cutter.spans_of_all(attention.num_heads)
    (divided.own_heads,) = cutter.spans(attention.num_heads)
    attention.__class__ = DividedAttention
