"""Wraps another exchange and sends the gradients through it in a narrower dtype.

Formula: decode(inner(encode(g))) where encode and decode are rounding casts.
Error: half a unit in the last place of the narrower dtype for each gradient, and as much again for each addition of the inner
exchange; relative 2^-11 for fp16, 2^-8 for bf16. Ranks divide before they sum, so a sum overflows only where the mean does (in
fp16 beyond 65504); it then becomes infinity on all ranks, which a gradient scaler detects. In fp16 values below 3e-8 become 0.
Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from ..gradients.buckets import Bucket, view_in
from .around import AroundGradients
from .base import GradientExchange, Then, Work


@dataclass
class CastState:
    """Holds, by bucket index, a copy of each bucket in the narrower dtype, and the state of the inner exchange."""

    wires: dict[int, Bucket]
    inner: Any


@dataclass(frozen=True)
class Cast(AroundGradients[CastState]):
    """Casts gradients to ``dtype``, exchanges them with ``inner``, and casts the result back.

    Args:
        dtype: floating-point dtype in which gradients are sent.
        inner: the exchange of the cast buckets.
    """

    dtype: torch.dtype
    inner: GradientExchange[Any]

    @override
    def inner_state(self, state: CastState) -> Any:
        return state.inner

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: CastState | None = None
    ) -> CastState:
        wires = {bucket.index: self._wire(bucket) for bucket in buckets}
        return CastState(wires, self.inner.prepare(list(wires.values()), group, before.inner if before else None))

    def _wire(self, bucket: Bucket) -> Bucket:
        """Return a narrower bucket with the same views: an exchange may ask for shapes, as those of matrices and tables do."""
        flat = torch.zeros_like(bucket.flat, dtype=self.wire_dtype(bucket.flat.dtype))
        stand_ins = [view_in(flat, at, p) for at, p in zip(bucket.offsets, bucket.parameters, strict=True)]
        return Bucket(
            bucket.index,
            bucket.is_last,
            bucket.names,
            stand_ins,
            allocate=lambda *_: flat,
            offsets=bucket.offsets,
            num_elements=flat.numel(),
        )

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of ``dtype`` are sent, which is never wider than ``dtype``."""
        return self.dtype if dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize else dtype

    @override
    def start(self, bucket: Bucket, state: CastState, step: int) -> Work:
        wire = state.wires[bucket.index]
        wire.flat.copy_(bucket.flat)
        return Then(self.inner.start(wire, state.inner, step), lambda: bucket.flat.copy_(wire.flat))

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int | None:
        return self.inner.traffic(num_elements, min(element_bytes, self.dtype.itemsize), world_size)
