"""The interface of lossy codes for gradients, which turn rows of numbers into rows of bytes; and base classes of codes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from ...errors import UsageError, explain
from .. import kernels
from ..kernels import CodeKind, Task


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to a multiple of 8, so that a following part can be viewed as float32 or int64."""
    return -(-num_bytes // 8) * 8


class Codec(ABC):
    """A lossy code whose length depends only on the number of elements. Hyper-parameters are fields of a frozen dataclass.

    A row is one rank's part of a bucket. The caller must not pass rows with NaN or infinity, which codes cannot represent.
    """

    #: Whether the expected decoded value equals the input (random rounding), so that errors cancel without error feedback.
    unbiased: bool = False

    @abstractmethod
    def row_bytes(self, num_elements: int) -> int:
        """Return the length, in bytes, of the code of a row of ``num_elements`` elements."""

    @abstractmethod
    def encode(self, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
        """Encode each row of ``rows`` into a row of ``codes``.

        Args:
            rows: (rows, elements), float32, finite; not to be changed.
            codes: (rows, ``row_bytes(elements)``), uint8; each row contiguous and at a multiple of 8 bytes; written.
            random: the source of random bits, seeded so that a resumed run draws the same bits.
        """

    def encode_with_feedback(self, rows: Tensor, codes: Tensor, random: torch.Generator, lost: Tensor) -> None:
        """Encode ``rows + lost`` into ``codes``, and write the error of that code to ``lost``.

        Args:
            rows: as for ``encode``, but may be changed.
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
        """Decode each row of ``codes`` into a row of ``rows``.

        Args:
            codes: (rows, bytes), uint8, aligned as for ``encode``, which wrote them on any rank.
            rows: (rows, elements), float32; overwritten. Equal codes give equal bits on all ranks.
        """

    def decode_mean(self, codes: Tensor, mean: Tensor) -> None:
        """Write the mean of the decoded codes: their values are added row by row, in float32, and divided by their number.

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
    """A code that a C kernel computes if possible, and torch operations otherwise, with equal bits.

    Attributes:
        bits: the bits of an element.
        block: how many elements share a scale.
    """

    bits: int = 8
    block: int = 8

    @property
    @abstractmethod
    def kernel(self) -> CodeKind | None:
        """The C kernel that encodes; None if there is no kernel for these settings."""

    @property
    def kernel_to_decode(self) -> CodeKind | None:
        """The C kernel that decodes; by default the one that encodes."""
        return self.kernel

    def run(
        self, task: Task, rows: Tensor, codes: Tensor, seeds: tuple[int, int] = (0, 0), lost: Tensor | None = None
    ) -> bool:
        """Run a task in the C kernel if it supports these tensors; return whether it did. For arguments see ``kernels.run``."""
        kind = self.kernel if task is Task.ENCODE else self.kernel_to_decode
        if kind is None or not kernels.serves(rows, codes):
            return False
        kernels.run(kind, task, rows, codes, self.bits, self.block, seeds, lost)
        return True

    @abstractmethod
    def decode_by_torch(self, codes: Tensor, rows: Tensor) -> None:
        """Decode like :meth:`decode`, by torch operations."""

    @override
    def decode(self, codes: Tensor, rows: Tensor) -> None:
        if not self.run(Task.DECODE, rows, codes):
            self.decode_by_torch(codes, rows)

    @override
    def decode_mean(self, codes: Tensor, mean: Tensor) -> None:
        if not self.run(Task.MEAN, mean, codes):
            super().decode_mean(codes, mean)


class BlockCodec(KernelCodec):
    """A code of a few bits per element, in which the elements of a block share a scale.

    The code of a row is one float32 scale for each block, then the elements' levels, packed into bytes. A subclass is a
    dataclass with the field ``block``.
    """

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise UsageError(explain("block must be a multiple of 8 elements", value=self.block))

    @override
    def row_bytes(self, num_elements: int) -> int:
        blocks = -(-num_elements // self.block)
        return aligned(4 * blocks) + aligned(blocks * self.block * self.bits // 8)

    def parts(self, codes: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
        """Split codes into views of their scales, (rows, blocks), and of their packed levels, (rows, bytes)."""
        blocks = -(-num_elements // self.block)
        begin = aligned(4 * blocks)
        return codes[:, : 4 * blocks].view(torch.float32), codes[
            :, begin : begin + blocks * self.block * self.bits // 8
        ]

    def blocks_of(self, rows: Tensor) -> Tensor:
        """Copy rows, (rows, elements), into (rows, blocks, block), with the last block padded with zeros."""
        num_rows, num_elements = rows.shape
        blocks = rows.new_zeros(num_rows, -(-num_elements // self.block), self.block)
        blocks.view(num_rows, -1)[:, :num_elements] = rows
        return blocks

    def pack(self, levels: Tensor, packed: Tensor) -> None:
        """Pack levels, (rows, blocks, block), uint8 below ``2 ** bits``, into bytes; the first is in a byte's highest bits."""
        each = 8 // self.bits
        parts = levels.view(levels.shape[0], -1, each)
        packed.copy_(parts[..., 0])
        for i in range(1, each):
            packed.bitwise_left_shift_(self.bits).bitwise_or_(parts[..., i])

    def unpack(self, packed: Tensor) -> Tensor:
        """Undo :meth:`pack`: return the levels as float32, (rows, blocks, block)."""
        each, mask = 8 // self.bits, 2**self.bits - 1
        parts = [packed >> self.bits * (each - 1 - i) & mask for i in range(each)]
        return torch.stack(parts, dim=2).to(torch.float32).view(packed.shape[0], -1, self.block)
