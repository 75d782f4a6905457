"""Another exchange with the gradients in a narrower dtype on the wire.

Formula: decode(inner(encode(g))) where encode and decode are rounding casts.
Error: half a unit in the last place of the narrower dtype for each gradient, and as much again for each addition of the inner
exchange; relative 2^-11 for fp16, 2^-8 for bf16. Ranks divide before they sum, so a sum overflows only where the mean does (in
fp16 beyond 65504); that is infinity then, on all ranks, which a gradient scaler sees. In fp16 what is below 3e-8 becomes 0.
Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from ..gradients.buckets import Bucket
from .around import AroundGradients
from .base import GradientExchange, Work


@dataclass(frozen=True)
class _Decoding:
    """The inner exchange's work, whose result is cast back when it is waited for."""

    work: Work
    wire: Bucket
    bucket: Bucket

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        self.bucket.flat.copy_(self.wire.flat)


@dataclass
class CastState:
    """The buckets in the dtype of the wire, by index, and the inner exchange's state for them."""

    wires: dict[int, Bucket]
    inner: Any


@dataclass(frozen=True)
class Cast(AroundGradients[CastState]):
    """An exchange with a cast around it.

    Args:
        dtype: floating-point dtype on the wire.
        inner: what exchanges the cast buckets.
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
        wires = {}
        for bucket in buckets:
            first = bucket.parameters[0]
            one = torch.empty(1, dtype=self.wire_dtype(first.dtype), device=first.device)
            stand_ins = [one.expand(p.numel()) for p in bucket.parameters]  # sizes without memory
            wires[bucket.index] = Bucket(bucket.index, bucket.is_last, bucket.names, stand_ins)
        return CastState(wires, self.inner.prepare(list(wires.values()), group, before.inner if before else None))

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which numbers of ``dtype`` travel: never a wider one."""
        return self.dtype if dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize else dtype

    @override
    def start(self, bucket: Bucket, state: CastState, step: int) -> Work:
        wire = state.wires[bucket.index]
        wire.flat.copy_(bucket.flat)
        return _Decoding(self.inner.start(wire, state.inner, step), wire, bucket)

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int | None:
        return self.inner.traffic(num_elements, min(element_bytes, self.dtype.itemsize), world_size)
