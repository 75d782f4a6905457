"""Exchanges gradients once per optimizer step, after any number of backwards; ``p.grad`` stays this rank's own gradient.

[Note: sent early and changed] A bucket can be sent while backward still computes the gradients of others, but its gradients
may still change before the step: by another backward, by unscaling, by hand. The step must use the gradients
as they are then. So a sum of a bucket's bits, taken when it is sent, is compared with one taken at the step
(version counters would miss ``p.grad.data.mul_`` and GradScaler; a sum runs at the speed of memory). One small all-reduce
tells all ranks which parameters were used and which buckets have to be sent again. Buckets are sent early
only if no gradient changed after it arrived, on any rank, in the step before; and if one had to be sent again, not for the
next ``PATIENCE_STEPS`` steps: so accumulation over several backwards, or unscaling, costs next to nothing extra.
All ranks issue the same collectives in the same order: buckets by index, each once, the small one, then those sent again.
A parameter without a gradient holds its bucket back until the end of the backward, when all remaining buckets are sent.

[Note: a rank without a backward] A rank that has no gradient in a step sends its buckets at the step, when others have sent
theirs in backward. If the script calls a collective of the same group between, that one is paired with buckets of other ranks,
and where sizes are equal nothing fails. So each rank counts the collectives that its buckets came after since the ranks last
agreed, and the ranks compare these numbers. Numbers may differ alone: some backends count messages between two ranks as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ..errors import UsageError, explain
from ..exchange.base import GradientExchange, Work
from ..exchange.nan_watch import NanWatch
from ..watch.waits import num_started, waits
from ..world.devices import device_of
from .buckets import NUM_MARKS, Bucket, Placement
from .unused import UsedAnywhere
from .views import GradientViews

#: Number of steps in which no bucket is sent early, after gradients were changed that had been sent early.
PATIENCE_STEPS = 50


@dataclass
class _StepState:
    """The state of the current step. Lists are by bucket index, but ``versions`` is by parameter index.

    Attributes:
        works: the exchanges that run.
        sums: sums of the buckets' bits when they were sent, if that was before the step.
        num_missing: number of parameters whose gradients have not arrived yet.
        versions: version counters of the gradients when they arrived; None before.
        next: the bucket that is sent next.
        again: buckets that have changed since they were sent, on any rank.
        is_calm: whether no gradient has changed since it arrived, here; on all ranks once they have agreed.
        has_begun: whether a gradient was put into a bucket.
        has_agreed: whether the ranks have agreed which parameters were used.
        has_callback: whether autograd's engine will call back at the end of the backward.
        sends_early: whether buckets are sent while backward runs; None: it was not asked yet.
        has_sent_early: whether buckets were sent in a backward.
        place: the sum over buckets of how many collectives this rank had started since ranks last agreed.
    """

    works: list[Work | None]
    sums: list[Tensor | None]
    num_missing: list[int]
    versions: list[int | None]
    next: int = 0
    again: set[int] = field(default_factory=set)
    is_calm: bool = True
    has_begun: bool = False
    has_agreed: bool = False
    has_callback: bool = False
    sends_early: bool | None = None
    has_sent_early: bool = False
    place: int = 0


class StepReducer:
    """Exchanges the gradients of one optimizer step. Every rank must construct it, with equal arguments.

    The caller hooks the parameters and calls :meth:`on_gradient`; at the step it calls :meth:`agree`, then :meth:`wait` for
    each bucket in order, and last :meth:`start_over`.

    Args:
        names: names of the parameters, for errors.
        parameters: the parameters, in the order of their indices.
        placement: the buckets in which gradients are gathered, none of them sparse; ``p.grad`` becomes a view of them.
        group: the ranks.
        exchange: the method. It must leave ``bucket.flat`` as it is; the results are in its state.
        may_send_early: tells whether buckets may be sent while the next backward runs, if the exchange is also ``repeatable``;
            asked once in a step.

    Attributes:
        exchange: the method.
        state: the state of the method.
        step: number of steps so far.
        told_alike: whether all ranks have told the same number when they last agreed.
        is_mixed_up: whether collectives of the script may have met buckets then. See [Note: a rank without a backward].
    """

    told_alike, is_mixed_up = True, False

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        placement: Placement,
        group: dist.ProcessGroup,
        exchange: GradientExchange[Any],
        may_send_early: Callable[[], bool],
    ) -> None:
        self._names, self._parameters, self._placement, self._group = names, parameters, placement, group
        self.exchange, self.state, self.step = exchange, exchange.prepare(placement.buckets, group), 0
        self._nan = NanWatch(group)
        self._may_send_early = may_send_early
        self._sends_early, self._patience_steps = False, 0
        self._views = GradientViews(parameters, placement)
        self._is_zero = [True] * len(parameters)  # by parameter: whether its view is known to hold zeros
        self._now, self._num_agreed = self._new_step(), num_started(group)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they are exchanged."""
        return self._placement.buckets

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the exchange method's state of this rank. Every rank must call it."""
        return {"step": self.step, "exchange": self.exchange.state_dict(self.state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state that :meth:`state_dict` returned on this rank. Every rank must call it.

        Raises:
            UsageError: it was saved with another method, or for other parameters.
        """
        self.exchange.load_state_dict(self.state, saved["exchange"])
        self.step = int(saved["step"])

    # ---- These methods run while backward runs. -------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """Put a gradient that autograd has accumulated into its bucket, and start the buckets that are full."""
        self._settle(index)
        if self._now.versions[index] is not None:
            self._now.is_calm = False  # a second gradient: there was another backward
        self._now.versions[index] = self._views.handed.version(index)
        self._now.num_missing[self._placement.bucket_of[index]] -= 1
        if self._now.is_calm and self._sends_now:
            if not self._now.has_callback:
                self._now.has_callback = self._now.has_sent_early = True
                Variable._execution_engine.queue_callback(self._end_of_backward)
            while self._now.next < len(self.buckets) and self._now.num_missing[self._now.next] <= 0:
                self._start_next()

    def _end_of_backward(self) -> None:
        self._now.has_callback = False
        self.send_rest()

    def _settle(self, index: int) -> None:
        """Put a parameter's gradient into its bucket, zeros if it has none, and make ``p.grad`` the bucket's view of it."""
        if not self._now.has_begun:
            self._now.has_begun = True
            self._views.begin(1.0)
        parameter, handed = self._parameters[index], self._views.handed
        gradient = parameter.grad
        if gradient is None:
            if not self._is_zero[index]:
                self._views.fill(index)
            self._is_zero[index] = True
            return
        self._is_zero[index] = False
        if not handed.holds(index, gradient):
            check_gradient(gradient, parameter, self._names[index], self._group.rank())
            handed.hand(index)  # makes a new tensor if the program gave the old one other memory
            self._views.fill(index)

    def _start_next(self) -> None:
        bucket = self.buckets[self._now.next]
        if self._sends_now:
            self._now.sums[self._now.next] = _bit_sum(bucket.flat)
        self._now.place += num_started(self._group) - self._num_agreed
        self._start(bucket)
        self._now.next += 1

    def _start(self, bucket: Bucket) -> None:
        self._nan.look(bucket, self.step)
        with waits.inside():
            work = self._now.works[bucket.index] = self.exchange.start(bucket, self.state, self.step)
            if not self.exchange.one_round and bucket.flat.device.type == "cpu":  # or rounds of two buckets would mix
                work.wait()

    def _start_rest(self) -> None:
        for b in range(self._now.next, len(self.buckets)):
            for index in self._placement.layout[b]:
                self._settle(index)
                seen = self._now.versions[index]
                if seen is not None and seen != self._views.handed.version(index):
                    self._now.is_calm = False
            self._start_next()

    def send_rest(self) -> None:
        """Send what other ranks have sent early, or will: then another collective of this group can follow on every rank."""
        if self._sends_now and not self._now.has_agreed:
            self._start_rest()

    @property
    def _sends_now(self) -> bool:
        if self._now.sends_early is None:
            self._now.sends_early = self._sends_early and self._may_send_early()
        return self._now.sends_early

    # ---- These methods run at the optimizer step. -----------------------------------------------------------------------

    def agree(self, told: int = 0) -> list[bool]:
        """Start all buckets that were not sent early, and find out which parameters were used. Every rank must call it.

        Args:
            told: a number of :data:`NUM_MARKS` bits; ``told_alike`` then says whether it is the same on all ranks.

        Returns:
            For each parameter whether any rank has a gradient; the others count as zeros in the exchange.

        Raises:
            UsageError: a gradient is sparse, or of another dtype or device than its parameter.
        """
        sent_early = self._now.next > 0
        self._start_rest()
        self._now.has_agreed = True
        num_parameters, num_buckets = len(self._parameters), len(self.buckets)
        for index in range(num_parameters) if sent_early else ():
            self._settle(index)
        facts = [*(p.grad is not None for p in self._parameters), *[False] * num_buckets, not self._now.is_calm]
        facts.append(self._now.has_sent_early)
        facts += [bool(number >> bit & 1) for number in (self._now.place, told) for bit in range(NUM_MARKS)]
        device = device_of(bucket.flat for bucket in self.buckets)
        flags = torch.tensor(facts, dtype=torch.int32, device=device)
        if sent_early:
            now = torch.stack([_bit_sum(bucket.flat) for bucket in self.buckets])
            flags[num_parameters : num_parameters + num_buckets] = now != torch.stack(
                [s for s in self._now.sums if s is not None]
            )
        counts = UsedAnywhere(flags, self._group, flags.device).counts()
        self._num_agreed = num_started(self._group)
        are_alike = [count in (0, self._group.size()) for count in counts]
        self.told_alike = all(are_alike[-NUM_MARKS:])
        self.is_mixed_up = not are_alike[-2 * NUM_MARKS - 1] and not all(are_alike[-2 * NUM_MARKS : -NUM_MARKS])
        known = [count > 0 for count in counts[: -2 * NUM_MARKS - 1]]
        self._now.again = {b for b in range(num_buckets) if known[num_parameters + b]}
        self._now.is_calm = not known[-1] and not self._now.again
        return known[:num_parameters]

    def wait(self, bucket: int) -> None:
        """Wait for the result of a bucket; one that has changed since it was sent is sent again. Every rank must call it."""
        work = self._now.works[bucket]
        assert work is not None and self._now.has_agreed
        waits.for_work(work)
        if bucket in self._now.again:
            self._start(self.buckets[bucket])
            waits.for_work(self._now.works[bucket])
        self._now.works[bucket] = None

    def choose_next(self) -> None:
        """Decide whether the next step sends buckets early; all ranks decide alike, from values that they agreed on."""
        if not self._now.is_calm:
            if self._sends_early:
                self._patience_steps = PATIENCE_STEPS
            self._sends_early = False
            return
        self._patience_steps = max(0, self._patience_steps - 1)
        self._sends_early = self.exchange.repeatable and self._patience_steps == 0

    def start_over(self) -> None:
        """Begin a new step, after waiting for the exchanges for which :meth:`wait` was not called."""
        for work in self._now.works:
            if work is not None:
                waits.for_work(work)
        if self._now.has_agreed:
            self.step += 1
            self._views.end()
        self._now = self._new_step()

    def _new_step(self) -> _StepState:
        layout = self._placement.layout
        return _StepState(
            [None] * len(layout), [None] * len(layout), list(map(len, layout)), [None] * len(self._parameters)
        )


def _bit_sum(flat: Tensor) -> Tensor:
    """Return the sum of the tensor's bits as 64-bit words, wrapping around."""
    return flat.view(torch.int64).sum()


def check_gradient(gradient: Tensor, place: Tensor, name: str, rank: int) -> None:
    """Raise a UsageError unless a parameter's gradient can be copied to ``place``, its part of a flat tensor."""
    if gradient.layout != torch.strided or gradient.dtype != place.dtype or gradient.device != place.device:
        what = (
            f"the gradient of {name} is {gradient.layout} {gradient.dtype} on {gradient.device}, "
            f"the parameter {place.dtype} on {place.device}"
        )
        fix = "use dense gradients of the parameter's dtype, or the strategy ddp"
        raise UsageError(explain(what, rank=rank, fix=fix))
