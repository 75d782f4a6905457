"""The ``Carrier`` for ranks of one node: one copy of the weights, gradients read from other ranks' memory, no all-gather.

A step has two barriers of all ranks (see [Note: one copy of the weights] in weights.py). Between them each rank sums its
part of all ranks' gradients and steps it, one stretch after another, so that a sum is still in the cache when the
optimizer reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from ...errors import MismatchError, explain, rank_table
from ...exchange.nan_watch import NanWatch
from ...groups.fake import FakeNodeGroup
from ...groups.shared_memory import SharedMemoryGroup
from ...groups.shared_memory.program import DTYPE_OF
from ...registry import registry
from ..carrier import Carrier
from ..parts import BucketLayout
from .embedding_rows import LendingHook, embeddings_of
from .gradients import SharedGradients, Stretch
from .linear_gradients import PlacingHook, linear_layers_of
from .weights import SegmentPlaces, SharedWeights

#: Bytes that are summed before they are stepped. Larger stretches leave the cache, smaller ones cost more optimizer calls.
STRETCH_BYTES: Final = 4 << 20
# Per rank: whether all parameters have a gradient; digest of changed weights; weight of its gradient in the mean; and what it
# tells of its steps.
_REPORT: Final = struct.Struct("<?QdI")


def shared_memory_of(group: dist.ProcessGroup) -> SharedMemoryGroup | FakeNodeGroup | None:
    """Return the shared-memory group that serves CPU tensors of a group; None if another backend does."""
    if isinstance(group, SharedMemoryGroup | FakeNodeGroup):
        return group
    try:
        found = group._get_backend(torch.device("cpu"))
    except (RuntimeError, AttributeError):
        return None
    return found if isinstance(found, SharedMemoryGroup | FakeNodeGroup) else None


def can_share(group: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> bool:
    """Tell whether :class:`SharedCarrier` can serve this group and these parameters; all ranks get the same answer."""
    return shared_memory_of(group) is not None and all(
        p.device.type == "cpu" and p.dtype.is_floating_point and p.dtype in DTYPE_OF for p in parameters
    )


class SharedCarrier(Carrier):
    """A :class:`~guozhuang.sharding.carrier.Carrier` for the ranks of one node, over its shared memory.

    Memory: one copy of the weights for the whole node, and one copy of the gradients for each rank.

    Args:
        model: the model that the parameters belong to.
        names: names of the parameters, for errors.
        parameters: equal on all ranks, on the CPU, of a floating-point dtype.
        layout: layout of the parameters.
        group: the ranks; see :func:`can_share`.
        listens: whether gradients are handled as they arrive.

    Attributes:
        gradients: the gradient buffers of all ranks.
    """

    has_replicas = False

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: BucketLayout,
        group: dist.ProcessGroup,
        listens: bool = True,
    ) -> None:
        found = shared_memory_of(group)
        assert found is not None, "the group is not one of shared memory"
        self._segments = found.segments()
        where = SegmentPlaces(layout)
        self._shared = SharedWeights(self._segments, names, parameters, layout, where)
        self.gradients = SharedGradients(self._segments, names, parameters, layout, where)
        self._nan, self._num_steps = NanWatch(group), 0
        self._weights: list[float] | None = None  # of each rank's gradients in the mean of this step; None: all are 1
        super().__init__(names, parameters, layout, group, self._shared.flats, listens)
        index_of = {id(p): i for i, p in enumerate(parameters)}
        for embedding in embeddings_of(model) if listens else ():
            if (i := index_of.get(id(embedding.weight))) is not None:
                lending = LendingHook(self.gradients.lend(i))
                self._handles.append(embedding.register_forward_hook(lending, prepend=True))
        for linear in linear_layers_of(model) if listens else ():
            if (i := index_of.get(id(linear.weight))) is not None:
                placing = PlacingHook(self.gradients.compute(i))
                self._handles.append(linear.register_forward_hook(placing, prepend=True))

    @override
    def _use_blocks(self) -> None:
        self._runs = self.gradients.runs(self.blocks, STRETCH_BYTES)
        self._scratch = torch.empty(max((run.num_bytes for run in self._runs), default=0), dtype=torch.uint8)

    @override
    def _on_gradient(self, index: int) -> None:
        self.gradients.on_gradient(index)

    @override
    def _send_rest(self) -> None:
        """Do nothing: nothing is sent in backward."""

    @override
    def _meet(self) -> frozenset[int]:
        """Wait for all ranks at the step's first barrier; until its second one all ranks' gradients stay unchanged."""
        self._nan.look_at(self._names, self.parameters, self._num_steps)
        self._num_steps += 1
        changed = self._shared.changed()
        has_all = self.gradients.take()
        weight = registry.weight.among(self._size, self._rank)
        report = _REPORT.pack(has_all, self._shared.digest(changed), weight, self._tell())
        reports = [_REPORT.unpack_from(each) for each in self._segments.meet(b"sharded: gradients are there", report)]
        if any(digest for _, digest, _, _ in reports):
            self._take_up(changed, [digest for _, digest, _, _ in reports])
        self._compare(len({told for *_, told in reports}) == 1)
        weights = [weight for _, _, weight, _ in reports]
        self._weights = None if all(weight == 1.0 for weight in weights) else weights
        if all(has for has, *_ in reports):
            return frozenset()
        return frozenset(i for i, is_used in enumerate(self.gradients.used()) if not is_used)

    @override
    def _means(self, keep: bool) -> Iterator[Sequence[int]]:
        """Sum one stretch of blocks after another. With ``keep`` all sums stay valid, which is slower and needs more memory."""
        into, at = self._scratch, 0
        if keep:
            into = torch.empty(sum(run.num_bytes for run in self._runs), dtype=torch.uint8)
        for run in self._runs:
            self._sum(run, into[at : at + run.num_bytes].view(run.dtype))
            yield run.blocks
            at += run.num_bytes if keep else 0
        if keep:
            self._segments.meet(b"sharded: gradients were read")  # from here on a backward may write gradients again

    def _sum(self, run: Stretch, into: Tensor) -> None:
        """Sum the gradients of a run of blocks, and assign them to the blocks' ``weight.grad``."""
        wanted = [i for i in run.blocks if not self._unused or not self._held[i] <= self._unused]
        if wanted:
            self.gradients.sum_into(run, into, self._weights)
        first = self.blocks[run.blocks[0]].start
        for i in wanted:
            block = self.blocks[i]
            self.weights[i].grad = self._of_block(block, into, block.start - first)

    def _take_up(self, changed: Sequence[int], digests: Sequence[int]) -> None:
        if len(set(digests)) > 1:
            what = "ranks have changed weights between steps to different values, or not all ranks have changed them"
            mine = ", ".join(self._names[i] for i in changed[:5]) + (", ..." if len(changed) > 5 else "")
            rows = [(rank, digest >> 32, f"{digest & 0xFFFFFFFF:08x}") for rank, digest in enumerate(digests)]
            table = rank_table(("rank", "weights changed", "checksum"), rows)
            fix = "make the same change on every rank, e.g. load the same checkpoint everywhere"
            text = explain(f"{what}; this rank changed: {mine or 'none'}", rank=self._rank, fix=fix)
            raise MismatchError(f"{text}\n{table}")
        self._shared.take_up(changed)

    @override
    def _publish(self) -> None:
        self._segments.meet(b"sharded: weights were written")
        self._shared.remember()

    @override
    def _start_over(self) -> None:
        """Do nothing: the next step reads all gradients from ``p.grad`` again."""

    @override
    def synchronize(self) -> None:
        """Do nothing: all weights can be read when the step returns."""
