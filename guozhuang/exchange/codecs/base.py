"""The interface of a lossy code for gradients: rows of numbers to rows of bytes, and back; and codes by blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ...errors import UsageError, explain


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


class BlockCodec(Codec):
    """A code of a few bits an element, in which the elements of a block share a scale.

    In memory: a float32 for each block of a row, then the elements' levels, packed into bytes. A subclass is a dataclass with
    the field ``block``.
    """

    block: int
    bits: int

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise UsageError(explain("block must be a multiple of 8 elements", value=self.block))

    def row_bytes(self, num_elements: int) -> int:
        """Return the bits of whole blocks, and 4 bytes a block."""
        blocks = -(-num_elements // self.block)
        return aligned(4 * blocks) + aligned(blocks * self.block * self.bits // 8)

    def parts(self, codes: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
        """Return the scales, (rows, blocks), and the packed levels, (rows, bytes), of codes of such rows; both are views."""
        blocks = -(-num_elements // self.block)
        begin = aligned(4 * blocks)
        return codes[:, : 4 * blocks].view(torch.float32), codes[
            :, begin : begin + blocks * self.block * self.bits // 8
        ]

    def blocks_of(self, rows: Tensor) -> Tensor:
        """Copy rows, (rows, elements), into (rows, blocks, block), the last one filled up with zeros."""
        num_rows, num_elements = rows.shape
        blocks = rows.new_zeros(num_rows, -(-num_elements // self.block), self.block)
        blocks.view(num_rows, -1)[:, :num_elements] = rows
        return blocks

    def pack(self, levels: Tensor, packed: Tensor) -> None:
        """Write levels, (rows, blocks, block), uint8 below ``2 ** bits``, the first of a byte in its highest bits."""
        each = 8 // self.bits
        parts = levels.view(levels.shape[0], -1, each)
        packed.copy_(parts[..., 0])
        for i in range(1, each):
            packed.bitwise_left_shift_(self.bits).bitwise_or_(parts[..., i])

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the levels as float32, (rows, blocks, block)."""
        each, mask = 8 // self.bits, 2**self.bits - 1
        parts = [packed >> self.bits * (each - 1 - i) & mask for i in range(each)]
        return torch.stack(parts, dim=2).to(torch.float32).view(packed.shape[0], -1, self.block)
