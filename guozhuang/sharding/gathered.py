"""The carrier for any process group: each bucket is reduce-scattered, stepped in parts, and all-gathered.

[Note: what was sent and changed] A bucket can be sent while backward still computes the gradients of others, but its gradients
may still change before the step: by another backward, by unscaling, by hand. The step must use the gradients
as they are then. So a sum of a bucket's bits, taken when it is sent, is compared with one taken at the step
(version counters would miss ``p.grad.data.mul_`` and GradScaler; a sum runs at the speed of memory). One small all-reduce
tells all ranks which parameters were used and which buckets have to be sent again. Buckets are sent early
only if no gradient changed after it arrived, on any rank, in the step before; and if one had to be sent again, not for the
next ``PATIENCE_STEPS`` steps: so accumulation over several backwards, or unscaling, costs next to nothing extra.
All ranks issue the same collectives in the same order: buckets by index, each once, the small one, then those sent again.
A parameter without a gradient holds its bucket back until the end of the backward, when all remaining buckets are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UsageError, explain
from ..exchange.base import GradientExchange, Work
from ..gradients.views import HandedOut
from ..groups.allocation import zeros_for
from ..world.versions import all_gather_single, reduce_scatter_single
from .arriving import Gathering, can_wait_in_readers, reads_past_python
from .carrier import Arrival, check_gradient, check_nothing_came
from .exchanged import ExchangedMeans
from .parts import Block, Layout, in_flat

#: Number of steps in which no bucket is sent early, after gradients were changed that had been sent early.
PATIENCE_STEPS = 50


class _Note(Arrival):
    def __init__(self, carrier: GatheredCarrier, parameter: int) -> None:
        self.carrier = carrier
        self.parameter = parameter
        self._own = carrier

    def __call__(self, parameter: Tensor) -> None:
        self._own._arrived(self.parameter)


def _bit_sum(flat: Tensor) -> Tensor:
    """Return the sum of the tensor's bits as 64-bit words, wrapping around."""
    return flat.view(torch.int64).sum()


