"""Gradients in 2, 4 or 8 bits per element, rounded at random so that the expected decoded value equals the gradient.

For a block of elements x with scale m (the greatest magnitude, or the l2 norm) and L = 2^(bits - 1) - 1 levels on each side:

- linear: q = floor(L x / m + u), u uniform in [0, 1); decoded m q / L. Error below m / L; its standard deviation is at most
  m / (2 L).
- natural: the levels are 0 and m 2^-(L - 1), ..., m / 4, m / 2, m; an element is rounded to one of the two levels around its
  magnitude, with probabilities that give the right mean. Error of an element above the least level: below its own magnitude.

Source: linear, QSGD, Alistarh et al. 2017, arXiv:1610.02132; natural, Horvath et al. 2019, arXiv:1905.10988; both as BytePS
offers them, here with codes of fixed length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from ...errors import UsageError, explain
from .. import kernels
from ..kernels import CodeKind, Task
from .base import BlockCodec

_TINY = torch.finfo(torch.float32).tiny
_BITS_32 = 2**32 - 1
_CHUNK = 1 << 15


@dataclass(frozen=True)
class Dithering(BlockCodec):
    """Rounds the elements of each block at random to one of a few levels.

    Args:
        bits: the bits of an element: 2, 4 or 8.
        partition: how levels are spaced: evenly ("linear") or as powers of two ("natural").
        normalize: the scale of a block: its greatest magnitude ("max") or its l2 norm.
        block: how many elements share a scale, a multiple of 8.

    Raises:
        UsageError: an argument has another value.
    """

    bits: int = 4
    partition: Literal["linear", "natural"] = "linear"
    normalize: Literal["max", "l2"] = "max"
    block: int = 256

    unbiased = True

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("bits", self.bits, (2, 4, 8)),
            ("partition", self.partition, ("linear", "natural")),
            ("normalize", self.normalize, ("max", "l2")),
        ):
            if value not in allowed:
                raise UsageError(explain(f"{name} must be one of {', '.join(map(str, allowed))}", value=value))
        super().__post_init__()

    @property
    def num_levels(self) -> int:
        """The number of levels, on each side of zero, to which values are rounded."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    @override
    def kernel(self) -> CodeKind | None:
        if self.normalize != "max":
            return None
        return CodeKind.DITHERING if self.partition == "linear" else CodeKind.NATURAL_DITHERING

    @override
    def encode(self, rows: Tensor, codes: Tensor, random: torch.Generator) -> None:
        if self.kernel is None or rows.device.type != "cpu":
            shape = rows.shape[0], -(-rows.shape[1] // self.block), self.block
            self._encode(rows, codes, torch.rand(shape, generator=random, device=rows.device))
            return
        seeds = _seeds(random)
        if not self.run(Task.ENCODE, rows, codes, seeds):
            self.encode_by_torch(rows, codes, seeds)

    @override
    def encode_with_feedback(self, rows: Tensor, codes: Tensor, random: torch.Generator, lost: Tensor) -> None:
        if self.kernel is not None and kernels.serves(rows, codes):
            self.run(Task.ENCODE, rows, codes, _seeds(random), lost)
        else:
            super().encode_with_feedback(rows, codes, random, lost)

    def encode_by_torch(self, rows: Tensor, codes: Tensor, seeds: tuple[int, int]) -> None:
        """Encode by torch operations, with the same bits as the C kernel."""
        shape = rows.shape[0], -(-rows.shape[1] // self.block), self.block
        self._encode(rows, codes, chances(math.prod(shape), *seeds).view(shape))

    def _encode(self, rows: Tensor, codes: Tensor, chance: Tensor) -> None:
        scales, packed = self.parts(codes, rows.shape[1])
        values = self.blocks_of(rows)
        greatest = values.abs().amax(dim=2)
        values /= greatest.clamp(min=_TINY).unsqueeze(2)
        if self.normalize == "l2":  # values are at most 1 now, so their squares neither overflow nor vanish
            norms = values.norm(dim=2)
            values /= norms.clamp(min=1.0).unsqueeze(2)
            greatest *= norms
        scales.copy_(greatest)
        level = self.num_levels
        levels = (
            (values * level).add_(chance).floor_() if self.partition == "linear" else _natural(values, chance, level)
        )
        levels.clamp_(-level, level)  # rounding may have raised a value past the greatest level
        self.pack(levels.add_(level + 1).to(torch.uint8), packed)

    @override
    def decode_by_torch(self, codes: Tensor, rows: Tensor) -> None:
        scales, packed = self.parts(codes, rows.shape[1])
        levels = self.unpack(packed).sub_(self.num_levels + 1)
        if self.partition == "linear":
            levels /= self.num_levels
        else:
            magnitudes = torch.exp2(levels.abs() - self.num_levels)
            levels = torch.where(levels == 0, levels, magnitudes.copysign_(levels))
        levels *= scales.unsqueeze(2)
        rows.copy_(levels.view(rows.shape[0], -1)[:, : rows.shape[1]])


def _seeds(random: torch.Generator) -> tuple[int, int]:
    first, second = torch.randint(_BITS_32 + 1, (2,), generator=random).tolist()
    return first, second


def chances(count: int, first: int, second: int) -> Tensor:
    """Return ``count`` pseudo-random numbers in [0, 1), multiples of 2^-24: hashes of their positions and two seeds below 2^32.

    The mixing steps are those of MurmurHash3 (Appleby 2011, public domain), with the second seed added after the first step,
    and one more product at the end, without which the numbers for two values of the second seed would differ by a constant.
    """
    parts = []
    for begin in range(0, count, _CHUNK):  # a chunk fits into the cache
        x = torch.arange(begin, min(count, begin + _CHUNK)).add_(first).bitwise_and_(_BITS_32)
        x ^= x >> 16
        x.mul_(0x85EBCA6B).bitwise_and_(_BITS_32)
        x ^= x >> 13
        x.add_(second).bitwise_and_(_BITS_32)
        x.mul_(0xC2B2AE35).bitwise_and_(_BITS_32)
        x ^= x >> 16
        x.mul_(0x85EBCA6B).bitwise_and_(_BITS_32)
        parts.append((x >> 8).to(torch.float32).mul_(2.0**-24))
    return torch.cat(parts)


def _natural(values: Tensor, chance: Tensor, num_levels: int) -> Tensor:
    """Return the signed level number of each value in -1 .. 1: level ``num_levels`` is 1, the one below 1/2, and so on to 0."""
    mantissa, exponent = torch.frexp(values.abs())  # magnitude = mantissa 2^exponent, mantissa in [1/2, 1)
    # The level just below the magnitude is 2^(exponent - 1). For 0 frexp returns exponent 0, which must not be used.
    lower = torch.where(mantissa > 0, exponent + (num_levels - 1), 0)
    above = chance < 2 * mantissa - 1
    levels = (lower + above).to(torch.float32)
    # A magnitude below the least level is rounded at random to 0 or to that level.
    least = 2.0 ** (1 - num_levels)
    levels = torch.where(lower >= 1, levels, (chance < values.abs() / least).to(torch.float32))
    return levels.copysign_(values)
