"""The signs of gradients, one bit per element, and one magnitude per block. Use only with error feedback.

For a block x: bit = 1 where x < 0 (zero counts as positive), s = mean |x| with scaling, else 1; decoded s or -s. Where the sum
of magnitudes overflows float32, the magnitudes are scaled by 2^-64 before the sum.
Error: for a block of b elements the squared error is |x|^2 - (sum |x|)^2 / b, which error feedback keeps for later steps.
Source: Seide et al. 2014, Interspeech; Bernstein et al. 2018, arXiv:1802.04434; as in BytePS, by blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ..kernels import CodeKind, Task
from .base import BlockCodec

_SMALL = 2.0**-64
_GREATEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class OneBit(BlockCodec):
    """Codes each element as its sign, in one bit.

    Args:
        scaling: whether to send the mean magnitude of each block; otherwise every element is decoded as 1 or -1.
        block: how many elements share a magnitude, a multiple of 8.

    Raises:
        UsageError: ``block`` is no multiple of 8.
    """

    scaling: bool = True
    block: int = 1024

    bits = 1

    @property
    @override
    def kernel(self) -> CodeKind:
        return CodeKind.SIGNS if self.scaling else CodeKind.SIGNS_ALONE

    @property
    @override
    def kernel_to_decode(self) -> CodeKind:
        return CodeKind.SIGNS

    @override
    def encode(self, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
        if not self.run(Task.ENCODE, rows, codes):
            self.encode_by_torch(rows, codes)

    @override
    def encode_with_feedback(self, rows: Tensor, codes: Tensor, random: torch.Generator, lost: Tensor) -> None:
        if not self.run(Task.ENCODE, rows, codes, lost=lost):
            super().encode_with_feedback(rows, codes, random, lost)

    def encode_by_torch(self, rows: Tensor, codes: Tensor) -> None:
        """Encode by torch operations; the module's docstring gives the formula."""
        scales, packed = self.parts(codes, rows.shape[1])
        values = self.blocks_of(rows)
        if self.scaling:
            counts = torch.full((scales.shape[1],), self.block, dtype=torch.float32, device=rows.device)
            counts[-1] = rows.shape[1] - (len(counts) - 1) * self.block  # the last block counts without its padding
            torch.div(_sum(values.abs()), counts, out=scales)
            over = ~scales.isfinite()
            if bool(over.any()):
                small = _sum(values.abs().mul_(_SMALL)) / counts
                scales[over] = (small * (1 / _SMALL)).clamp_(max=_GREATEST)[over]
        else:
            scales.fill_(1.0)
        self.pack((values < 0).to(torch.uint8), packed)

    @override
    def decode_by_torch(self, codes: Tensor, rows: Tensor) -> None:
        scales, packed = self.parts(codes, rows.shape[1])
        signs = self.unpack(packed).mul_(-2).add_(1)
        signs *= scales.unsqueeze(2)
        rows.copy_(signs.view(rows.shape[0], -1)[:, : rows.shape[1]])


def _sum(values: Tensor) -> Tensor:
    """Return the sum over the last dim, in the C kernel's order: the second half is added to the first, until one is left."""
    left = values.shape[-1]
    while left > 1:
        half = left // 2
        values[..., :half] += values[..., left - half : left]
        left -= half
    return values[..., 0]
