"""Weights averaged in the background while each rank goes on at its own speed.

Formula, for a round that every rank r begins with a copy s_r of its weights, when it comes to it: S = sum of all s_r; later,
between two of its steps, rank r moves its weights by x_r <- x_r + S/n - s_r. So what it learned since the copy stays.
For the first ``start_step`` steps gradients are averaged instead, as in ``ddp``; in these the ranks are in step.
Error: a rank's weights are off the mean by what all ranks did since their copies: for ranks of equal speed in a round's time
and ``interval_ms``. A round keeps the sum of the weights over ranks, to rounding in the parameters' dtypes. Ranks differ,
and a run does not repeat bit for bit, because rounds fall where time lets them; after ``agree`` all hold the same bits.
Traffic: that of one all-reduce of the weights a round (narrow ones in float32), 2 (n-1)/n of them, at most one round each
``interval_ms``.
Source: Gan et al. 2021, arXiv:2107.01499 (Bagua's async model average, without its lock and its abort and resume around
evaluation); Lian et al. 2018, arXiv:1710.06952 (AD-PSGD).

[Note: no lock around the weights] Only the trainer's own thread touches the weights, and only between two optimizer steps: it
takes the copy s, and later it adds S/n - s. The lane's thread sees nothing but s and S. So no forward ever reads weights that
change under it, and no update is lost between a copy and its return, on CPU as on an accelerator, where the trainer's launches
stand in the order of one stream.

[Note: rounds of ranks that differ in speed] A rank begins a round only when its last one has ended, and a round ends only when
all ranks have begun it: the numbers of rounds that ranks have begun never differ by more than one, and the lane hands the k-th
round of one rank to the k-th of all others. A rank that comes to ``agree`` goes on to take part in rounds until all have come,
with the weights that it has. From then on nobody begins a round by the clock; each begins those that others have begun and it
has not, all end, and one mean makes the weights equal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PeerLost, UsageError, WorldError, explain
from ..groups.agreement import StepNotices
from ..groups.serial import Lane
from ..groups.subgroups import end_together, timeout_s
from ..weights.flat import Named
from .weight_lane import WeightLane, mean
from .weights import WeightExchange

_LOOK_EVERY_S = 0.005  # while others have not come to agree


@dataclass
class AsyncState:
    """What changes while training.

    Attributes:
        group: the ranks.
        lane: in which rounds run, with copies s and S/n - s of the weights; None for one rank.
        meeting: in which ranks wait for each other to agree.
        notices: who has come to agree, for errors.
        device: of the weights.
        num_rounds: begun so far.
        num_meetings: so far.
        began_s: when the last round began, on the clock of ``time.monotonic``.
        applies: whether the round in flight belongs to these weights.
    """

    group: dist.ProcessGroup
    lane: WeightLane | None
    meeting: Lane | None
    notices: StepNotices | None
    device: torch.device
    began_s: float
    num_rounds: int = 0
    num_meetings: int = 0
    applies: bool = True


@dataclass(frozen=True)
class AsyncModelAverage(WeightExchange[AsyncState]):
    """Average the weights every so often, without anyone waiting for anyone.

    A peer that died is raised at the next step after the round with it has failed.

    Args:
        interval_ms: the least time from one round to the next, in milliseconds; 0 begins a round whenever none is under way.
        start_step: for how many steps gradients are averaged first; all ranks must make these.

    Raises:
        UsageError: a negative number.
    """

    interval_ms: float = 500.0
    start_step: int = 0

    def __post_init__(self) -> None:
        if not (self.interval_ms >= 0 and math.isfinite(self.interval_ms)):
            raise UsageError(explain("interval_ms is a time in milliseconds, at least 0", value=self.interval_ms))
        if self.start_step < 0:
            raise UsageError(explain("start_step is a count, at least 0", value=self.start_step))

    @property
    def in_step(self) -> bool:
        """False: each rank makes its own number of steps, after the first ``start_step`` ones."""
        return False

    def averages_gradients(self, step: int) -> bool:
        """True in the first ``start_step`` steps."""
        return step < self.start_step

    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> AsyncState:
        """Allocate two copies of the weights, and make two twins of the group. Every rank must call, with equal weights."""
        device, now_s = parameters[0][1].device, time.monotonic()
        if group.size() == 1:
            return AsyncState(group, None, None, None, device, now_s)
        notices = StepNotices(group, "async-average")
        return AsyncState(group, WeightLane(parameters, group, num_copies=2), Lane(group), notices, device, now_s)

    def after_step(self, state: AsyncState, step: int) -> None:
        """Move the weights by the round that has ended, and begin one if it is time. Waits for nobody.

        Raises:
            WorldError: a rank is gone, or did not take part within the group's time-out.
        """
        if state.lane is not None and step >= self.start_step:
            self._at_boundary(state, state.lane, step)

    def _at_boundary(self, state: AsyncState, lane: WeightLane, step: int, applies: bool = True) -> None:
        if lane.in_flight:
            if not lane.has_ended():
                return
            _finish(state, lane, applies)
        if time.monotonic() - state.began_s >= self.interval_ms / 1e3:
            _begin(state, lane, step)

    def agree(self, state: AsyncState) -> None:
        """Take part in rounds until all ranks have come here, end those that have begun, and put the mean in place.

        Raises:
            WorldError: a rank did not come within the group's time-out; the text names it.
        """
        if state.lane is None or state.meeting is None or state.notices is None:
            return
        state.num_meetings += 1
        state.notices.leave(state.num_meetings, "came")
        try:
            self._meet(state, state.lane, state.meeting)
            state.lane.agree()
        except PeerLost:
            raise
        except RuntimeError as error:
            came = state.notices.read(state.num_meetings, 0.0)
            late = [rank for rank in range(state.group.size()) if rank not in came]
            who = f"ranks {late} did not come" if late and came else "not all ranks could"
            limit_s = timeout_s(state.group)
            what = f"{who} to agree on one set of weights (limit {limit_s:g} s): {error}"
            fix = "look at their own errors; every rank must evaluate and save at the same points"
            raise WorldError(explain(what, rank=state.group.rank(), fix=fix)) from error

    def _meet(self, state: AsyncState, lane: WeightLane, meeting: Lane, applies: bool = True) -> None:
        rounds = torch.zeros(1, dtype=torch.int64, device=state.device)

        def greatest() -> None:
            dist.all_reduce(rounds, op=dist.ReduceOp.MAX, group=meeting.group)
            rounds.item()  # on an accelerator: wait here, in this thread

        here = meeting.run(greatest)
        while not here.is_completed():
            self._at_boundary(state, lane, -1, applies)
            time.sleep(_LOOK_EVERY_S)
        here.wait()
        rounds.fill_(state.num_rounds)
        meeting.run(greatest).wait()
        most = int(rounds.item())
        while lane.in_flight or state.num_rounds < most:
            if lane.in_flight:
                _finish(state, lane, applies)
            else:
                _begin(state, lane, -1)

    def close(self, state: AsyncState) -> None:
        """Let the threads end; a round that others have not begun ends with the process group."""
        state.lane = state.meeting = None

    def end(self, state: AsyncState) -> None:
        """Let all ranks take part in the rounds that any has begun, change nothing, and end the twins. Every rank must call."""
        if state.lane is not None and state.meeting is not None:
            self._meet(state, state.lane, state.meeting, applies=False)
            state.lane.drop()
            end_together([state.lane.group, state.meeting.group], state.group)
        self.close(state)

    def load_state_dict(self, state: AsyncState, saved: Mapping[str, Any]) -> None:
        """Let the round that is under way change nothing: its copies are not of the weights that were loaded."""
        super().load_state_dict(state, saved)
        state.applies = False

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float | None:
        """Return None: rounds go by time, not by steps."""
        return 0.0 if world_size == 1 else None


def _begin(state: AsyncState, lane: WeightLane, step: int) -> None:
    copy, moved = lane.copies
    lane.flat.read(copy)
    state.num_rounds += 1
    state.began_s = time.monotonic()
    state.applies = True

    def average() -> None:
        lane.not_finite.look(lane.flat, copy, lane.group.rank(), step)
        for s, m in zip(copy, moved, strict=True):
            m.copy_(s)
        mean(moved, lane.group)
        for s, m in zip(copy, moved, strict=True):
            m -= s

    lane.start(average)


def _finish(state: AsyncState, lane: WeightLane, applies: bool = True) -> None:
    lane.wait()
    if applies and state.applies:
        lane.flat.add(lane.copies[1])
