"""How fast each rank is by itself: its own time in the phases of a step, and the rule by which a rank counts as slow.

[Note: own time] In synchronous training every step takes as long as the slowest rank, so the durations of steps say nothing
about who is slow. What a rank computes between its waits for others does: *own time* is a step without the time in which the
main thread waited in a collective. The rank with the longest own time is the one that the others wait for. Waits are measured
where this package waits (waits.py): in works of its own groups, and for works of PyTorch's. A script's own collective on gloo
is counted as own time: who waits there for a slow rank looks a little slower than it is, which can hide a slow rank, but
names no other one.

[Note: when a rank is slow] Each rank publishes the median own time of each phase over the steps since its last beat, if there
are enough; single long steps (an evaluation, a checkpoint) do not move a median. When every rank has published a new one,
that is a round. A rank is behind in a round if its own time exceeds that of the median rank by more than ``THRESHOLD`` of a
step; it is slow when it was behind in ``ROUNDS`` rounds in succession, until it was not in as many. The phase is the one in
which it exceeds the others' median the most.

[Note: whose link] If no rank is behind, all may wait for a message. The kernel counts for each connection the time in which
something was under way. From host to host this is compared for each byte with the first quartile: what an edge takes longer
counts for both of its ends, for a slow link delays what its host sends, and what others send to it. The host with the
greatest sum is named, if what it loses is a tenth of a step, and the sum exceeds that of the next one by a fifth. Two hosts
have the same sum.
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from guozhuang.net.sent import tcp_links
from guozhuang.timeline import Timeline
from guozhuang.watch.waits import Waits

#: The phases of a step, in their order. What lies between two of them counts to the earlier one: the loss to "forward", with
#: its backward.
PHASES: Final = ("data", "forward", "backward", "optimizer")
THRESHOLD: Final = 0.05
ROUNDS: Final = 3
_LINK_SHARE, _LINK_CLEAR = 0.1, 1.2  # of a step; see [Note: whose link]
_LEAST_STEPS: Final = 10  # of a median that is published
_MOST_OTHERS: Final = 20  # steps of other optimizers between two of the one that ends the steps
_MOST_STEPS: Final = 1000  # that are kept for one median


@dataclass(frozen=True)
class OwnTime:
    """The median own time of a rank in some steps.

    Attributes:
        count: its number, from 1.
        own_ms: by phase, in milliseconds of a step.
        step_ms: the median duration of these steps, waits included.
        steps: the number of steps.
        links: what it sent in a step from an own address to another one, without loopback: own address, the other one, bytes,
            and milliseconds in which something was under way.
    """

    count: int
    own_ms: Mapping[str, float]
    step_ms: float
    steps: int
    links: Sequence[tuple[str, str, float, float]] = ()

    @property
    def total_ms(self) -> float:
        """The own time of a step."""
        return sum(self.own_ms.values())


class StepTimer:
    """Measures the own time of each phase. One thread calls :meth:`begin`; any thread may call :meth:`take`.

    Args:
        waits: measures the waits of the thread that trains.
        clock_ns: the clock.

    Attributes:
        last_own_s: the own seconds of the last steps, the latest last.
        timeline: where the own time of each step is recorded; None: nowhere.
    """

    def __init__(self, waits: Waits, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._waits, self._clock = waits, clock_ns
        self._own_ns = dict.fromkeys(PHASES, 0)
        self._phase, self._since_ns, self._waited_ns, self._began_ns = "", 0, 0, 0
        self._steps: list[tuple[tuple[int, ...], int]] = []  # of each step: own time of each phase, and its duration
        self._num_taken = 0
        self._leader: object = None  # the optimizer whose steps are the steps of the training
        self._num_others = 0  # steps of other optimizers since its last one
        self.last_own_s: deque[float] = deque(maxlen=_MOST_STEPS)
        self.timeline: Timeline | None = None

    def stepped(self, optimizer: object) -> None:
        """Begin the phase "data" after a step of an optimizer, which ends the step of the training.

        Of several optimizers that step in turn the first one ends it; another one does once it alone goes on.
        """
        self._num_others = 0 if optimizer is self._leader else self._num_others + 1
        if self._leader is None or self._num_others > _MOST_OTHERS:
            self._leader, self._num_others = optimizer, 0
        self.begin(PHASES[0], ends_step=optimizer is self._leader)

    def begin(self, phase: str, *, ends_step: bool = False) -> None:
        """Begin a phase, which ends the one before it, and the step too if ``ends_step``."""
        now_ns, waited_ns = self._clock(), self._waits.total_ns
        if self._phase:
            self._own_ns[self._phase] += now_ns - self._since_ns - (waited_ns - self._waited_ns)
        if ends_step:
            if self._began_ns:
                self._end_step(now_ns)
            self._own_ns = dict.fromkeys(PHASES, 0)
            self._began_ns = now_ns
        self._phase, self._since_ns, self._waited_ns = phase, now_ns, waited_ns

    def _end_step(self, now_ns: int) -> None:
        own = tuple(self._own_ns.values())
        self._steps.append((own, now_ns - self._began_ns))
        self.last_own_s.append(sum(own) / 1e9)
        if len(self._steps) > _MOST_STEPS:
            del self._steps[0]
        if self.timeline is not None:
            args: dict[str, Any] = {f"{phase}_ms": ns / 1e6 for phase, ns in self._own_ns.items()}
            self.timeline.mark("own time", "step", **args, step_ms=(now_ns - self._began_ns) / 1e6)

    def take(self) -> OwnTime | None:
        """Return the own time in the steps since the last one that was returned; None if these are too few."""
        steps = list(self._steps)
        if len(steps) < _LEAST_STEPS:
            return None
        del self._steps[: len(steps)]
        self._num_taken += 1
        columns = zip(*(own for own, _ in steps), strict=True)
        own_ms = {name: statistics.median(each) / 1e6 for name, each in zip(PHASES, columns, strict=True)}
        step_ms = statistics.median(duration for _, duration in steps) / 1e6
        return OwnTime(self._num_taken, own_ms, step_ms, len(steps))


class OwnTimeNews:
    """What the heartbeat tells the other ranks of this one's own time.

    Args:
        timer: measures it.
        tells_table: the watcher logs a table of all ranks at the end, also if no rank was slow.
        interval_s: between two own times that are told, at least.
    """

    def __init__(self, timer: StepTimer, *, tells_table: bool = False, interval_s: float = 2.0) -> None:
        self.timer, self.tells_table = timer, tells_table
        self._interval_s, self._since_s = interval_s, -math.inf
        self._last: OwnTime | None = None
        self._sent: dict[tuple[str, str], tuple[int, int]] = {}

    def fields(self, clock_s: float) -> dict[str, Any]:
        """Return the fields of a beat that tell the last own time; {} before there is one."""
        if clock_s - self._since_s >= self._interval_s and (own_time := self.timer.take()) is not None:
            self._last, self._since_s = replace(own_time, links=self._links(own_time.steps)), clock_s
        return {} if self._last is None else {"host": socket.gethostname(), "own_time": self._last}

    def _links(self, num_steps: int) -> tuple[tuple[str, str, float, float], ...]:
        before, self._sent = self._sent, tcp_links()
        found = []
        for (here, there), (sent, busy_us) in self._sent.items():
            sent_before, busy_before = before.get((here, there), (0, 0))
            if before and sent > sent_before:
                found.append((here, there, (sent - sent_before) / num_steps, (busy_us - busy_before) / 1e3 / num_steps))
        return tuple(found)


@dataclass(frozen=True)
class SlowRank:
    """A rank that is behind the others.

    Attributes:
        rank: the rank.
        phase: the phase in which it loses the most; or "link", if what it sends and receives takes longer.
        lost_ms: by how much its own time of that phase exceeds the others' median, in ms of a step.
        cost_ms: by how much every step would be shorter for all ranks if it were as fast as the slowest of the others.
        step_ms: the duration of its steps.
    """

    rank: int
    phase: str
    lost_ms: float
    cost_ms: float
    step_ms: float


def behind(own_times: Mapping[int, OwnTime], threshold: float = THRESHOLD) -> list[SlowRank]:
    """Return the ranks that are behind in a round, at most half of them. See [Note: when a rank is slow].

    Args:
        own_times: that of each rank, at least two.
        threshold: the share of a step by which a rank's own time has to exceed that of the median rank.
    """
    totals = {rank: each.total_ms for rank, each in own_times.items()}
    base = statistics.median_low(totals.values())
    step_ms = statistics.median(each.step_ms for each in own_times.values())
    late = [rank for rank, total in totals.items() if total > base + threshold * step_ms]
    if len(late) > len(own_times) // 2:
        return []
    if not late:
        return slow_link(own_times)
    others = [rank for rank in own_times if rank not in late]
    slowest = max(totals[rank] for rank in others)
    found = []
    for rank in late:
        lost = {
            p: own_times[rank].own_ms[p] - statistics.median(own_times[o].own_ms[p] for o in others) for p in PHASES
        }
        phase = max(PHASES, key=lost.__getitem__)
        found.append(SlowRank(rank, phase, lost[phase], totals[rank] - slowest, own_times[rank].step_ms))
    return found


def slow_link(own_times: Mapping[int, OwnTime]) -> list[SlowRank]:
    """Return a rank of the host whose link is slow, if one is. See [Note: whose link].

    Args:
        own_times: that of each rank.
    """
    edges: dict[tuple[str, str], list[float]] = {}
    ranks: dict[str, int] = {}
    for rank, own_time in sorted(own_times.items()):
        for here, there, num_bytes, busy_ms in own_time.links:
            ranks.setdefault(here, rank)
            edge = edges.setdefault((here, there), [0.0, 0.0])
            edge[0], edge[1] = edge[0] + num_bytes, edge[1] + busy_ms
    most = max((num_bytes for num_bytes, _ in edges.values()), default=0.0)
    edges = {ends: edge for ends, edge in edges.items() if edge[0] >= most / 2 and set(ends) <= ranks.keys()}
    if len({end for ends in edges for end in ends}) < 3:
        return []
    rates = sorted(busy_ms / num_bytes for num_bytes, busy_ms in edges.values())
    usual = rates[(len(rates) - 1) // 4]  # a slow link slows down two edges, which may be half of all
    lost = {ends: max(busy_ms - usual * num_bytes, 0.0) for ends, (num_bytes, busy_ms) in edges.items()}
    scores = {host: sum(ms for ends, ms in lost.items() if host in ends) for host in ranks}
    first, second = sorted(scores, key=scores.__getitem__, reverse=True)[:2]
    lost_ms = max((ms for ends, ms in lost.items() if first in ends), default=0.0)
    step_ms = statistics.median(each.step_ms for each in own_times.values())
    if lost_ms < _LINK_SHARE * step_ms or scores[first] < _LINK_CLEAR * scores[second]:
        return []
    waits_ms = min(each.step_ms - each.total_ms for each in own_times.values())
    return [SlowRank(ranks[first], "link", lost_ms, min(lost_ms, max(waits_ms, 0.0)), step_ms)]


@dataclass
class PaceJudge:
    """Collects the own times of all ranks in rounds, and tells which ranks are slow. It does no I/O.

    Attributes:
        own_times: the last of each rank.
        threshold: see :func:`behind`.
    """

    own_times: dict[int, OwnTime] = field(default_factory=dict)
    threshold: float = THRESHOLD
    _judged: dict[int, int] = field(default_factory=dict)  # by rank: the count of the own time of the last round
    # By rank: the rounds in which it was behind lately.
    _rounds: dict[int, list[SlowRank]] = field(default_factory=dict)
    _fine: dict[int, int] = field(default_factory=dict)  # by slow rank: rounds in succession in which it was not behind
    _told: dict[int, str] = field(default_factory=dict)  # the slow ranks that are known, with their phases

    def take(self, rank: int, own_time: OwnTime) -> None:
        """Record the last own time of a rank; it may be the same one again."""
        self.own_times[rank] = own_time

    def round(self, ranks: Sequence[int]) -> tuple[list[SlowRank], list[int]]:
        """Judge a round if each of these ranks has a new own time.

        Returns:
            The ranks that are slow from now on, or lose in another phase than before; and those that are no longer slow.
        """
        if len(ranks) < 2 or any(
            rank not in self.own_times or self.own_times[rank].count <= self._judged.get(rank, 0) for rank in ranks
        ):
            return [], []
        here = {rank: self.own_times[rank] for rank in ranks}
        self._judged = {rank: each.count for rank, each in here.items()}
        late = {each.rank: each for each in behind(here, self.threshold)}
        self._rounds = {rank: [*self._rounds.get(rank, []), each][-ROUNDS:] for rank, each in late.items()}
        self._fine = {rank: self._fine.get(rank, 0) + 1 for rank in self._told if rank not in late}
        new, over = [], [rank for rank, num_rounds in self._fine.items() if num_rounds == ROUNDS]
        for rank in over:
            del self._told[rank], self._fine[rank]
        for rank, rounds in self._rounds.items():
            phase = statistics.mode(each.phase for each in rounds)
            if len(rounds) == ROUNDS and self._told.get(rank) != phase:
                self._told[rank] = phase
                new.append(_middle(rounds, phase))
        return new, over

    @property
    def slow(self) -> dict[int, str]:
        """The slow ranks that are known, with the phases in which they lose."""
        return dict(self._told)


def _middle(rounds: Sequence[SlowRank], phase: str) -> SlowRank:
    """Return the medians of some rounds of one rank."""
    of_phase = [each.lost_ms for each in rounds if each.phase == phase]
    cost, step = (statistics.median(getattr(each, name) for each in rounds) for name in ("cost_ms", "step_ms"))
    return SlowRank(rounds[0].rank, phase, statistics.median(of_phase), cost, step)


def sentence(found: SlowRank, host: str = "") -> str:
    """Return the line that names a slow rank, its host, its phase, and what it costs the others."""
    share, where = found.cost_ms / found.step_ms if found.step_ms else 0.0, f" on {host}" if host else ""
    return (
        f"rank {found.rank}{where} is slow: its {found.phase} takes {found.lost_ms:.3g} ms longer than that of the others, "
        f"which wait {found.cost_ms:.3g} ms of each step of {found.step_ms:.3g} ms for it ({share:.0%})"
    )


def table(own_times: Mapping[int, OwnTime], hosts: Mapping[int, str], slow: Mapping[int, str]) -> str:
    """Return a table of the own time of each rank, for people: milliseconds of a step by phase, and the waits."""
    head = ["rank", "host", *PHASES, "own", "waits", ""]
    rows = [
        [
            str(rank),
            hosts.get(rank, ""),
            *(f"{each.own_ms[phase]:.1f}" for phase in PHASES),
            f"{each.total_ms:.1f}",
            f"{max(each.step_ms - each.total_ms, 0.0):.1f}",
            f"slow: {slow[rank]}" if rank in slow else "",
        ]
        for rank, each in sorted(own_times.items())
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(["own time of each rank, ms of a step (medians; waits for other ranks left out):", *lines])
