"""``RestingOptimizer``: divides its step among ranks that have averaged their gradients already, and can stop doing so.

[Note: a divided step behind averaged gradients] DistributedDataParallel averages the gradients at all times, and parameters
keep their own memory. While the step is divided, each rank copies its part of the weights and of ``p.grad`` into flat tensors,
the user's optimizer steps these, with this rank's part of the state, and the new weights are all-gathered and copied into the
parameters. So what a script finds or changes between backward and step (gradients, by whatever means; weights) is the same as
without division. Compared with ``shard`` it costs the second half of the all-reduce and two more copies. What differs is the
state: whole states, as in checkpoints, need every rank, and ``state`` itself cannot be had.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..errors import UsageError, WorldError, explain
from ..exchange.base import Work
from ..gradients.buckets import view_in
from ..groups.allocation import zeros_for
from ..optim.wrapped import STATE_HOOKS
from ..units import listed
from ..watch.waits import waits
from .carrier import Carrier
from .elementwise import needs_whole_tensors
from .gathered import send_slices
from .optimizer import ShardedOptimizer
from .parts import BucketLayout, in_memory_order
from .prepared import check_parameters

_FIX = "train with the strategy ddp"


class AveragedCarrier(Carrier):
    """A :class:`~guozhuang.sharding.carrier.Carrier` of gradients that are averaged before the step.

    Memory: a copy of all weights, and one of this rank's part of the gradients.

    Args:
        names: names of the parameters, for errors.
        parameters: equal on all ranks.
        layout: layout of the parameters.
        group: the ranks.
    """

    averages = False

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: BucketLayout,
        group: dist.ProcessGroup,
    ) -> None:
        allocate = zeros_for(group)
        flats = [allocate(b.num_elements, b.dtype, b.device) for b in layout.buckets]
        self._places = [view_in(flats[b], offset, p) for p, (b, offset) in zip(parameters, layout.places, strict=True)]
        # This rank's slice of each bucket's gradients; padding stays zeros.
        self._slices = [
            flat.new_zeros(b.slice_sizes[group.rank()]) for b, flat in zip(layout.buckets, flats, strict=True)
        ]
        self._sent: list[Work] = []
        super().__init__(names, parameters, layout, group, flats)

    @override
    def _use_blocks(self) -> None:
        self._blocks_of: list[list[int]] = [[] for _ in self.layout.buckets]
        for i, block in enumerate(self.blocks):
            self._blocks_of[block.bucket].append(i)

    @override
    def _on_gradient(self, index: int) -> None:
        """Do nothing: no hook calls it."""

    @override
    def _send_rest(self) -> None:
        """Do nothing: gradients are averaged already."""

    @override
    def _meet(self) -> frozenset[int]:
        for parameter, place, name in zip(self.parameters, self._places, self._names, strict=True):
            for kind, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
                if tensor is not None and (tensor.dtype, tensor.device, tensor.shape, tensor.layout) != (
                    *(place.dtype, place.device, place.shape),
                    torch.strided,
                ):
                    what = f"the {kind} {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, {tensor.layout}, now"
                    raise UsageError(explain(what, rank=self._rank, fix=_FIX))
        return frozenset(i for i, p in enumerate(self.parameters) if p.grad is None)

    @override
    def _means(self, keep: bool) -> Iterator[Sequence[int]]:
        """Take over each bucket's weights and gradients, and send its new weights while the next bucket is stepped."""
        for bucket in self.layout.buckets:
            (low, high), flat = bucket.slice_of(self._rank), self._flats[bucket.index]
            gradients = self._slices[bucket.index]
            into, taken = list[Tensor](), list[Tensor]()
            for piece in self.layout.pieces_in(bucket, low, high):
                parameter, size = self.parameters[piece.parameter], piece.end - piece.start
                into.append(flat[piece.offset : piece.offset + size])
                taken.append(in_memory_order(parameter, parameter)[piece.start : piece.end])
                if parameter.grad is not None:
                    into.append(gradients[piece.offset - low : piece.offset - low + size])
                    taken.append(in_memory_order(parameter.grad, parameter)[piece.start : piece.end])
            if into:
                torch._foreach_copy_(into, taken)
            indices = self._blocks_of[bucket.index]
            for i in indices:
                is_unused = self._held[i] <= self._unused
                start = self.blocks[i].start - low
                self.weights[i].grad = None if is_unused else self._of_block(self.blocks[i], gradients, start)
            yield indices
            if not keep:
                self._send(bucket.index)

    def _send(self, index: int) -> None:
        bucket = self.layout.buckets[index]
        if not self._unused.issuperset(bucket.parameters):
            self._sent.append(send_slices(bucket, self._flats[index], self.group))

    @override
    def _publish(self) -> None:
        if not self._sent:  # all gradients were kept until now
            for bucket in self.layout.buckets:
                self._send(bucket.index)
        while self._sent:
            waits.for_work(self._sent.pop(0))
        used = [i for i, p in enumerate(self.parameters) if i not in self._unused and p.numel()]
        if used:
            with torch.no_grad():
                torch._foreach_copy_([self.parameters[i] for i in used], [self._places[i] for i in used])

    @override
    def _start_over(self) -> None:
        self._sent = []

    @override
    def synchronize(self) -> None:
        """Do nothing: the step waits for all new weights."""


