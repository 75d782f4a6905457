"""Exchanges of gradients after which each rank has the mean of its part of every bucket, and the bucket is as it was.

``Scatter`` sums exactly, by a reduce-scatter. ``KeepPart`` lets any other exchange of gradients, such as a code or a hierarchy,
average whole buckets, and keeps this rank's part of the results. That exchange gets buckets of its own with copies of the
gradients, because it overwrites a bucket with its result, and ``p.grad`` must stay this rank's own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..exchange.around import AroundGradients
from ..exchange.base import GradientExchange, Work
from ..gradients.buckets import Bucket
from ..groups.allocation import zeros_for
from ..world.versions import reduce_scatter_single
from .parts import Layout, in_memory_order


@dataclass
class Parts:
    """The state of both exchanges.

    Attributes:
        group: the ranks.
        means: this rank's part of each bucket's mean, by bucket index; 1-dimensional, valid once the bucket was waited for.
        copies: the buckets that ``KeepPart`` hands to its inner exchange.
        inner: the state of the inner exchange.
    """

    group: dist.ProcessGroup
    means: list[Tensor]
    copies: Sequence[Bucket] = ()
    inner: Any = None


@dataclass(frozen=True)
class _Then:
    """A work after which something else has to be done once."""

    work: Work
    then: Callable[[], object]

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        self.then()


def _parts(buckets: Sequence[Bucket], group: dist.ProcessGroup) -> list[Tensor]:
    allocate = zeros_for(group)
    return [allocate(b.flat.numel() // group.size(), b.flat.dtype, b.flat.device) for b in buckets]


@dataclass(frozen=True)
class Scatter(GradientExchange[Parts]):
    """The exact mean of this rank's part of each bucket. Buckets must have a multiple of the number of ranks as their size."""

    @property
    @override
    def repeatable(self) -> bool:
        return True

    @override
    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: Parts | None = None) -> Parts:
        return Parts(group, _parts(buckets, group))

    @override
    def start(self, bucket: Bucket, state: Parts, step: int) -> Work:
        mean = state.means[bucket.index]
        work = reduce_scatter_single(mean, bucket.flat, group=state.group, async_op=True)
        return _Then(work, lambda: mean.mul_(1.0 / state.group.size()))

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int:
        return (world_size - 1) * num_elements * element_bytes // world_size


@dataclass(frozen=True)
class KeepPart(AroundGradients[Parts]):
    """This rank's part of each mean that another exchange of gradients computes.

    Args:
        inner: averages the gradients.
        layout: says which elements belong to this rank; its buckets are those that ``prepare`` gets.
    """

    inner: GradientExchange[Any]
    layout: Layout

    @property
    @override
    def repeatable(self) -> bool:
        return self.inner.repeatable

    @override
    def input_scale(self, world_size: int) -> float:
        return 1.0

    @override
    def inner_state(self, state: Parts) -> Any:
        return state.inner

    @override
    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: Parts | None = None) -> Parts:
        allocate = zeros_for(group)
        copies = [Bucket(b.index, b.is_last, b.names, b.parameters, allocate=allocate) for b in buckets]
        return Parts(group, _parts(buckets, group), copies, self.inner.prepare(copies, group))

    @override
    def start(self, bucket: Bucket, state: Parts, step: int) -> Work:
        copy = state.copies[bucket.index]
        with torch.no_grad():
            torch._foreach_copy_(copy.views, bucket.views)
            scale = self.inner.input_scale(state.group.size())
            if scale != 1.0:
                copy.flat.mul_(scale)
        return _Then(self.inner.start(copy, state.inner, step), lambda: self._keep(copy, state))

    def _keep(self, copy: Bucket, state: Parts) -> None:
        """Copy this rank's part out of the result."""
        flat_bucket, rank = self.layout.buckets[copy.index], state.group.rank()
        start, _ = flat_bucket.slice_of(rank)
        for index, view, parameter in zip(flat_bucket.parameters, copy.views, copy.parameters, strict=True):
            for owner, piece in self.layout.pieces_of(index):
                if owner == rank:
                    part = in_memory_order(view, parameter)[piece.start : piece.end]
                    state.means[copy.index][piece.offset - start : piece.offset - start + part.numel()].copy_(part)
