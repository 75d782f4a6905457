"""Records what a rank of a fake world does in its training steps, and makes a :class:`~guozhuang.cost.trace.Trace` of it.

[Note: the clock of a fake world] Between two events of a thread lies work of this rank. On a CPU it is measured by the
processor time of the thread, which does not grow while other programs have the core. What a collective of the fake world does
itself, so that its results have the right shapes, is left out. A :class:`~guozhuang.groups.serial.Lane` has no thread of its
own here: its jobs run at once on the thread that submits them, and their events get the number of the lane. So nothing runs
beside anything else, and the times are those of a rank alone; what runs at the same time on real ranks is for the simulation.

[Note: works that are waited for in C++] PyTorch's own DistributedDataParallel waits for futures, which tell nobody. It does so
at the end of backward, in the order of the buckets. So calls whose future was taken count as waited for there.

[Note: one process plays all stages] Stages of a pipeline do different things and need each other's activations, so one process
carries out the actions of all ranks, one after the other, and holds the whole model. What it does inside of
:meth:`Recorder.playing` is that rank's. All else is what every rank does, such as fetching the batch; only of the optimizer's
work a rank does as much as it has of the parameters.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from guozhuang.cost.trace import HAND_OVER, PARTS, Compute, Event, Start, Trace, Wait
from guozhuang.errors import UsageError, explain
from guozhuang.groups.serial import NO_LIMIT, Job, SerialWork

#: An event, and the rank that it belongs to; None: all ranks.
Played: TypeAlias = tuple[int | None, Event]


class Recorder:
    """The events of one rank, step by step. Not for several threads that make the same calls at a time.

    Args:
        rank: the rank that this process plays.
        num_ranks: how many ranks the fake world has.
        now: the clock, in seconds; see [Note: the clock of a fake world].

    Attributes:
        kept: what must live as long as the world, and PyTorch does not keep.
        shares: by rank, the share of the parameters that it has, where one process plays all stages of a pipeline; else empty.
        beside_bytes: memory that a rank of a real group has, and this process does not.
        message_times: the seconds of a message between two ranks, and how many more for each byte, for what is chosen by them.
    """

    kept: object = None
    shares: Mapping[int, float] = {}
    beside_bytes: int = 0
    message_times: tuple[float, float] = (0.0, 0.0)

    def __init__(self, rank: int, num_ranks: int, now: Callable[[], float] = time.thread_time) -> None:
        self.rank, self.num_ranks, self._now = rank, num_ranks, now
        self._calls, self._groups = itertools.count(), itertools.count()
        self._numbers: dict[object, int] = {}  # of threads and lanes
        self._local = threading.local()
        self._begun_in: dict[int, tuple[int, int]] = {}  # by call: its step, and which call of the step it is
        self._taken: list[int] = []  # calls whose future was taken and that nobody has waited for
        self._steps: list[list[Played]] | None = None
        self._player: int | None = None
        self._part = PARTS[0]
        self._thread_number()

    def group_number(self) -> int:
        """Return the number of a new group."""
        return next(self._groups)

    # The methods below record.

    def begin(self) -> None:
        """Record from here on, where a step begins."""
        self._steps, self._part = [[]], PARTS[0]
        self.go_on()

    def passed(self, part: str) -> None:
        """Note that a part of the step has ended, and the next one begins."""
        self._note()
        if part == "backward":
            self._wait_for_taken()
        self._part = {"data": "forward", "forward": "backward", "backward": "optimizer"}.get(part, PARTS[0])
        self.go_on()

    def step_ended(self) -> None:
        """Note that a step has ended."""
        self._note()
        self._wait_for_taken()
        self._part = PARTS[0]
        if self._steps is not None:
            self._steps.append([])
        self.go_on()

    def start(
        self,
        operation: str,
        num_bytes: int,
        ranks: tuple[int, ...],
        *,
        blocking: bool = False,
        group: int = 0,
        element_bytes: int = 4,
    ) -> int:
        """Note the begin of a call, and return its number. The clock stands still until :meth:`go_on`."""
        self._note()
        call = next(self._calls)
        if self._steps is not None:
            step = self._steps[-1]
            self._begun_in[call] = len(self._steps) - 1, sum(isinstance(each, Start) for _, each in step)
            number = self._thread_number()
            self._add(Start(call, operation, num_bytes, ranks, blocking, number, group, element_bytes))
        return call

    def wait(self, call: int) -> None:
        """Note that the thread waits for a call."""
        self._note()
        if call in self._taken:
            self._taken.remove(call)
        if self._steps is not None and call in self._begun_in:
            self._add(Wait(call, self._thread_number()))
        self.go_on()

    def take(self, call: int) -> None:
        """Note that the future of a call was taken. See [Note: works that are waited for in C++]."""
        self._taken.append(call)

    def go_on(self) -> None:
        """Let the clock of this thread run again."""
        self._local.since = self._now()

    def run(self, lane: object, job: Job) -> SerialWork:
        """Run a job of a lane at once, and return its work. See [Note: the clock of a fake world]."""
        work = _RecordedWork(job, self)
        given = self.start(HAND_OVER, 0, (self.rank,))
        with self._inside(lane), torch.no_grad():
            self.wait(given)
            work.run()
            work.call = self.start(HAND_OVER, 0, (self.rank,))
        self.go_on()
        return work

    @contextlib.contextmanager
    def _inside(self, lane: object) -> Iterator[None]:
        before = self._thread_number()
        self._local.number = self._numbers.setdefault(lane, len(self._numbers))
        try:
            yield
        finally:
            self._local.number = before

    @contextlib.contextmanager
    def playing(self, rank: int) -> Iterator[None]:
        """Let what happens in this context be a rank's. See [Note: one process plays all stages]."""
        self._note()
        self._player, before = rank, self._player
        self.go_on()
        try:
            yield
        finally:
            self._note()
            self._player = before
            self.go_on()

    def _thread_number(self) -> int:
        here = self._local
        if not hasattr(here, "number"):
            here.number = self._numbers.setdefault(threading.get_ident(), len(self._numbers))
            here.since = self._now()
        return int(here.number)

    def _note(self) -> None:
        """Record the work of this thread since its clock runs."""
        number, now = self._thread_number(), self._now()
        seconds, self._local.since = now - self._local.since, now  # so that a job does not count what was before it
        if self._steps is not None:
            self._add(Compute(self._part if number == 0 else "exchange", max(seconds, 0.0), number))

    def _add(self, event: Event) -> None:
        assert self._steps is not None
        self._steps[-1].append((self._player, event))

    def _wait_for_taken(self) -> None:
        for call in list(self._taken):
            self.wait(call)

    # The methods below make a trace.

    def traces(self, period: int = 1, num_threads: int = 1) -> tuple[Trace, ...]:
        """Return the trace of one period: the last recorded steps, with the median times of all that do the same.

        Args:
            period: after how many steps the strategy does the same again.
            num_threads: the compute threads of this process.

        Returns:
            One trace, of this rank; or one of each rank where one process played all stages of a pipeline.

        Raises:
            UsageError: fewer steps than the period were recorded.
        """
        steps = (self._steps or [[]])[:-1]
        if len(steps) < period:
            what = f"a trace of a strategy that does the same every {period} steps needs as many steps"
            raise UsageError(explain(what, value=f"{len(steps)} steps", rank=self.rank, fix="record more steps"))
        players = range(self.num_ranks) if self.shares else (self.rank,)
        return tuple(self._trace_of(rank, steps, period, num_threads) for rank in players)

    def _trace_of(self, rank: int, steps: Sequence[Sequence[Played]], period: int, num_threads: int) -> Trace:
        mine = [[event for player, event in step if player in (None, rank)] for step in steps]
        first, seconds = len(steps) - period, _medians(mine)
        number_of: dict[tuple[int, int], int] = {}
        for number, step in enumerate(steps[first:]):
            for place in range(sum(isinstance(each, Start) for _, each in step)):
                number_of[number, place] = len(number_of)
        events: list[Event] = []
        for number, here in enumerate(mine[first:]):
            times = iter(seconds[first + number])
            for event in here:
                if isinstance(event, Compute):
                    share = self.shares.get(rank, 1.0) if event.part == "optimizer" else 1.0
                    if (median := share * next(times)) > 0:
                        events.append(Compute(event.part, median, event.thread))
                    continue
                begun, place = self._begun_in[event.call]
                # A call that began in an earlier period is that of the repetition before, if it has one like it.
                found = number_of.get(((begun - first) % period, place))
                if found is not None:
                    events.append(replace(event, call=found))
        begun_here = {event.call for event in events if isinstance(event, Start)}
        kept = tuple(event for event in events if not isinstance(event, Wait) or event.call in begun_here)
        return Trace(rank, self.num_ranks, kept, period, num_threads)


