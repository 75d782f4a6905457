"""Which part of a dimension each rank has. Arithmetic alone, but for cutting and joining tensors by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

Span = tuple[int, int]


@lru_cache(maxsize=4096)
def parts(size: int, num: int) -> tuple[Span, ...]:
    """Return (start, stop) of each of ``num`` parts; the longest has at most one entry more than the shortest."""
    return tuple((size * i // num, size * (i + 1) // num) for i in range(num))


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
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in self.of_ranks[rank]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole dimension made of all ranks' entries; a part may have more entries behind its own."""
        pieces = []
        for part, spans in zip(parts, self.of_ranks, strict=True):
            at = 0
            for start, stop in spans:
                pieces.append((start, part.narrow(dim, at, stop - start)))
                at += stop - start
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda each: each[0])], dim)
