"""The interface of a lossy code for gradients: rows of numbers to rows of bytes, and back; and codes by blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from ...errors import UsageError, explain
from .. import kernels
from ..kernels import CodeKind, Task


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


class KernelCodec(Codec):
    """A code that a C kernel computes in one pass over memory where it can, and torch operations elsewhere, to the same bits.

    Attributes:
        bits: of an element.
        block: elements that share a scale.
    """

    bits: int = 8
    block: int = 8

    @property
    @abstractmethod
    def kernel(self) -> CodeKind | None:
        """The kernel that encodes; None where there is none for these settings."""

    @property
    def kernel_to_decode(self) -> CodeKind | None:
        """The kernel that decodes."""
        return self.kernel

    def run(
        self, task: Task, rows: Tensor, codes: Tensor, seeds: tuple[int, int] = (0, 0), lost: Tensor | None = None
    ) -> bool:
        """Do a task by the kernel, if that can; tell whether it was done. For the arguments see ``kernels.run``."""
        kind = self.kernel if task is Task.ENCODE else self.kernel_to_decode
        if kind is None or not kernels.serves(rows, codes):
            return False
        kernels.run(kind, task, rows, codes, self.bits, self.block, seeds, lost)
        return True

    @abstractmethod
    def decode_by_torch(self, codes: Tensor, rows: Tensor) -> None:
        """Decode by torch operations; as ``decode``."""

    @override
    def decode(self, codes: Tensor, rows: Tensor) -> None:
        if not self.run(Task.DECODE, rows, codes):
            self.decode_by_torch(codes, rows)

    @override
    def decode_mean(self, codes: Tensor, mean: Tensor) -> None:
        if not self.run(Task.MEAN, mean, codes):
            super().decode_mean(codes, mean)


class BlockCodec(KernelCodec):
    """A code of a few bits an element, in which the elements of a block share a scale.

    In memory: a float32 for each block of a row, then the elements' levels, packed into bytes. A subclass is a dataclass with
    the field ``block``.
    """

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise UsageError(explain("block must be a multiple of 8 elements", value=self.block))

    @override
    def row_bytes(self, num_elements: int) -> int:
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
