"""Gradients by their signs, one bit an element, and a magnitude for each block. Only with error feedback.

For a block x: bit = 1 where x < 0 (zero counts as positive), s = mean |x| with scaling, else 1; decoded s or -s.
Error: for a block of b elements the squared error is |x|^2 - (sum |x|)^2 / b, so feedback holds a fixed share of it.
Source: Seide et al. 2014, Interspeech; Bernstein et al. 2018, arXiv:1802.04434; as in BytePS, by blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import BlockCodec


@dataclass(frozen=True)
class OneBit(BlockCodec):
    """Signs.

    Args:
        scaling: send the mean magnitude of each block; without it every element is decoded as 1 or -1.
        block: elements that share a magnitude, a multiple of 8.

    Raises:
        UsageError: such a block is impossible.
    """

    scaling: bool = True
    block: int = 1024

    bits = 1

    def encode(self, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
        """See the formula above."""
        scales, packed = self.parts(codes, rows.shape[1])
        values = self.blocks_of(rows)
        if self.scaling:
            counts = torch.full((scales.shape[1],), self.block, dtype=torch.float32, device=rows.device)
            counts[-1] = rows.shape[1] - (len(counts) - 1) * self.block  # what fills the last block up does not count
            torch.div(values.abs().sum(dim=2), counts, out=scales)
        else:
            scales.fill_(1.0)
        self.pack((values < 0).to(torch.uint8), packed)

    def decode(self, codes: Tensor, rows: Tensor) -> None:
        """See the formula above."""
        scales, packed = self.parts(codes, rows.shape[1])
        signs = self.unpack(packed).mul_(-2).add_(1)
        signs *= scales.unsqueeze(2)
        rows.copy_(signs.view(rows.shape[0], -1)[:, : rows.shape[1]])