class GatheredCarrier:
    """A :class:`~guozhuang.sharding.carrier.Carrier` for any group and device.

    Memory: one copy each of weights and gradients, and one more of the gradients of this rank's part.

    Args:
        model: the model that the parameters belong to.
        names: names of the parameters, for errors.
        parameters: equal on all ranks.
        layout: layout of the parameters.
        group: the ranks.
        overlap_gather: let new weights arrive while the program continues; code that reads one waits (:mod:`.arriving`).
        exchange: averages gradients, at the step; None: a reduce-scatter, which may begin while backward runs.

    Attributes:
        exchanged: the buckets of ``exchange``; None without an exchange.
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
        self.layout, self.parameters, self.group = layout, parameters, group
        self._model, self._names, self._overlap_gather = model, names, overlap_gather
        self._rank, self._size = group.rank(), group.size()
        # SyncBatchNorm communicates in backward: ranks could send early buckets in another order relative to its collectives.
        self._may_leave_early = not any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())
        self._leave_early, self._patience_steps = False, 0
        allocate = zeros_for(group)
        self._flats = [allocate(b.num_elements, b.dtype, b.device) for b in layout.buckets]
        self._gradients = [allocate(b.num_elements, b.dtype, b.device) for b in layout.buckets]
        self._means = [allocate(b.slice_elements, b.dtype, b.device) for b in layout.buckets]
        self._places: list[Tensor] = []
        self._views: list[Tensor] = []
        for i, parameter in enumerate(parameters):
            bucket, offset = layout.places[i]
            self._places.append(in_flat(self._flats[bucket], offset, parameter))
            self._views.append(in_flat(self._gradients[bucket], offset, parameter))
            self._place(i)
        self._handed = HandedOut(self._views)
        self.exchanged: ExchangedMeans | None = None
        if exchange is not None:
            self.exchanged = ExchangedMeans(exchange, layout, names, parameters, self._views, group)
            self._may_leave_early = False  # an exchange with error feedback must not see a bucket twice in one step
        self._separate: frozenset[int] = frozenset()
        self._make_blocks()
        self._gatherings: list[Gathering] = []
        self._filled = [False] * len(parameters)  # whether the parameter's part of the flat gradient may be nonzero
        self._collected = False
        self._kept: list[Tensor | None] = []
        self._callback_queued = False
        self._again: set[int] = set()
        self._unused: frozenset[int] = frozenset()
        self._start_over()
        self._handles = [p.register_post_accumulate_grad_hook(_Note(self, i)) for i, p in enumerate(parameters)]

    # ---- the interface ----------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`."""
        if self._collected:
            check_nothing_came(self._came_late, self._rank)
            return
        self._begin()
        for bucket in range(len(self._works)):
            self._receive(bucket)

    def stretches(self) -> Iterator[Sequence[int]]:
        """See :class:`~guozhuang.sharding.carrier.Carrier`. Sends a bucket's new weights while the next bucket is stepped."""
        if self._collected:
            check_nothing_came(self._came_late, self._rank)
            yield range(len(self.blocks))
            return
        self._begin()
        for bucket in range(len(self._works)):
            self._receive(bucket)
            yield [i for i, block in enumerate(self.blocks) if block.bucket == bucket]
            self._send(bucket)

    def _begin(self) -> None:
        """Send the gradients that were not sent early, and agree with the other ranks which parameters were used."""
        self.synchronize()
        self._take_up_moved()
        left_early = self._next > 0
        self._launch_rest()
        if self.exchanged is not None:
            self.exchanged.step += 1
        used = self._agree(left_early)
        self._unused = frozenset(i for i, is_used in enumerate(used) if not is_used)
        if self._unused - self._separate:
            together = [held for held in self._held_together() if not held <= self._unused]
            self.split(frozenset(i for held in together for i in held & self._unused))
        self._kept = [p.grad for p in self.parameters]
        self._collected = True

    def _receive(self, bucket: int) -> None:
        """Wait for this rank's part of a bucket's mean gradient, and assign it to the blocks."""
        work = self._works[bucket]
        assert work is not None
        work.wait()
        if self.exchanged is not None:
            self.exchanged.write_part(bucket, self._means[bucket])
        else:
            if bucket in self._again:
                reduce_scatter_single(self._means[bucket], self._gradients[bucket], group=self.group)
            self._means[bucket].mul_(1.0 / self._size)
        for block, weight, mean, held in zip(self.blocks, self.weights, self._block_means, self._held, strict=True):
            if block.bucket == bucket:
                weight.grad = None if held <= self._unused else mean

    def _send(self, bucket: int) -> None:
        """Start the all-gather of a bucket's new weights, unless no parameter of it was used."""
        if self._sent[bucket] or self._unused.issuperset(self.layout.buckets[bucket].parameters):
            return
        low, high = self.layout.buckets[bucket].slice_of(self._rank)
        flat = self._flats[bucket]
        self._sent[bucket] = all_gather_single(flat, flat[low:high], group=self.group, async_op=True)

    def publish(self) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`."""
        assert self._collected
        # Never set back to True: torch._dynamo.reset() clears the record, but compiled modules still run.
        self._overlap_gather = self._overlap_gather and not reads_past_python(self._model)
        for bucket in range(len(self._works)):
            self._send(bucket)
        for bucket, work in enumerate(self._sent):
            if work is None:
                continue
            readers = [self.parameters[i] for i in self.layout.buckets[bucket].parameters]
            if not self._overlap_gather or not all(can_wait_in_readers(p) for p in readers):
                work.wait()
            else:
                self._gatherings.append(Gathering(work, readers))
        self._leave_early = self._next_leaves_early()
        self._drop()

    def skip(self) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`."""
        if self._collected:
            self._drop()

    def split(self, separate: frozenset[int]) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`."""
        if not separate <= self._separate:
            self._separate |= separate
            self._make_blocks()

    def synchronize(self) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`."""
        while self._gatherings:
            self._gatherings.pop().finish()

    def close(self) -> None:
        """See :class:`~guozhuang.sharding.carrier.Carrier`."""
        self.synchronize()
        for work in self._works:
            if work is not None:
                work.wait()
        for handle in self._handles:
            handle.remove()

    # ---- gradients when they arrive ---------------------------------------------------------------------------------------

    def _arrived(self, index: int) -> None:
        if self._collected:
            if self.parameters[index].grad is self._kept[index]:
                self._came_late = True
                return
            self._drop()  # the collected gradients were set to None, and a new step begins
        self._settle(index)
        if self._versions[index] is not None:
            self._calm = False  # a second gradient: there was another backward
        self._versions[index] = self._handed.version(index)
        bucket = self.layout.places[index][0]
        self._num_missing[bucket] -= 1
        if self._leave_early and self._calm:
            if not self._callback_queued:
                self._callback_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
            while self._next < len(self._works) and self._num_missing[self._next] <= 0:
                self._launch(self._next)

    def _end_of_backward(self) -> None:
        self._callback_queued = False
        if self._leave_early and not self._collected:
            self._launch_rest()

    def _settle(self, index: int) -> None:
        """Copy a parameter's gradient to its part of the bucket, and make ``p.grad`` the bucket's view of it."""
        parameter, view = self.parameters[index], self._views[index]
        gradient = parameter.grad
        if self._handed.holds(index, gradient):
            self._filled[index] = True
            return
        if gradient is None:
            if self._filled[index]:
                view.zero_()
                self._filled[index] = False
            return
        check_gradient(gradient, view, self._names[index], self._rank)
        with torch.no_grad():
            view.copy_(gradient)
        self._filled[index] = True
        if not gradient.requires_grad:  # a gradient with a graph (create_graph=True) stays the user's
            parameter.grad = self._handed.hand(index)

    def _launch(self, bucket: int) -> None:
        assert bucket == self._next
        if self.exchanged is not None:
            self._works[bucket] = self.exchanged.start(bucket)
        else:
            self._sums[bucket] = _bit_sum(self._gradients[bucket])
            self._works[bucket] = reduce_scatter_single(
                self._means[bucket], self._gradients[bucket], group=self.group, async_op=True
            )
        self._next += 1

    def _launch_rest(self) -> None:
        for bucket in range(self._next, len(self._works)):
            for index in self.layout.buckets[bucket].parameters:
                self._settle(index)
                seen = self._versions[index]
                if seen is not None and seen != self._handed.version(index):
                    self._calm = False
            self._launch(bucket)

    def _agree(self, left_early: bool) -> list[bool]:
        """Exchange which parameters were used and which buckets changed; return for each parameter whether any rank used it."""
        num_parameters, num_buckets = len(self.parameters), len(self._works)
        for index in range(num_parameters) if left_early else ():
            self._settle(index)
        told = [*(p.grad is not None for p in self.parameters), *[False] * num_buckets, not self._calm]
        flags = torch.tensor(told, dtype=torch.uint8, device=self._means[0].device)
        if left_early:
            now = torch.stack([_bit_sum(gradients) for gradients in self._gradients])
            flags[num_parameters:-1] = now != torch.stack([s for s in self._sums if s is not None])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        known = flags.tolist()
        self._again = {b for b in range(num_buckets) if known[num_parameters + b]}
        self._calm = not known[-1] and not self._again
        return [bool(flag) for flag in known[:num_parameters]]

    def _next_leaves_early(self) -> bool:
        """Decide whether buckets may be sent early in the next step; all ranks decide alike, from values they agreed on."""
        if not self._calm:
            if self._leave_early:
                self._patience_steps = PATIENCE_STEPS
            return False
        self._patience_steps = max(0, self._patience_steps - 1)
        return self._may_leave_early and self._patience_steps == 0

    def _drop(self) -> None:
        for weight in self.weights:
            weight.grad = None
        self._collected = False
        self._kept = []
        self._start_over()

    def _start_over(self) -> None:
        self._works: list[Work | None] = [None] * len(self.layout.buckets)
        self._next = 0
        self._num_missing = [len(b.parameters) for b in self.layout.buckets]
        self._versions: list[int | None] = [None] * len(self.parameters)
        self._sent: list[dist.Work | None] = [None] * len(self.layout.buckets)
        self._sums: list[Tensor | None] = [None] * len(self.layout.buckets)
        self._calm = True
        self._came_late = False
        self._callback_queued = False
        self._again = set()

    # ---- weights ----------------------------------------------------------------------------------------------------------

    def _place(self, index: int) -> None:
        parameter, place = self.parameters[index], self._places[index]
        with torch.no_grad():
            place.copy_(parameter)
        parameter.data = place

    def _take_up_moved(self) -> None:
        """Copy parameters that were given other memory (``p.data = ...``) since the last step back to the flat weights."""
        for index, (parameter, place) in enumerate(zip(self.parameters, self._places, strict=True)):
            if place.numel() == 0 or parameter.data_ptr() == place.data_ptr():
                continue
            if (parameter.dtype, parameter.device, parameter.shape) != (place.dtype, place.device, place.shape):
                what = (
                    f"{self._names[index]} was {place.dtype} {tuple(place.shape)} on {place.device} when it was prepared "
                    f"and is {parameter.dtype} {tuple(parameter.shape)} on {parameter.device} now"
                )
                fix = "convert the model before prepare()"
                raise UsageError(explain(what, rank=self._rank, fix=fix))
            self._place(index)

    def _held_together(self) -> list[frozenset[int]]:
        """Return the sets of parameters that share a block on any rank; all ranks get the same result."""
        ranks = range(self._size)
        return [block.parameters for rank in ranks for block in self.layout.blocks_of(rank, self._separate)]

    def _make_blocks(self) -> None:
        self.blocks: Sequence[Block] = self.layout.blocks_of(self._rank, self._separate)
        self.weights: Sequence[nn.Parameter] = [
            nn.Parameter(self._flats[b.bucket][b.start : b.end]) for b in self.blocks
        ]
        starts = [self.layout.buckets[b.bucket].slice_of(self._rank)[0] for b in self.blocks]
        pairs = zip(self.blocks, starts, strict=True)
        self._block_means = [self._means[b.bucket][b.start - start : b.end - start] for b, start in pairs]
        self._held = [block.parameters for block in self.blocks]