def _medians(steps: Sequence[Sequence[Event]]) -> list[list[float]]:
    """Return the seconds of each step's works, in their order: medians over the steps that have the same events."""
    kinds = [tuple(_kind(event) for event in step) for step in steps]
    own = [[event.seconds for event in step if isinstance(event, Compute)] for step in steps]
    alike: defaultdict[tuple[object, ...], list[list[float]]] = defaultdict(list)
    for kind, times in zip(kinds, own, strict=True):
        alike[kind].append(times)
    medians = {kind: [statistics.median(each) for each in zip(*many, strict=True)] for kind, many in alike.items()}
    return [medians[kind] for kind in kinds]


def _kind(event: Event) -> tuple[object, ...]:
    if isinstance(event, Compute):
        return ("work", event.part, event.thread)
    if isinstance(event, Wait):
        return ("wait", event.thread)
    return (event.operation, event.num_bytes, event.blocking, event.thread, event.group)


class _RecordedWork(SerialWork):
    """The work of a job that has run; waiting for it is recorded."""

    call = -1

    def __init__(self, job: Job, recorder: Recorder) -> None:
        super().__init__(job)
        self._recorder = recorder

    def wait(self, timeout: object = NO_LIMIT) -> bool:
        """Note the wait, the first time; raise the job's error."""
        call, self.call = self.call, -1
        if call >= 0:
            self._recorder.wait(call)
        return super().wait()
