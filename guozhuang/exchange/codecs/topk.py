"""Codes that send a few elements of each row; the others are decoded as zeros. Use only with error feedback.

``TopK``: the k elements of greatest magnitude, each as its position and its value. Error: the squared norm of the elements left
out, at most (1 - k / n) |x|^2 for a row of n elements.
``RandomK``: k positions, drawn anew each time, uniformly, with replacement, as in BytePS; only the values are sent, with the
seed from which every rank draws the same positions. Error: the expected squared norm left out is (1 - 1/n)^k |x|^2.
Source: Aji and Heafield 2017, arXiv:1704.05021; Stich et al. 2018, arXiv:1809.07599 (both with feedback); as in BytePS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UsageError, explain
from .base import Codec, aligned

_MAX_ELEMENTS = 2**31  # the greatest length of a row, because positions are sent as int32


@dataclass(frozen=True)
class Sparsifier(Codec):
    """A code that sends some elements of each row; the others are decoded as zeros.

    Args:
        k: if below 1, the share of elements that are sent; else the number of elements per row.

    Raises:
        UsageError: ``k`` is not above 0, or is neither a share nor a whole number.
    """

    k: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.k < float("inf") or (self.k >= 1 and self.k != int(self.k)):
            fix = "give a share such as 0.01, or a whole number of elements per row"
            raise UsageError(explain("k must be a share below 1 or a count", value=self.k, fix=fix))

    def _count(self, num_elements: int) -> int:
        """Return how many elements of a row are sent: ``k``, or the share ``k`` of them; at least one, at most all."""
        return max(1, min(num_elements, int(self.k) if self.k >= 1 else int(self.k * num_elements)))


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Sends the elements of greatest magnitude in each row, and their positions.

    Args:
        k: if below 1, the share of elements that are sent; else the number of elements per row.

    Raises:
        UsageError: ``k`` is not above 0, or is neither a share nor a whole number.
    """

    def row_bytes(self, num_elements: int) -> int:
        """Return 8 bytes for each element that is sent.

        Raises:
            UsageError: a row is too long for positions of 32 bits.
        """
        if num_elements > _MAX_ELEMENTS:
            what = f"TopK codes at most {_MAX_ELEMENTS} elements of a bucket for each rank"
            raise UsageError(
                explain(what, value=num_elements, fix="exchange such a parameter with more ranks, or divide it")
            )
        return 8 * self._count(num_elements)

    def encode(self, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
        """Write the positions, in int32, and then the values, in float32."""
        count = self._count(rows.shape[1])
        places = rows.abs().topk(count, dim=1, sorted=False).indices
        codes[:, : 4 * count].view(torch.int32).copy_(places)
        codes[:, 4 * count :].view(torch.float32).copy_(rows.gather(1, places))

    def decode(self, codes: Tensor, rows: Tensor) -> None:
        """Write the sent values at their positions in each row, and zeros elsewhere."""
        count = self._count(rows.shape[1])
        places = codes[:, : 4 * count].view(torch.int32).to(torch.int64)
        rows.zero_().scatter_(1, places, codes[:, 4 * count :].view(torch.float32))


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Sends elements of each row that are drawn at random, and the seed from which their positions follow.

    Args:
        k: if below 1, the share of elements that are sent; else the number of elements per row.

    Raises:
        UsageError: ``k`` is not above 0, or is neither a share nor a whole number.
    """

    def row_bytes(self, num_elements: int) -> int:
        """Return 8 bytes for the seed, plus 4 bytes for each element that is sent, rounded up to a multiple of 8."""
        return 8 + aligned(4 * self._count(num_elements))

    def _places(self, seed: Tensor, num_elements: int) -> Tensor:
        random = torch.Generator(seed.device)
        random.manual_seed(int(seed))
        return torch.randint(num_elements, (self._count(num_elements),), generator=random, device=seed.device)

    def encode(self, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
        """Write a seed, in int64, and then the values, in float32. All rows have the same positions."""
        count = self._count(rows.shape[1])
        seed = torch.randint(2**62, (1,), generator=random, device=rows.device)
        codes[:, :8].view(torch.int64).copy_(seed)
        codes[:, 8 : 8 + 4 * count].view(torch.float32).copy_(rows[:, self._places(seed[0], rows.shape[1])])

    def decode(self, codes: Tensor, rows: Tensor) -> None:
        """Write the sent values at their positions in each row, and zeros elsewhere."""
        count = self._count(rows.shape[1])
        rows.zero_()
        for code, row in zip(codes, rows, strict=True):  # rows may come from different ranks, each with its own seed
            row[self._places(code[:8].view(torch.int64)[0], rows.shape[1])] = code[8 : 8 + 4 * count].view(
                torch.float32
            )