class RestingOptimizer(ShardedOptimizer):
    """Steps whole weights, as the user's optimizer would, until :meth:`try_begin` and after :meth:`rest`; in between each rank
    steps its part. See [Note: a divided step behind averaged gradients]. Made by :func:`divide_later`.

    Args:
        model: the model.
        inner: the user's optimizer.
        group: the ranks.
        averaged: the parameters whose gradients are averaged.
        are_averaged: tells before a step whether the gradients are averages; if not, the step must not be divided.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        group: dist.ProcessGroup,
        averaged: Iterable[nn.Parameter],
        are_averaged: Callable[[], bool],
    ) -> None:
        self._ids, self._are_averaged, self._why_whole = frozenset(map(id, averaged)), are_averaged, ""
        super().__init__(model, inner, group, functools.partial(AveragedCarrier, group=group), is_later=True)
        self._settle()

    @property
    def is_resting(self) -> bool:
        """Whether the state is whole on each rank now, and each rank steps all weights."""
        return self._is_later

    def try_begin(self) -> str:
        """Divide the step from now on, if that can be done. Every rank must call it, between two steps.

        Returns:
            "", or why it cannot be done; this is found alike on all ranks, and nothing has changed then.

        Raises:
            UsageError: it failed on some ranks only.
            WorldError: a rank did not call within the group's time-out; the text names it.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        why = self._why_whole or _why_not_apart(parameters)
        bits = torch.stack([_bits(p) for p in parameters])
        told = torch.cat([bits.new_tensor([bool(why)]), bits, -bits])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        if told[0]:
            return why or "another rank cannot divide the step"
        if bool((told[1 : 1 + len(bits)] + told[1 + len(bits) :]).any()):  # the most minus the least
            return (
                "the ranks hold different weights, since each has changed its own otherwise than by averaged gradients"
            )
        kept, failure = dict(self.inner.state), None
        try:
            self.begin()
        except WorldError:
            raise
        except (ValueError, RuntimeError) as error:
            failure = error
        num_failed = bits.new_tensor([failure is not None])
        dist.all_reduce(num_failed, group=self.group)
        if failure is None and not num_failed.item():
            return ""
        if num_failed.item() < self.group.size():
            what = f"{num_failed.item()} of {self.group.size()} ranks could not divide the optimizer's step"
            raise UsageError(explain(what, rank=self.group.rank(), fix=_FIX)) from failure
        self._is_later = True
        self.carrier.close()
        self._connect({})
        self.inner.state = defaultdict(dict, kept)
        return str(failure)

    def rest(self) -> None:
        """Make the state whole on each rank, if it is divided. Every rank must call it, between two steps."""
        if not self.is_resting:
            self._is_later = True
            self._rebuild()
            self._settle()

    def _settle(self) -> None:
        """Give the state of whole parameters to the user's optimizer, which steps them while this one rests."""
        self.inner.state.update(self._others)
        self._others = {}

    @property
    @override
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        if not self.is_resting:
            what = "optimizer.state is divided among the ranks now"
            raise UsageError(explain(what, fix=f"read optimizer.state_dict(), on every rank, or {_FIX}"))
        self._why_whole = "the script reads optimizer.state"
        return self.inner.state

    @override
    def _step(self, grad_scaler: Any) -> None:
        if not self._are_averaged():
            self._why_whole = "the script steps by gradients of no_sync(), of which each rank has its own"
            if not self.is_resting:
                what = (
                    "a step by gradients of no_sync(), of which each rank has its own, came while the step is divided"
                )
                raise UsageError(explain(what, rank=self.group.rank(), fix=_FIX))
        if grad_scaler is not None:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            if not self.unscale_together(grad_scaler, gradients, self.device, (self.group,)):
                self.inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers, as nothing is stepped
                return
        if not self.is_resting:
            super()._step(None)
            return
        with self.inner_holds([group["params"] for group in self.param_groups]):
            self.inner.step()

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        added = self.inner.param_groups[-1]["params"]
        if not self._ids.issuperset(map(id, added)):
            del self.inner.param_groups[-1]
            what = "the new group holds parameters whose gradients are not averaged"
            raise UsageError(explain(what, value=len(added), fix=_FIX))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in the format of ``torch.optim``. Every rank must call it while the step is divided."""
        if not self.is_resting:
            return super().state_dict()
        with self._hooked():
            return self.inner.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state. Every rank must call it while the step is divided; see ``ShardedOptimizer``."""
        if not self.is_resting:
            super().load_state_dict(state_dict)
            return
        with self._hooked():
            self.inner.load_state_dict(state_dict)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Let the user's optimizer call the hooks of states inside this context, as it did before it was wrapped."""
        try:
            for name in STATE_HOOKS:
                setattr(self.inner, name, getattr(self, name))
            yield
        finally:
            for name in STATE_HOOKS:
                setattr(self.inner, name, OrderedDict())

    @override
    def _is_divided(self, parameter: Tensor) -> bool:
        return not self._is_later  # frozen ones, too: a gradient that is left from before is stepped, as everywhere


