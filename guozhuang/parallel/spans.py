"""Which part of a dimension each rank has: the arithmetic, and how tensors are cut and joined by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ..world.versions import all_gather_single

Span = tuple[int, int]


@lru_cache(maxsize=4096)
def parts(size: int, num: int) -> tuple[Span, ...]:
    """Return (start, stop) of each of ``num`` parts; the longest has at most one entry more than the shortest."""
    return tuple((size * i // num, size * (i + 1) // num) for i in range(num))


def take(whole: Tensor, dim: int, spans: Iterable[Span]) -> Tensor:
    """Return these ranges of a dimension, one after the other; a view where they are one."""
    pieces = [whole.narrow(dim, start, stop - start) for start, stop in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [whole.narrow(dim, 0, 0)], dim)


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Return in which order the dimensions of an image lie in memory."""
    for dims, found in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dims and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=found):
            return found
    return torch.contiguous_format


@dataclass(frozen=True)
class SpansOfRanks:
    """How a dimension is divided over ranks.

    Attributes:
        length: its size in the whole tensor.
        of_ranks: for each rank the spans ``(start, stop)`` of its entries, in the order in which the rank holds them.
    """

    length: int
    of_ranks: tuple[tuple[Span, ...], ...]

    @staticmethod
    @lru_cache(maxsize=4096)
    def in_order(length: int, num_ranks: int) -> SpansOfRanks:
        """Give each rank one span; the sizes differ by one entry at most."""
        return SpansOfRanks(length, tuple((span,) for span in parts(length, num_ranks)))

    @staticmethod
    @lru_cache(maxsize=4096)
    def zigzag(length: int, num_ranks: int) -> SpansOfRanks:
        """Give rank r the spans r and 2n-1-r of 2n, so that a causal mask leaves all ranks equally much to compute."""
        spans = parts(length, 2 * num_ranks)
        return SpansOfRanks(length, tuple((spans[rank], spans[-1 - rank]) for rank in range(num_ranks)))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of entries of each rank."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.of_ranks)

    def part(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's entries of ``whole``; a view where they lie together."""
        return take(whole, dim, self.of_ranks[rank])

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole dimension made of all ranks' entries; a part may have more entries behind its own."""
        shape = list(parts[0].shape)
        shape[dim] = self.length
        found = parts[0].new_empty(shape)
        for part, spans in zip(parts, self.of_ranks, strict=True):
            at = 0
            for start, stop in spans:
                found.narrow(dim, start, stop - start).copy_(part.narrow(dim, at, stop - start))
                at += stop - start
        return found

    def gathered(self, mine: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        """Return the whole of a tensor of which each rank of the group has its part. Every rank must call it."""
        most, shape = max(self.counts), list(mine.shape)
        given, shape[dim] = mine.contiguous(), most
        if mine.shape[dim] < most:  # ranks with less fill up, because not every group gathers parts of several sizes
            given = mine.new_zeros(shape)
            given.narrow(dim, 0, mine.shape[dim]).copy_(mine)
        everyones = given.new_empty(group.size(), *shape)
        if not mine.is_meta:
            all_gather_single(everyones.view(-1), given.view(-1), group=group)
        return self.joined(everyones.unbind(0), dim)
