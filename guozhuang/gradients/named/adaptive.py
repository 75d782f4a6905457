"""The adaptive sum of tensors that lie one after the other: what ``exchange.adasum`` does, by tensor. See its notes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...exchange.adasum import factors
from . import collectives

_NUM_COLUMNS = 1 << 18  # that are seen as float64 at a time


def adaptive_sum(flat: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
    """Replace tensors by their adaptive sum over the ranks, each by itself. Every rank must call.

    Args:
        flat: the tensors, one after the other, of floating-point numbers; some at least.
        sizes: their numbers of elements.
        group: of any size.
    """
    size, rank = group.size(), group.rank()
    length = -(-flat.numel() // size)
    sent = flat.new_zeros(size, length)
    sent.view(-1)[: flat.numel()].copy_(flat)
    got = torch.empty_like(sent)
    collectives.all_to_all(got, sent, (), (), group)
    grams = flat.new_zeros(len(sizes), size, size, dtype=torch.float64)
    pieces, begin = [], -rank * length
    for i, num_elements in enumerate(sizes):
        end = begin + num_elements
        if max(begin, 0) < min(end, length):
            pieces.append((i, max(begin, 0), min(end, length)))
        begin = end
    for i, first, last in pieces:
        for part in got[:, first:last].split(_NUM_COLUMNS, dim=1):
            part = part.to(torch.float64)
            grams[i].addmm_(part, part.mT)
    collectives.all_reduce(grams, dist.ReduceOp.SUM, group)
    by = factors(grams)
    own = sent.new_zeros(length)
    wide = torch.float64 if own.dtype == torch.float64 else torch.float32
    for i, first, last in pieces:
        own[first:last] = by[i].to(wide) @ got[:, first:last].to(wide)
    collectives.all_gather(got.view(-1), own, group)
    flat.copy_(got.view(-1)[: flat.numel()])