def divide_later(
    model: nn.Module,
    optimizer: Optimizer,
    group: dist.ProcessGroup,
    averaged: Iterable[nn.Parameter],
    are_averaged: Callable[[], bool],
) -> RestingOptimizer:
    """Return an optimizer, to use in place of the user's, whose step can be divided later. Every rank must call it.

    Raises:
        UsageError: the step of this optimizer, or of these parameters, cannot be divided.
        MismatchError: ranks hold different optimizers.
    """
    needs_whole_tensors(optimizer)
    check_parameters(model, [optimizer])
    averaged = list(averaged)
    known = set(map(id, averaged))
    own = [name for name, p in model.named_parameters() if id(p) not in known]
    held = {id(p) for each in optimizer.param_groups for p in each["params"]}
    if not held <= known:
        what = f"gradients of parameters of the optimizer are not averaged, which may be {listed(own)}"
        raise UsageError(explain(what, fix=_FIX))
    return RestingOptimizer(model, optimizer, group, averaged, are_averaged)


def _bits(parameter: Tensor) -> Tensor:
    """Return the sum of a parameter's bits, read as whole numbers: another one if a single element differs."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return in_memory_order(parameter, parameter).view(kinds[parameter.element_size()]).sum(dtype=torch.int64)


def _why_not_apart(parameters: Sequence[Tensor]) -> str:
    """Return why the parameters cannot be stepped apart from each other, because two share memory; "" if none do."""
    spans = []
    for p in parameters:
        if p.numel():
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            spans.append((p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size()))
    spans.sort()
    overlap = any(end > start for (_, end), (start, _) in itertools.pairwise(spans))
    return "two parameters share memory, so that each element there is stepped twice" if overlap else ""
