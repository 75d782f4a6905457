"""Another exchange with the gradients in a narrower dtype on the wire.

Formula: decode(inner(encode(g))) where encode and decode are rounding casts.
Error: half a unit in the last place of the narrower dtype for each gradient, and as much again for each addition of the inner
exchange; relative 2^-11 for fp16, 2^-8 for bf16. Ranks divide before they sum, so a sum overflows only where the mean does (in
fp16 beyond 65504); that is infinity then, on all ranks, which a gradient scaler sees. In fp16 what is below 3e-8 becomes 0.
Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..gradients.buckets import Bucket
from .base import GradientExchange, Work


@dataclass(frozen=True)
class _Decode:
    work: Work
    wire: Bucket
    bucket: Bucket

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        self.bucket.flat.copy_(self.wire.flat)


@dataclass(frozen=True)
class Cast(GradientExchange[tuple[dict[int, Bucket], Any]]):
    """An exchange with a cast around it. Its state: one wire bucket per bucket, and the inner state.

    Args:
        dtype: floating-point dtype on the wire.
        inner: what exchanges the cast buckets.
    """

    dtype: torch.dtype
    inner: GradientExchange[Any]

    @property
    def one_round(self) -> bool:
        """As the inner exchange."""
        return self.inner.one_round

    @property
    def averages(self) -> bool:
        """As the inner exchange."""
        return self.inner.averages

    def input_scale(self, world_size: int) -> float:
        """As the inner exchange."""
        return self.inner.input_scale(world_size)

    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: tuple[dict[int, Bucket], Any] | None = None
    ) -> tuple[dict[int, Bucket], Any]:
        """Allocate the wire buckets and prepare the inner exchange for them."""
        wires = {}
        for bucket in buckets:
            first = bucket.parameters[0]
            one = torch.empty(1, dtype=self._wire_dtype(first.dtype), device=first.device)
            stand_ins = [one.expand(p.numel()) for p in bucket.parameters]  # sizes without memory
            wires[bucket.index] = Bucket(bucket.index, bucket.is_last, bucket.names, stand_ins)
        return wires, self.inner.prepare(list(wires.values()), group, None if before is None else before[1])

    def state_dict(self, state: tuple[dict[int, Bucket], Any]) -> dict[str, Any]:
        """Return the inner exchange's."""
        return self.inner.state_dict(state[1])

    def load_state_dict(self, state: tuple[dict[int, Bucket], Any], saved: Mapping[str, Any]) -> None:
        """Hand it to the inner exchange."""
        self.inner.load_state_dict(state[1], saved)

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize else dtype

    def start(self, bucket: Bucket, state: tuple[dict[int, Bucket], Any], step: int) -> Work:
        """Encode, and start the inner exchange; decoded when waited for."""
        wires, inner_state = state
        wire = wires[bucket.index]
        wire.flat.copy_(bucket.flat)
        return _Decode(self.inner.start(wire, inner_state, step), wire, bucket)

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int | None:
        """Return the inner exchange's bytes at the narrower width."""
        return self.inner.traffic(num_elements, min(element_bytes, self.dtype.itemsize), world_size)
