"""Exchanges of gradients that give each rank the mean of its part of every bucket, and leave the bucket unchanged.

``Scatter`` sums exactly, by a reduce-scatter. ``KeepPart`` lets any other exchange of gradients, such as a code or a hierarchy,
average whole buckets, and keeps this rank's part of the results. That exchange gets buckets of its own with copies of the
gradients, because it overwrites a bucket with its result, and ``p.grad`` must stay this rank's own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..exchange.around import AroundGradients
from ..exchange.base import GradientExchange, Then, Work
from ..gradients.buckets import Bucket
from ..groups.allocation import zeros_for
from ..registry import registry
from ..world.versions import reduce_scatter_single
from .parts import BucketLayout, in_memory_order


@dataclass
class Parts:
    """The state of :class:`Scatter` and of :class:`KeepPart`.

    Attributes:
        group: the ranks.
        means: this rank's part of each bucket's mean, by bucket index; 1-dimensional, valid once the bucket was waited for.
        copies: the buckets that ``KeepPart`` hands to its inner exchange.
        kept: for each bucket, the pieces of ``copies`` that belong to this rank, and the places of ``means`` where they go.
        inner: the state of the inner exchange.
    """

    group: dist.ProcessGroup
    means: list[Tensor]
    copies: Sequence[Bucket] = ()
    kept: Sequence[tuple[list[Tensor], list[Tensor]]] = ()
    inner: Any = None


def _parts(layout: BucketLayout, group: dist.ProcessGroup) -> list[Tensor]:
    allocate = zeros_for(group)
    return [allocate(b.slice_sizes[group.rank()], b.dtype, b.device) for b in layout.buckets]


@dataclass(frozen=True)
class Scatter(GradientExchange[Parts]):
    """Computes the exact mean of this rank's part of each bucket: by a reduce-scatter, if all ranks' parts are equal.

    Parts of any size, those of whole parameters, are sent to their owner by each rank and summed there in the order of ranks;
    this takes memory for a rank's part from every rank, as much as one more copy of the gradients.

    Args:
        layout: says which elements belong to this rank; its buckets are those that ``prepare`` gets.
    """

    layout: BucketLayout

    @property
    @override
    def repeatable(self) -> bool:
        return True

    @override
    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: Parts | None = None) -> Parts:
        return Parts(group, _parts(self.layout, group))

    @override
    def start(self, bucket: Bucket, state: Parts, step: int) -> Work:
        mean, of_rank = state.means[bucket.index], self.layout.buckets[bucket.index]
        size = state.group.size()
        weight, after = registry.weight.among(size, state.group.rank()), 1.0 / size
        if bucket.flat.dtype == torch.float16:  # whose sum may overflow where the mean does not
            weight, after = weight / size, 1.0
        flat = bucket.flat if weight == 1.0 else bucket.flat * weight
        if of_rank.is_whole:
            parts = torch.empty(size, mean.numel(), dtype=mean.dtype, device=mean.device)
            takes = [mean.numel()] * size
            sent = dist.all_to_all_single(
                parts.view(-1), flat, takes, of_rank.slice_sizes, group=state.group, async_op=True
            )
            assert sent is not None
            return Then(sent, lambda: torch.sum(parts, 0, out=mean).mul_(after))
        work = reduce_scatter_single(mean, flat, group=state.group, async_op=True)
        return Then(work, lambda: mean.mul_(after))

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int:
        return (world_size - 1) * num_elements * element_bytes // world_size


@dataclass(frozen=True)
class KeepPart(AroundGradients[Parts]):
    """Keeps this rank's part of each bucket's mean, which another exchange of gradients computes.

    Args:
        inner: averages the gradients.
        layout: says which elements belong to this rank; its buckets are those that ``prepare`` gets.
    """

    inner: GradientExchange[Any]
    layout: BucketLayout

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
        means, kept = _parts(self.layout, group), []
        for flat_bucket, copy, mean in zip(self.layout.buckets, copies, means, strict=True):
            low, high = flat_bucket.slice_of(group.rank())
            pieces = list(self.layout.pieces_in(flat_bucket, low, high))
            members = zip(flat_bucket.parameters, copy.views, copy.parameters, strict=True)
            results = {index: in_memory_order(view, parameter) for index, view, parameter in members}
            places = [mean[p.offset - low : p.offset - low + p.end - p.start] for p in pieces]
            kept.append(([results[p.parameter][p.start : p.end] for p in pieces], places))
        return Parts(group, means, copies, kept, self.inner.prepare(copies, group))

    @override
    def start(self, bucket: Bucket, state: Parts, step: int) -> Work:
        copy = state.copies[bucket.index]
        with torch.no_grad():
            torch._foreach_copy_(copy.views, bucket.views)
            if (weight := registry.weight.among(state.group.size(), state.group.rank())) != 1.0:
                copy.flat.mul_(weight)
        work = self.inner.scale_and_start(copy, state.inner, step, state.group.size())
        return Then(work, lambda: _keep(*state.kept[bucket.index]))


def _keep(pieces: list[Tensor], places: list[Tensor]) -> None:
    if pieces:  # of a small bucket, a rank may own only padding
        torch._foreach_copy_(places, pieces)
