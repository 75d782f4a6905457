"""Schedules of a pipeline as data: for every rank the list of its actions, and a simulation that proves that they end.

With p ranks of v stages each and m microbatches, at equal times of all stages (a backward takes twice a forward, and gradients
of inputs as long as those of weights):

=============  ==============================  ===============================  ==============================================
schedule       idle share of the step          microbatches in flight, rank r   source
=============  ==============================  ===============================  ==============================================
gpipe          2 (p - 1) / (3 m + 2 (p - 1))   m                                Huang et al., GPipe, NeurIPS 2019
1f1b           (p - 1) / (m + p - 1)           p - r                            Narayanan et al., PipeDream, SOSP 2019
interleaved    (p - 1) / (v m + p - 1)         (v + 1) p - 2 r - 1              Narayanan et al., Megatron-LM, SC 2021
zero-bubble    (p - 1) / (3 m + p - 1)         p                                Qi et al., Zero Bubble (ZB-H1), ICLR 2024
=============  ==============================  ===============================  ==============================================

Stage s is on rank s modulo p. Nothing here knows tensors, processes or times of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from guozhuang.errors import UsageError, explain, rank_table

#: The names of the schedules, and what each is.
SCHEDULES: Final = {
    "gpipe": "all forwards, then all backwards, gradients of weights last; the script keeps its own loss and backward",
    "1f1b": "a backward after each forward as early as possible, so that few microbatches are in flight",
    "interleaved": "1f1b with several stages a rank, which divides the idle time by their number",
    "zero-bubble": "1f1b that computes gradients of weights later, in time that would be idle",
}
#: The kinds of actions: forward; backward; the backward's half for the inputs; its other half, for the weights.
FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
_WORDS: Final = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUTS: "backward to the inputs",
    WEIGHTS: "backward to the weights",
}


class Action(NamedTuple):
    """What a rank does with one microbatch in one of its stages; ``kind`` is "F", "B", "I" or "W"."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Return the action as tables show it: F0.3 is the forward of microbatch 3 in stage 0."""
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @property
    def in_words(self) -> str:
        """The action as errors call it: ``forward of microbatch 3 in stage 0``."""
        return f"{_WORDS[self.kind]} of microbatch {self.microbatch} in stage {self.stage}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of all ranks of a pipeline.

    Attributes:
        name: one of :data:`SCHEDULES`, or any word for a list made by hand.
        num_microbatches: into how many microbatches the batch is cut.
        num_stages: number of stages of all ranks together.
        ranks: for every rank its actions, in the order in which it carries them out.
    """

    name: str
    num_microbatches: int
    num_stages: int
    ranks: tuple[tuple[Action, ...], ...]

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a stage."""
        return stage % len(self.ranks)

    def half(self, kinds: str, rank: int) -> tuple[Action, ...]:
        """Return a rank's actions of some kinds, for example of ``"F"``."""
        return tuple(action for action in self.ranks[rank] if action.kind in kinds)


