"""This rank's part of gradients averaged by any gradient exchange, such as a code or a hierarchy, under ``sharded``.

The exchange gets buckets of its own with copies of the gradients, because it overwrites a bucket with its result,
and ``p.grad`` must stay this rank's own gradient. It averages whole buckets; each rank keeps its part of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..exchange.base import GradientExchange, Work
from ..gradients.buckets import Bucket
from ..groups.allocation import zeros_for
from .parts import Layout, in_memory_order


class ExchangedMeans:
    """The buckets given to a gradient exchange, one per bucket of a layout. Every rank must construct it, with equal arguments.

    Args:
        exchange: averages the gradients.
        layout: layout of the parameters.
        names: names of the parameters.
        parameters: by index.
        gradients: tensors of the parameters' shapes that hold their gradients when a bucket is started.
        group: the ranks.
    """

    def __init__(
        self,
        exchange: GradientExchange[Any],
        layout: Layout,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        self._exchange, self._layout, self._group = exchange, layout, group
        self._parameters, self._gradients = parameters, gradients
        allocate = zeros_for(group)
        self._buckets = []
        for b in layout.buckets:
            is_last = b.index == len(layout.buckets) - 1
            own_names, own = [names[i] for i in b.parameters], [parameters[i] for i in b.parameters]
            self._buckets.append(Bucket(b.index, is_last, own_names, own, allocate=allocate))
        self._state = exchange.prepare(self._buckets, group)
        self.step = 0

    def start(self, bucket: int) -> Work:
        """Start to exchange a bucket's gradients as they are now. Every rank must call it, in the same order of buckets."""
        into = self._buckets[bucket]
        with torch.no_grad():
            torch._foreach_copy_(into.views, [self._gradients[i] for i in self._layout.buckets[bucket].parameters])
            scale = self._exchange.input_scale(self._group.size())
            if scale != 1.0:
                into.flat.mul_(scale)
        work = self._exchange.start(into, self._state, self.step)
        if not self._exchange.one_round and into.flat.device.type == "cpu":  # else later rounds could interleave
            work.wait()
        return work

    def write_part(self, bucket: int, into: Tensor) -> None:
        """Write this rank's part of a bucket's mean to a flat tensor of that size, after the bucket's work was waited for."""
        views = dict(zip(self._layout.buckets[bucket].parameters, self._buckets[bucket].views, strict=True))
        start, _ = self._layout.buckets[bucket].slice_of(self._group.rank())
        for index, view in views.items():
            for owner, piece in self._layout.pieces_of(index):
                if owner == self._group.rank():
                    part = in_memory_order(view, self._parameters[index])[piece.start : piece.end]
                    into[piece.offset - start : piece.offset - start + part.numel()].copy_(part)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the exchange for a checkpoint. Every rank must call; each saves its own."""
        return {"step": self.step, "exchange": self._exchange.state_dict(self._state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state that :meth:`state_dict` returned on this rank. Every rank must call."""
        self._exchange.load_state_dict(self._state, saved["exchange"])
        self.step = int(saved["step"])
