"""Attention of some queries to some keys, with the logarithm of its softmax's sum, by which parts are joined.

The joined result of tiles over the keys is exact: with lse = log(sum(exp(scores))) of each tile, a tile's output counts with
the weight exp(lse of the tile - lse of all). The backward of a tile needs the joined output and the joined lse alone
(Dao et al., FlashAttention, NeurIPS 2022, arXiv:2205.14135; Liu et al., Ring Attention, 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Tile:
    """What attention of a tile needs beside queries (B, H, l, D), keys (B, K, s, D) and values (B, K, s, E).

    Attributes:
        scale: factor of the scores.
        is_causal: whether query i sees the keys up to i alone, where both are the same tokens.
        mask: None, or what broadcasts to (B, H, l, s): of bool, True where attention is allowed, or added to the scores.
        keep: None, or which of the (B, H, l, s) weights dropout keeps.
        dropped: the probability that dropout drops a weight.
    """

    scale: float
    is_causal: bool = False
    mask: Tensor | None = None
    keep: Tensor | None = None
    dropped: float = 0.0

    def is_empty(self) -> bool:
        """Whether the mask allows nothing."""
        if self.mask is None:
            return False
        return not bool((self.mask if self.mask.dtype == torch.bool else self.mask != -torch.inf).any())


def _grouped(tensor: Tensor, num_heads: int) -> Tensor:
    """Repeat keys or values of a group of heads for each head of it."""
    return tensor if tensor.shape[1] == num_heads else tensor.repeat_interleave(num_heads // tensor.shape[1], 1)


def _ungrouped(gradient: Tensor, num_heads: int) -> Tensor:
    return gradient if gradient.shape[1] == num_heads else gradient.unflatten(1, (num_heads, -1)).sum(2)


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask as it is added to scores; one that a ring has made lies on the CPU."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(like.dtype)
    mask = mask.to(like.device)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, -torch.inf)


def _is_for_flash(query: Tensor, value: Tensor, tile: Tile) -> bool:
    return query.device.type == "cpu" and tile.keep is None and query.shape[-1] == value.shape[-1]


def forward(query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, l, E) and lse (B, H, l) of a tile; a query that sees no key has the output 0 and lse -inf."""
    num_heads = query.shape[1]
    key, value = _grouped(key, num_heads), _grouped(value, num_heads)
    if _is_for_flash(query, value, tile):
        mask = _full(_added(tile.mask, query), query, key)
        output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, tile.is_causal, attn_mask=mask, scale=tile.scale
        )
        if mask is not None:  # a query that sees no key gets 0 as its lse
            lse = lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        return output, lse
    scores = _scores(query, key, tile)
    lse = scores.logsumexp(-1)
    weights = _weights(scores, lse)
    return _kept(weights, tile) @ value, lse


def backward(
    query: Tensor, key: Tensor, value: Tensor, tile: Tile, output: Tensor, lse: Tensor, gradient: Tensor, wants_mask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of queries, keys, values and scores (those only for ``wants_mask``) of a tile.

    Args:
        output, lse: of the queries over all keys, not of the tile alone.
        gradient: of ``output``.
    """
    num_heads, num_groups = query.shape[1], key.shape[1]
    key, value = _grouped(key, num_heads), _grouped(value, num_heads)
    seen = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(scores - inf) = 0: who sees no key gets no gradient
    if _is_for_flash(query, value, tile) and not wants_mask:
        mask = _full(_added(tile.mask, query), query, key)
        for_query, for_key, for_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, seen, 0.0, tile.is_causal, attn_mask=mask, scale=tile.scale
        )
        for_scores = None
    else:
        weights = _weights(_scores(query, key, tile), seen)
        for_value = _kept(weights, tile).mT @ gradient
        for_weights = _kept(gradient @ value.mT, tile)
        for_scores = weights * (for_weights - (gradient * output).sum(-1, keepdim=True))
        for_query, for_key = for_scores @ key * tile.scale, for_scores.mT @ query * tile.scale
    return for_query, _ungrouped(for_key, num_groups), _ungrouped(for_value, num_groups), for_scores


def _full(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*query.shape[:-1], key.shape[2])


def _scores(query: Tensor, key: Tensor, tile: Tile) -> Tensor:
    scores = query @ key.mT * tile.scale
    mask = _added(tile.mask, scores)
    if mask is not None:
        scores += mask
    if tile.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)).exp()


def _kept(weights: Tensor, tile: Tile) -> Tensor:
    if tile.keep is None:
        return weights
    return weights * tile.keep / (1 - tile.dropped) if tile.dropped < 1 else weights * 0
