"""Mean of the gradients over all ranks, by one all-reduce per bucket.

Formula: g = sum over ranks r of (g_r / n). Dividing before summing keeps fp16 from overflowing as long as the mean fits.
Error: the rounding of n additions in the gradient's dtype. Ranks hold equal bits if the backend's all-reduce gives equal bits,
as gloo's ring does.
Source: ring all-reduce, Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002 (2 (n-1)/n of the data per rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from typing_extensions import override

from ..gradients.buckets import Bucket
from .base import Done, GradientExchange, Work


@dataclass(frozen=True)
class AllReduce(GradientExchange[dist.ProcessGroup]):
    """The exact exchange of gradients; its state is just the process group."""

    @property
    @override
    def repeatable(self) -> bool:
        return True

    @property
    @override
    def sends_marks(self) -> bool:
        return True

    @override
    def input_scale(self, world_size: int) -> float:
        return 1.0 / world_size

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: dist.ProcessGroup | None = None
    ) -> dist.ProcessGroup:
        return group

    def start(self, bucket: Bucket, state: dist.ProcessGroup, step: int) -> Work:
        """Start an all-reduce that sums ``bucket.flat``, and its marks if it has some, over the group, in place."""
        if state.size() == 1:
            return Done()
        work: dist.Work | None = dist.all_reduce(bucket.sent, op=dist.ReduceOp.SUM, group=state, async_op=True)
        assert work is not None, "this process is not a member of the group"
        return work

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int:
        """Return the bytes of a ring all-reduce: each rank sends 2 (n-1) times 1/n of the gradients."""
        return 2 * (world_size - 1) * num_elements * element_bytes // world_size
