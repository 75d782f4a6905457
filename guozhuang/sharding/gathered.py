"""The carrier for any process group: each bucket is reduce-scattered, stepped in parts, and all-gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from ..exchange.base import GradientExchange
from ..gradients.buckets import Bucket, Placement, view_in
from ..gradients.step_reducer import StepReducer
from ..groups.allocation import zeros_for
from ..world.versions import all_gather_single
from .arriving import Gathering, can_wait_in_readers, reads_past_python
from .carrier import Carrier, put_back
from .parts import Layout
from .scatter import KeepPart, Scatter


class GatheredCarrier(Carrier):
    """A :class:`~guozhuang.sharding.carrier.Carrier` for any group and device.

    Memory: one copy each of weights and gradients, and one more of the gradients of this rank's part.

    Args:
        model: the model that the parameters belong to.
        names: names of the parameters, for errors.
        parameters: equal on all ranks.
        layout: layout of the parameters.
        group: the ranks.
        overlap_gather: let new weights arrive while the program continues; code that reads one waits (:mod:`.arriving`).
        exchange: averages gradients; None: an exact sum, by a reduce-scatter.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        group: dist.ProcessGroup,
        overlap_gather: bool = True,
        exchange: GradientExchange[Any] | None = None,
    ) -> None:
        self._model, self._overlap_gather = model, overlap_gather
        allocate = zeros_for(group)
        flats = [allocate(b.num_elements, b.dtype, b.device) for b in layout.buckets]
        self._places = [view_in(flats[b], offset, p) for p, (b, offset) in zip(parameters, layout.places, strict=True)]
        for parameter, place, name in zip(parameters, self._places, names, strict=True):
            put_back(parameter, place, name, group.rank())
        buckets = []
        for b in layout.buckets:
            members = [names[i] for i in b.parameters], [parameters[i] for i in b.parameters]
            is_last = b.index == len(layout.buckets) - 1
            buckets.append(
                Bucket(b.index, is_last, *members, False, allocate, offsets=b.offsets, num_elements=b.num_elements)
            )
        placement = Placement([b.parameters for b in layout.buckets], buckets, [b for b, _ in layout.places])
        # SyncBatchNorm communicates in backward: ranks could send early buckets in another order relative to its collectives.
        may_send_early = not any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())
        method = Scatter() if exchange is None else KeepPart(exchange, layout)
        self._reducer = StepReducer(names, parameters, placement, group, method, may_send_early)
        self.exchanging = None if exchange is None else self._reducer
        self._gatherings: list[Gathering] = []
        self._sent: list[dist.Work | None] = [None] * len(buckets)
        super().__init__(names, parameters, layout, group, flats)

    @override
    def _use_blocks(self) -> None:
        starts = [self.layout.buckets[b.bucket].slice_of(self._rank)[0] for b in self.blocks]
        means = self._reducer.state.means
        self._block_means = [
            means[b.bucket][b.start - start : b.end - start] for b, start in zip(self.blocks, starts, strict=True)
        ]

    @override
    def _on_gradient(self, index: int) -> None:
        self._reducer.on_gradient(index)

    @override
    def _meet(self) -> frozenset[int]:
        self.synchronize()
        for parameter, place, name in zip(self.parameters, self._places, self._names, strict=True):
            if place.numel() and parameter.data_ptr() != place.data_ptr():
                put_back(parameter, place, name, self._rank)
        return frozenset(i for i, is_used in enumerate(self._reducer.agree()) if not is_used)

    @override
    def _means(self, keep: bool) -> Iterator[Sequence[int]]:
        """Set the blocks' gradients bucket by bucket, and send a bucket's new weights while the next bucket is stepped."""
        for bucket in self.layout.buckets:
            self._reducer.wait(bucket.index)
            indices = [i for i, block in enumerate(self.blocks) if block.bucket == bucket.index]
            for i in indices:
                self.weights[i].grad = None if self._held[i] <= self._unused else self._block_means[i]
            yield indices
            if not keep:
                self._send(bucket.index)

    def _send(self, bucket: int) -> None:
        """Start the all-gather of a bucket's new weights, unless no parameter of it was used."""
        if self._sent[bucket] or self._unused.issuperset(self.layout.buckets[bucket].parameters):
            return
        low, high = self.layout.buckets[bucket].slice_of(self._rank)
        flat = self._flats[bucket]
        self._sent[bucket] = all_gather_single(flat, flat[low:high], group=self.group, async_op=True)

    @override
    def _publish(self) -> None:
        # Never set back to True: torch._dynamo.reset() clears the record, but compiled modules still run.
        self._overlap_gather = self._overlap_gather and not reads_past_python(self._model)
        for bucket in self.layout.buckets:
            self._send(bucket.index)
        for bucket, work in zip(self.layout.buckets, self._sent, strict=True):
            if work is None:
                continue
            readers = [self.parameters[i] for i in bucket.parameters]
            if not self._overlap_gather or not all(can_wait_in_readers(p) for p in readers):
                work.wait()
            else:
                self._gatherings.append(Gathering(work, readers))
        self._reducer.choose_next()

    @override
    def _start_over(self) -> None:
        self._sent = [None] * len(self._sent)
        self._reducer.start_over()

    @override
    def synchronize(self) -> None:
        while self._gatherings:
            self._gatherings.pop().finish()
