"""Which tokens of a sequence each rank has. Arithmetic alone, but for cutting and joining tensors by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Span = tuple[int, int]


@dataclass(frozen=True)
class TokenSpans:
    """How the tokens of one sequence are divided over ranks.

    Attributes:
        length: number of tokens of the whole sequence.
        of_ranks: for each rank the spans ``(start, stop)`` of its tokens, in the order in which the rank holds them.
    """

    length: int
    of_ranks: tuple[tuple[Span, ...], ...]

    @staticmethod
    def in_order(length: int, num_ranks: int) -> TokenSpans:
        """Give each rank one span; the sizes differ by one token at most."""
        return TokenSpans(length, tuple((span,) for span in _even(length, num_ranks)))

    @staticmethod
    def zigzag(length: int, num_ranks: int) -> TokenSpans:
        """Give rank r the spans r and 2n-1-r of 2n, so that a causal mask leaves all ranks equally much to compute."""
        spans = _even(length, 2 * num_ranks)
        return TokenSpans(length, tuple((spans[rank], spans[-1 - rank]) for rank in range(num_ranks)))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens of each rank."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.of_ranks)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the ranks' tokens, one rank after the other, are the whole sequence."""
        return all(len(spans) == 1 for spans in self.of_ranks)

    def part(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's tokens of ``whole``; a view where they lie together."""
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in self.of_ranks[rank]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole sequence made of all ranks' tokens; a part may have more entries behind its tokens."""
        pieces = []
        for part, spans in zip(parts, self.of_ranks, strict=True):
            at = 0
            for start, stop in spans:
                pieces.append((start, part.narrow(dim, at, stop - start)))
                at += stop - start
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda each: each[0])], dim)


def _even(length: int, num: int) -> list[Span]:
    return [(length * i // num, length * (i + 1) // num) for i in range(num)]