def make_schedule(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> PipelineSchedule:
    """Return a schedule by its name.

    Args:
        name: one of :data:`SCHEDULES`.
        num_ranks: p, the number of ranks of the pipeline, at least 1.
        num_microbatches: m, at least 1. Fewer microbatches than ranks leave ranks idle, but are possible.
        stages_per_rank: v; more than 1 only for "interleaved".

    Raises:
        UsageError: the name is unknown, or a number is not possible.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, 1)
        fix = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(SCHEDULES)}"
        raise UsageError(explain("there is no such schedule of a pipeline", value=name, fix=fix))
    for what, number in (
        ("ranks", num_ranks),
        ("microbatches", num_microbatches),
        ("stages per rank", stages_per_rank),
    ):
        if number < 1:
            raise UsageError(explain(f"a pipeline needs at least 1 of its {what}", value=number, fix="give 1 or more"))
    if stages_per_rank > 1 and name != "interleaved":
        what = f"schedule {name} has one stage on each rank"
        raise UsageError(explain(what, value=stages_per_rank, fix="use the schedule interleaved"))
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if name == "gpipe":
        lists = [_gpipe(rank, m) for rank in range(p)]
    elif name == "zero-bubble":
        lists = [_zero_bubble(rank, p, m) for rank in range(p)]
    elif v == 1:
        lists = [_one_forward_one_backward(rank, p, m) for rank in range(p)]
    else:
        lists = [_interleaved(rank, p, m, v) for rank in range(p)]
    return PipelineSchedule(name, m, p * v, tuple(tuple(each) for each in lists))


def _gpipe(rank: int, m: int) -> list[Action]:
    """Return all forwards and all backwards; those are divided for which ranks before this one would wait otherwise.

    Dividing a backward costs time. The first backward of rank r has to reach rank 0 early, and when rank 0 has begun, each
    rank needs to be ahead of the one before it only: so rank r divides its first ones, twice as many as are needed if
    all times are equal. The last one is divided for a rank that is slower than those before it. Gradients of weights
    are computed where a rank waits, and at the end, so the step is as short as if all backwards were divided.
    """
    divided = [k for k in range(m) if k < 2 * rank or k == m - 1] if rank else []
    backwards = [Action(INPUTS if k in divided else BACKWARD, rank, k) for k in range(m)]
    return [Action(FORWARD, rank, k) for k in range(m)] + backwards + [Action(WEIGHTS, rank, k) for k in divided]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], num_ahead: int) -> list[Action]:
    """Return ``num_ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    num_ahead = min(num_ahead, len(forwards))
    actions = list(forwards[:num_ahead])
    for k in range(len(backwards)):
        actions += forwards[num_ahead + k : num_ahead + k + 1]
        actions.append(backwards[k])
    return actions


def _one_forward_one_backward(rank: int, p: int, m: int) -> list[Action]:
    forwards = [Action(FORWARD, rank, k) for k in range(m)]
    return _alternate(forwards, [Action(BACKWARD, rank, k) for k in range(m)], p - rank - 1)


def _interleaved(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Return the list of a rank with stages rank, rank + p, ...: p microbatches go through a stage before the next stage.

    If m is no multiple of p, the list is that of the next multiple without the microbatches that do not exist: what needs each
    other is of one microbatch, so the order stays possible.
    """
    forwards, backwards = [], []
    for start in range(0, m, p):
        forwards += [Action(FORWARD, rank + c * p, k) for c in range(v) for k in range(start, start + p)]
        backwards += [Action(BACKWARD, rank + c * p, k) for c in reversed(range(v)) for k in range(start, start + p)]
    full = _alternate(forwards, backwards, 2 * (p - rank - 1) + (v - 1) * p)
    return [action for action in full if action.microbatch < m]


def _zero_bubble(rank: int, p: int, m: int) -> list[Action]:
    """Return the list of 1f1b with divided backwards; stage s computes gradients of weights s microbatches later.

    So a stage holds the activations of p microbatches at most: p - s until the gradients of inputs, and s longer. Dividing a
    backward costs time, so it is done only where a stage would wait otherwise: the first stage divides none, and the last one
    the first p - 1, whose other halves fill its end, and the very last one. The step is as short as if all were divided.
    """
    forwards = [Action(FORWARD, rank, k) for k in range(m)]
    if rank in (0, p - 1):
        divided = [] if rank == 0 else [k for k in range(m) if k < p - 1 or k == m - 1]
        backwards = [Action(INPUTS if k in divided else BACKWARD, rank, k) for k in range(m)]
        return _alternate(forwards, backwards, p - rank - 1) + [Action(WEIGHTS, rank, k) for k in divided]
    actions, num_weights = [], 0
    in_turn = _alternate(forwards, [Action(INPUTS, rank, k) for k in range(m)], p - rank - 1)
    for action in in_turn:
        actions.append(action)
        if action.kind == INPUTS and action.microbatch - num_weights >= rank:
            actions.append(Action(WEIGHTS, rank, num_weights))
            num_weights += 1
    return actions + [Action(WEIGHTS, rank, k) for k in range(num_weights, m)]


def chain(num_stages: int) -> frozenset[tuple[int, int]]:
    """Return the edges of a pipeline in which each stage needs the outputs of the one before it, and of no other."""
    return frozenset((stage, stage + 1) for stage in range(num_stages - 1))


@dataclass(frozen=True)
class Simulated:
    """What came out of a simulation.

    Attributes:
        end: the time at which the last action ends.
        busy: for every rank the sum of its actions' times.
        in_flight: for every rank of how many microbatches it held activations at most, counted in each of its stages.
        starts: for every action the time at which it starts.
    """

    end: float
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]
    starts: Mapping[Action, float]

    @property
    def idle_share(self) -> float:
        """The part of the step in which a rank waits, as the mean of all ranks."""
        return 1 - sum(self.busy) / (self.end * len(self.busy))


def simulate(
    schedule: PipelineSchedule,
    edges: Iterable[tuple[int, int]] | None = None,
    times: Mapping[str, float | Sequence[float]] | None = None,
    message_time: float = 0.0,
) -> Simulated:
    """Carry a schedule out without computing anything, and return when each action runs.

    Args:
        schedule: the actions of all ranks.
        edges: pairs of stages (source, destination): the second one needs outputs of the first. None: each of the one before.
        times: for each kind of action its time, or a list of its times by stage. None: a forward takes 1, a backward 2, or 1
            for the inputs and 1 for the weights.
        message_time: how long a message from one rank to another is under way. A link carries one at a time each way.

    Raises:
        UsageError: an action is missing, stands twice or on the wrong rank; or the schedule would wait for ever.
    """
    needs = _Needs(schedule, chain(schedule.num_stages) if edges is None else edges)
    told = times or {FORWARD: 1.0, BACKWARD: 2.0, INPUTS: 1.0, WEIGHTS: 1.0}
    _check_complete(schedule)
    ended: dict[Action, float] = {}
    starts: dict[Action, float] = {}
    arrived: dict[tuple[Action, int], float] = {}
    link_free: dict[tuple[int, int], float] = {}
    clocks = [0.0] * len(schedule.ranks)
    positions = [0] * len(schedule.ranks)
    num_actions = sum(map(len, schedule.ranks))
    while len(ended) < num_actions:
        before = len(ended)
        for rank, actions in enumerate(schedule.ranks):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                needed = needs.of(action)
                if any(each not in ended for each in needed):
                    break
                came = (arrived.get((each, rank), ended[each]) for each in needed)
                starts[action] = max([clocks[rank], *came])
                duration = told[action.kind]
                seconds = duration if isinstance(duration, int | float) else duration[action.stage]
                clocks[rank] = ended[action] = starts[action] + seconds
                positions[rank] += 1
                for other in {schedule.rank_of(stage) for stage in needs.receivers(action)} - {rank}:
                    sent = max(ended[action], link_free.get((rank, other), 0.0))
                    arrived[action, other] = link_free[rank, other] = sent + message_time
        if len(ended) == before:
            raise UsageError(_deadlock(schedule, positions, needs, ended))
    busy = [sum(ended[action] - starts[action] for action in actions) for actions in schedule.ranks]
    return Simulated(max(clocks), tuple(busy), tuple(map(_in_flight, schedule.ranks)), starts)


def _check_complete(schedule: PipelineSchedule) -> None:
    """Raise unless each microbatch has, in each stage, a forward and one backward (whole, or both halves) in this order."""
    faults = []
    order: dict[tuple[int, int], str] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if schedule.rank_of(action.stage) != rank:
                faults.append(f"{action} stands on rank {rank} and stage {action.stage} is on another")
            place = action.stage, action.microbatch
            order[place] = order.get(place, "") + action.kind
    for stage in range(schedule.num_stages):
        for k in range(schedule.num_microbatches):
            kinds = order.pop((stage, k), "")
            if kinds not in ("FB", "FIW"):
                faults.append(f"microbatch {k} has {kinds or 'nothing'} in stage {stage}, in place of FB or FIW")
    faults += [f"there is no microbatch {k} in stage {stage}" for stage, k in order]
    if faults:
        what = f"the schedule {schedule.name} is not complete: {'; '.join(faults[:4])}"
        raise UsageError(
            explain(what, value=len(faults), fix="give every microbatch FB, or F, I and W, in every stage")
        )


class _Needs:
    """Which actions need which others' results."""

    def __init__(self, schedule: PipelineSchedule, edges: Iterable[tuple[int, int]]) -> None:
        self._all = {action for actions in schedule.ranks for action in actions}
        self._sources: dict[int, list[int]] = {stage: [] for stage in range(schedule.num_stages)}
        self._destinations: dict[int, list[int]] = {stage: [] for stage in range(schedule.num_stages)}
        for source, destination in edges:
            self._sources[destination].append(source)
            self._destinations[source].append(destination)

    def of(self, action: Action) -> list[Action]:
        """Return the actions whose results an action needs: of other stages, or of its own stage before."""
        kind, stage, k = action
        if kind == FORWARD:
            return [Action(FORWARD, source, k) for source in self._sources[stage]]
        if kind == WEIGHTS:
            return [Action(INPUTS, stage, k)]
        needed = [Action(FORWARD, stage, k)]
        for destination in self._destinations[stage]:
            half = Action(INPUTS, destination, k)
            needed.append(half if half in self._all else Action(BACKWARD, destination, k))
        return needed

    def receivers(self, action: Action) -> Sequence[int]:
        """Return the stages to which an action sends its results."""
        if action.kind == FORWARD:
            return self._destinations[action.stage]
        return () if action.kind == WEIGHTS else self._sources[action.stage]


def _deadlock(schedule: PipelineSchedule, positions: Sequence[int], needs: _Needs, ended: Collection[Action]) -> str:
    rows = []
    for rank, actions in enumerate(schedule.ranks):
        if positions[rank] == len(actions):
            rows.append((rank, "-", "-", "ended"))
            continue
        action = actions[positions[rank]]
        missing = [each for each in needs.of(action) if each not in ended]
        waits_for = ", ".join(f"{each} of rank {schedule.rank_of(each.stage)}" for each in missing)
        rows.append((rank, str(action), waits_for, " ".join(map(str, actions[positions[rank] :][:6]))))
    what = f"the schedule {schedule.name} would wait for ever:\n"
    what += rank_table(("rank", "at", "waits for", "its next actions"), rows) + "\n"
    return explain(what, fix="put each action after those whose results it needs, on all ranks")


def _in_flight(actions: Iterable[Action]) -> int:
    most = now = 0
    for action in actions:
        now += {FORWARD: 1, INPUTS: 0}.get(action.kind, -1)
        most = max(most, now)
    return most


def idle_share(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """Return the part of a step in which a rank waits, by the formula of the schedule; see the table above.

    Holds for at least as many microbatches as ranks, under "interleaved" for a multiple of the ranks.
    """
    idle = num_ranks - 1
    if name == "gpipe":
        return 2 * idle / (3 * num_microbatches + 2 * idle)
    return idle / ({"interleaved": stages_per_rank, "zero-bubble": 3}.get(name, 1) * num_microbatches + idle)


def most_in_flight(name: str, num_ranks: int, num_microbatches: int, rank: int, stages_per_rank: int = 1) -> int:
    """Return of how many microbatches a rank holds activations at most, counted in each of its stages; see the table above."""
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if name == "gpipe":
        return m
    if name == "zero-bubble":
        return min(m, p)
    return min(v * m, p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * p + 1)
