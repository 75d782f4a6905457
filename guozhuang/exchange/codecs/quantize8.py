"""Gradients in 8 bits per element, as levels between the least and the greatest: Bagua's MinMaxUInt8, the code of ByteGrad.

For a row with least and greatest element a and b,
s = min(255 / (b - a + 1e-7), 1e38 / max(|a|, |b|, 1e-7)), U = rint(b s), L = U - 255;
q = min(rint(x s), U) - L, from 0 to 255, which is decoded as (q + L) / s. The second bound of s prevents an overflow of x s
for a row of large, nearly equal elements.
Error: half a step, (b - a + 1e-7) / 510, per element; the rounding is deterministic, so equal errors of ranks do not average
out. If U is beyond 2^23, because a row's elements differ in their last bits only, float32 rounds as much again.
Source: Gan et al. 2021, arXiv:2107.01499.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ..kernels import CodeKind, Task
from .base import KernelCodec, aligned

_EPSILON = 1e-7
_LARGE = 1e38  # bound of |element * scale|, which must stay below the greatest float32 (3.4e38)
_LEVELS = 255.0


@dataclass(frozen=True)
class MinMax8(KernelCodec):
    """Codes each element as a byte; the row's least and greatest element are stored before the bytes, in float32."""

    @property
    @override
    def kernel(self) -> CodeKind:
        return CodeKind.MIN_MAX_8

    @override
    def row_bytes(self, num_elements: int) -> int:
        return 8 + aligned(num_elements)

    @override
    def encode(self, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
        if not self.run(Task.ENCODE, rows, codes):
            self.encode_by_torch(rows, codes)

    def encode_by_torch(self, rows: Tensor, codes: Tensor) -> None:
        """Encode by torch operations; the module's docstring gives the formula."""
        low, high = torch.aminmax(rows, dim=1, keepdim=True)
        bounds = codes[:, :8].view(torch.float32)
        bounds[:, :1], bounds[:, 1:] = low + 0.0, high + 0.0  # turns -0.0 into 0.0
        scale, upper = _scale_and_upper(bounds)
        levels = torch.mul(rows, scale).round_()
        torch.minimum(levels, upper, out=levels)
        levels -= upper - _LEVELS
        levels.clamp_(0.0, _LEVELS)  # the rounding of large numbers may have left this range
        codes[:, 8 : 8 + rows.shape[1]] = levels

    @override
    def decode_by_torch(self, codes: Tensor, rows: Tensor) -> None:
        scale, upper = _scale_and_upper(codes[:, :8].view(torch.float32))
        rows.copy_(codes[:, 8 : 8 + rows.shape[1]])
        rows += upper - _LEVELS
        rows /= scale


def _scale_and_upper(bounds: Tensor) -> tuple[Tensor, Tensor]:
    low, high = bounds[:, :1], bounds[:, 1:]
    span = high - low + _EPSILON
    scale = _divide(_LEVELS, span)
    # If all elements are large and nearly equal, this scale times an element could overflow, so the scale is limited.
    torch.minimum(scale, _divide(_LARGE, torch.maximum(high.abs(), low.abs()).clamp_(min=_EPSILON)), out=scale)
    return scale, (high * scale).round_()


def _divide(number: float, by: Tensor) -> Tensor:
    return torch.div(torch.full_like(by, number), by)  # a plain number divided by a tensor is rounded twice
