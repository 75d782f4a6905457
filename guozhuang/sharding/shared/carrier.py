"""The carrier for ranks of one node: one copy of the weights, gradients read from other ranks' memory, no all-gather.

A step has two meetings of all ranks (see [Note: one copy of the weights] in weights.py). Between them each rank sums its
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

from ...errors import MismatchError, explain, rank_table
from ...groups.shared_memory import SharedMemoryGroup
from ...groups.shared_memory.program import DTYPE_OF
from ...groups.shared_memory.segments import SharedSegments
from ..carrier import Arrival, check_nothing_came
from ..parts import Block, Layout
from .embedding_rows import LendingHook, embeddings_of
from .gradients import SharedGradients, Stretch
from .linear_gradients import PlacingHook, linear_layers_of
from .weights import SegmentPlaces, SharedWeights

#: Bytes that are summed before they are stepped. Larger stretches leave the cache, smaller ones cost more optimizer calls.
STRETCH_BYTES: Final = 4 << 20
_TOLD: Final = struct.Struct("<?Q")  # whether all parameters have a gradient; digest of changed weights


def shared_memory_of(group: dist.ProcessGroup) -> SharedMemoryGroup | None:
    """Return the shared-memory group that serves CPU tensors of a group; None if another backend does."""
    if isinstance(group, SharedMemoryGroup):
        return group
    try:
        found = group._get_backend(torch.device("cpu"))
    except (RuntimeError, AttributeError):
        return None
    return found if isinstance(found, SharedMemoryGroup) else None


def can_share(group: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> bool:
    """Tell whether :class:`SharedCarrier` can serve this group and these parameters; all ranks get the same answer."""
    return shared_memory_of(group) is not None and all(
        p.device.type == "cpu" and p.dtype.is_floating_point and p.dtype in DTYPE_OF for p in parameters
    )


class _Arrival(Arrival):
    def __init__(self, carrier: SharedCarrier, parameter: int) -> None:
        self.carrier = carrier
        self.parameter = parameter
        gradients = carrier.gradients
        self._own, self._brought, self._bring = carrier, gradients.brought, gradients.bring
        self._handed = gradients.handed

    def __call__(self, parameter: Tensor) -> None:
        if self._own.is_collected:
            self._own.came_after_collect(self.parameter)
        if self._brought[self.parameter]:
            gradient = parameter.grad
            if gradient is not None and not self._handed.holds(self.parameter, gradient):
                self._bring(self.parameter, gradient)


class SharedCarrier:
    """A :class:`~guozhuang.sharding.carrier.Carrier` for the ranks of one node, over its shared memory.

    Memory: one copy of the weights for the whole node, and one copy of the gradients for each rank.

    Args:
        model: the model that the parameters belong to.
        names: names of the parameters, for errors.
        parameters: equal on all ranks, on the CPU, of a floating-point dtype.
        layout: layout of the parameters.
        group: the ranks; see :func:`can_share`.

    Attributes:
        gradients: the gradient buffers of all ranks.
        is_collected: whether ``collect`` was called, and neither ``publish`` nor ``skip`` after it.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        group: dist.ProcessGroup,
    ) -> None:
        found = shared_memory_of(group)
        assert found is not None, "the group is not one of shared memory"
        self.layout, self.parameters, self.group = layout, parameters, group
        self._names = names
        self._segments = SharedSegments(found)
        self._rank, self._size = self._segments.rank, self._segments.size
        where = SegmentPlaces(layout)
        self._weights = SharedWeights(self._segments, names, parameters, layout, where)
        self.gradients = SharedGradients(self._segments, names, parameters, layout, where)
        self._separate: frozenset[int] = frozenset()
        self._make_blocks()
        self.is_collected = False
        self._is_gathered = False  # whether this rank is between the two meetings of a step that is summed by stretches
        self._kept: list[Tensor | None] = []
        self._came_late = False
        self._handles = [p.register_post_accumulate_grad_hook(_Arrival(self, i)) for i, p in enumerate(parameters)]
        index_of = {id(p): i for i, p in enumerate(parameters)}
        for embedding in embeddings_of(model):
            if (i := index_of.get(id(embedding.weight))) is not None:
                lending = LendingHook(self.gradients.lend(i))
                self._handles.append(embedding.register_forward_hook(lending, prepend=True))
        for linear in linear_layers_of(model):
            if (i := index_of.get(id(linear.weight))) is not None:
                placing = PlacingHook(self.gradients.compute(i))
                self._handles.append(linear.register_forward_hook(placing, prepend=True))

    # ---- the interface ------------------------------------------------------------

    def collect(self) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`.

        Computes all sums before it returns; ``stretches`` is faster and needs less memory.
        """
        if self.is_collected:
            check_nothing_came(self._came_late, self._rank)
            return
        self._meet()
        sums = torch.empty(sum(run.num_bytes for run in self._runs), dtype=torch.uint8)
        at = 0
        for run in self._runs:
            self._sum(run, sums[at : at + run.num_bytes].view(run.dtype))
            at += run.num_bytes
        self._segments.meet(b"sharded: gradients were read")  # a backward may write to them again
        self._is_gathered = False
        self._kept = [p.grad for p in self.parameters]
        self.is_collected = True

    def stretches(self) -> Iterator[Sequence[int]]:
        """Sum and yield one stretch after another, in place of ``collect``. Every rank must iterate to the end.

        Yields:
            Indices of blocks whose ``weights[i].grad`` is what ``collect`` would make it, valid until the next item is
            asked for: the optimizer must have stepped them by then. ``blocks`` and ``weights`` may be replaced before the
            first item, never later. After ``collect``, all blocks in one item.
        """
        if self.is_collected:
            check_nothing_came(self._came_late, self._rank)
            yield range(len(self.blocks))
            return
        self._meet()
        for run in self._runs:
            self._sum(run, self._scratch[: run.num_bytes].view(run.dtype))
            yield run.blocks

    def publish(self) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`."""
        assert self.is_collected or self._is_gathered
        self._segments.meet(b"sharded: weights were written")
        self._weights.remember()
        self._drop()

    def skip(self) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`."""
        if self.is_collected or self._is_gathered:  # the latter after an error in the optimizer's step
            self._drop()

    def split(self, separate: frozenset[int]) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`."""
        if not separate <= self._separate:
            self._separate |= separate
            self._make_blocks()

    def synchronize(self) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`. Does nothing: all weights can be read when the step returns."""

    def close(self) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`."""
        for handle in self._handles:
            handle.remove()

    # ---- the meeting, and what follows it ------------------------------------------------------------

    def _meet(self) -> None:
        """Hold the first meeting of a step: from here to the second one the gradients of all ranks stay unchanged."""
        changed = self._weights.changed()
        has_all = self.gradients.take()
        told = self._segments.meet(b"sharded: gradients are there", _TOLD.pack(has_all, self._weights.digest(changed)))
        self._is_gathered = True
        everybody = [_TOLD.unpack_from(each) for each in told]
        if any(digest for _, digest in everybody):
            self._take_up(changed, [digest for _, digest in everybody])
        if all(has for has, _ in everybody):
            self._unused: frozenset[int] = frozenset()
        else:
            used = self.gradients.used()
            self._unused = frozenset(i for i, is_used in enumerate(used) if not is_used)
            blocks = [block for rank in range(self._size) for block in self.layout.blocks_of(rank, self._separate)]
            mixed = {i for b in blocks if not b.parameters <= self._unused for i in b.parameters & self._unused}
            if mixed:
                self.split(frozenset(mixed))
        for weight in self.weights:
            weight.grad = None

    def _sum(self, run: Stretch, into: Tensor) -> None:
        """Sum the gradients of a run of blocks, and assign them to the blocks' ``weight.grad``."""
        wanted = [i for i in run.blocks if not self._unused or not self._held[i] <= self._unused]
        if wanted:
            self.gradients.sum_into(run, into)
        first = self.blocks[run.blocks[0]].start
        for i in wanted:
            block = self.blocks[i]
            self.weights[i].grad = into[block.start - first : block.end - first]

    def _take_up(self, changed: Sequence[int], digests: Sequence[int]) -> None:
        if len(set(digests)) > 1:
            what = "ranks have changed weights between steps to different values, or not all ranks have changed them"
            mine = ", ".join(self._names[i] for i in changed[:5]) + (", ..." if len(changed) > 5 else "")
            rows = [(rank, digest >> 32, f"{digest & 0xFFFFFFFF:08x}") for rank, digest in enumerate(digests)]
            table = rank_table(("rank", "weights changed", "checksum"), rows)
            fix = "make the same change on every rank, e.g. load the same checkpoint everywhere"
            text = explain(f"{what}; this rank changed: {mine or 'none'}", rank=self._rank, fix=fix)
            self._is_gathered = False
            raise MismatchError(f"{text}\n{table}")
        self._weights.take_up(changed)

    # ---- ends and beginnings ------------------------------------------------------------

    def came_after_collect(self, index: int) -> None:
        """Handle a gradient that arrives after ``collect``: start a new step if it is a new gradient, else note the mistake."""
        if self.parameters[index].grad is self._kept[index]:
            self._came_late = True
        else:
            self._drop()  # the collected gradients were set to None, and a new step begins

    def _drop(self) -> None:
        for weight in self.weights:
            weight.grad = None
        self.is_collected = self._is_gathered = self._came_late = False
        self._kept = []

    def _make_blocks(self) -> None:
        self.blocks: Sequence[Block] = self.layout.blocks_of(self._rank, self._separate)
        self.weights: Sequence[nn.Parameter] = [
            nn.Parameter(self._weights.flats[b.bucket][b.start : b.end]) for b in self.blocks
        ]
        self._held = [block.parameters for block in self.blocks]
        self._runs = self.gradients.runs(self.blocks, STRETCH_BYTES)
        self._scratch = torch.empty(max((run.num_bytes for run in self._runs), default=0), dtype=torch.uint8)
