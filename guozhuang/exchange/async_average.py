"""Averages weights in the background while each rank trains at its own speed.

Formula, for one round (one all-reduce of the weights): each rank r starts it with a copy s_r of its weights, when its training
gets there; S = sum of all s_r; later, between two steps, rank r updates its weights by x_r <- x_r + S/n - s_r, which keeps the
changes that it made since the copy.
In the first ``start_step`` steps gradients are averaged instead, as in ``ddp``, and all ranks make these steps together.
Error: a rank's weights differ from the mean by the changes that all ranks made since their copies; with ranks of equal speed,
those of the time of a round plus ``interval_ms``. A round keeps the sum of the weights over ranks, to rounding in the
parameters' dtypes. Ranks differ, and a run does not repeat bit for bit, because the times of rounds vary; ``agree`` makes all
ranks equal, bit for bit.
Traffic: one all-reduce of the weights per round (narrow ones in float32), 2 (n-1)/n of them, at most one round each
``interval_ms``.
Source: Gan et al. 2021, arXiv:2107.01499 (Bagua's async model average, without its lock and its abort and resume around
evaluation); Lian et al. 2018, arXiv:1710.06952 (AD-PSGD).

[Note: no lock around the weights] Only the trainer's own thread accesses the weights, and only between two optimizer steps: it
makes the copy s, and later it adds S/n - s. The lane's thread accesses only s and S. So weights never change during a forward,
and no update between the copy and the addition is lost. This also holds on an accelerator, because the trainer launches all its
kernels in one stream.

[Note: rounds of ranks that differ in speed] A rank starts a round only when its last one has ended, and a round ends only when
all ranks have started it. So the numbers of rounds that ranks have started never differ by more than one, and the k-th
all-reduce of one rank always meets the k-th of all others. A rank that has called ``agree`` continues to take part in rounds,
with its current weights, until all ranks have called it. From then on no rank starts a round because of the interval; each
starts only the rounds that others have started already, waits for their end, and one mean makes the weights equal.
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

_LOOK_EVERY_S = 0.005  # while ``agree`` waits for other ranks, it checks this often whether a round has ended


@dataclass
class AsyncState:
    """The state of :class:`AsyncModelAverage`.

    Attributes:
        group: the ranks.
        lane: runs the averaging rounds in a thread, with the copies s and S/n - s of the weights; None for one rank.
        meeting: a second ``Lane``, in which ranks wait for each other in ``agree``; None for one rank.
        notices: records in the store which ranks have called ``agree``, for error texts; None for one rank.
        device: the device of the weights.
        num_rounds: how many rounds this rank has started.
        num_meetings: how many times this rank has called ``agree``.
        began_s: the start of the last averaging round, in seconds of ``time.monotonic``.
        applies: whether the result of the round in flight is to be added to the weights; False after other weights were loaded.
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
    """Averages the weights at intervals of time; no rank waits for another one.

    If a rank ends early, its round fails, and the next step of every other rank raises the error.

    Args:
        interval_ms: the least time from one round to the next, in milliseconds; 0 starts a round whenever none is running.
        start_step: how many first steps average gradients instead; all ranks must make these.

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
        """False: after the first ``start_step`` steps each rank may make another number of steps."""
        return False

    def averages_gradients(self, step: int) -> bool:
        """Return True in the first ``start_step`` steps."""
        return step < self.start_step

    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> AsyncState:
        """Allocate two copies of the weights; make two groups of the same ranks. Every rank must call, with equal weights."""
        device, now_s = parameters[0][1].device, time.monotonic()
        if group.size() == 1:
            return AsyncState(group, None, None, None, device, now_s)
        notices = StepNotices(group, "async-average")
        return AsyncState(group, WeightLane(parameters, group, num_copies=2), Lane(group), notices, device, now_s)

    def after_step(self, state: AsyncState, step: int) -> None:
        """Add the result of an ended averaging round to the weights; start a round if the interval has passed. Does not wait.

        Raises:
            WorldError: a rank has ended, or did not take part within the group's time-out.
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
        """Take part in averaging rounds until all ranks have called this and all rounds have ended; then average the weights.

        Raises:
            WorldError: a rank did not call this within the group's time-out; the text names it.
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
            rounds.item()  # on an accelerator this blocks the lane's thread until the result is there

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
        """Let the background threads end; an averaging round that some rank has not started ends with the process group."""
        state.lane = state.meeting = None

    def end(self, state: AsyncState) -> None:
        """Finish averaging rounds that any rank has started, drop their results, and end both groups. Every rank must call."""
        if state.lane is not None and state.meeting is not None:
            self._meet(state, state.lane, state.meeting, applies=False)
            state.lane.drop()
            end_together([state.lane.group, state.meeting.group], state.group)
        self.close(state)

    def load_state_dict(self, state: AsyncState, saved: Mapping[str, Any]) -> None:
        """Mark the result of a running round as unused: it was computed from weights before those that were loaded."""
        super().load_state_dict(state, saved)
        state.applies = False

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float | None:
        """Return None for several ranks: the number of rounds depends on time, not on steps."""
        return 0.0 if world_size == 1 else None


def _begin(state: AsyncState, lane: WeightLane, step: int) -> None:
    copy, moved = lane.copies
    lane.flat.read(copy)
    state.num_rounds += 1
    state.began_s = time.monotonic()
    state.applies = True

    def average() -> None:
        lane.not_finite.look(lane.flat, copy, step)
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
