"""Codes of a few bits an element, by blocks of elements that share a scale: how they lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UsageError, explain
from .codec import Codec, aligned


class BlockCodec(Codec):
    """A float32 for each block of a row, then the elements' levels, packed into bytes.

    A subclass is a dataclass with the field ``block``.
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
