"""The interface of a lossy code for gradients: rows of numbers to rows of bytes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


def aligned(num_bytes: int) -> int:
    """Return the length of a part of a code, so that the next part may be seen as float32 or int64."""
    return -(-num_bytes // 8) * 8


class Codec(ABC):
    """A code whose length depends on the number of elements only. Hyper-parameters are fields of a frozen dataclass.

    A row is one rank's part of a bucket. What cannot be expressed, NaN and infinity, is the caller's to keep out.
    """

    #: Whether the decoded values are right on average (rounding at random), so that errors cancel without feedback.
    unbiased: bool = False

    @abstractmethod
    def row_bytes(self, num_elements: int) -> int:
        """Return the length of the code of a row of so many elements."""

    @abstractmethod
    def encode(self, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
        """Write the code of each row.

        Args:
            rows: (rows, elements), float32, finite; not to be changed.
            codes: (rows, ``row_bytes(elements)``), uint8; each row contiguous and at a multiple of 8 bytes; written.
            random: where random bits come from; seeded so that a resumed run draws the same.
        """

    def encode_with_feedback(self, rows: Tensor, codes: Tensor, random: torch.Generator, lost: Tensor) -> None:
        """Write the code of ``rows + lost``, and put what it loses of that into ``lost``.

        Args:
            rows: as for ``encode``, but changed.
            codes: as for ``encode``.
            random: as for ``encode``.
            lost: (rows, elements), float32, contiguous; read and overwritten.
        """
        rows += lost
        self.encode(rows, codes, random)
        self.decode(codes, lost)
        torch.sub(rows, lost, out=lost)

    @abstractmethod
    def decode(self, codes: Tensor, rows: Tensor) -> None:
        """Write what each code stands for.

        Args:
            codes: (rows, bytes), uint8, aligned alike, as ``encode`` wrote it on any rank.
            rows: (rows, elements), float32; overwritten. Equal codes give equal bits on all ranks.
        """

    def decode_mean(self, codes: Tensor, mean: Tensor) -> None:
        """Write the mean of what the codes stand for: added row by row, in float32, and divided by their number.

        Args:
            codes: as for ``decode``.
            mean: (1, elements), float32; overwritten. Equal codes give equal bits on all ranks.
        """
        rows = mean.new_empty(codes.shape[0], mean.shape[1])
        self.decode(codes, rows)
        mean.copy_(rows[:1])
        for row in rows[1:]:
            mean += row
        mean /= codes.shape[0]
