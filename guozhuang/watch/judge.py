"""The rules by which the heartbeat decides which ranks are lost, and whether all hang. No I/O: the clock is an argument.

[Note: what a hang is] Torch has no hook for "a collective has finished" that is cheap and serves all backends. A second
thread can read three things at no cost, for gloo, NCCL and groups of our own:

- the *number of collectives* (and sends and receives) that each group has started; torch counts them itself; and of messages
  to parameter servers, which this package counts,
- the *place* of the main thread, sampled a few times per beat; the thread stands while every sample shows the same calls at
  the same instruction,
- the beat itself.

A hang: for the whole time-out **no** live rank has started a collective, **and** the main thread of at least one rank
has been standing at one place for as long. Counting alone would call any long time between two collectives a hang, such as
a compilation on all ranks. Standing alone would call a loop of one long call a hang, and never a data loader that polls
dead workers. Together they mean: a rank waits, and no rank does anything that could end the wait. One mistake remains: a rank
that computes for longer than the time-out while another one waits for it (evaluation on rank 0, a checkpoint, a first compile)
looks like a rank that is stuck, so the time-out must be longer than such a phase, like the time-out of a collective.
Ranks that are lost or have left do not count as live: they start no collective any more, and ranks that wait for them hang.

[Note: what a loss is] A missing beat alone proves little: a call that holds Python's lock for long stops the heartbeat
thread too. So the watcher asks ranks of the same node to look at the process of a silent rank, and of all ranks once any rank
had an exception from a collective. A process that is gone or stopped is reported at once. One that is alive has more time;
and without a hang time-out it is not lost at all: a long call may be intended, and only one line is logged. If no rank
can look, because the whole node is silent, the limit (``lost_s``) is in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass, field

from guozhuang.watch.pace import OwnTime
from guozhuang.watch.processes import GONE, STOPPED

# Ranks that may send a beat per second: fewer behind a ``Door``, whose Python code in rank 0's process handles every request.
_RANKS_PER_SECOND, _RANKS_PER_SECOND_BEHIND_A_DOOR = 500, 50


class AwakeClock:
    """A clock that counts only the seconds during which this process was awake. See [Note: the clock] in ``heartbeat``.

    Args:
        cap_s: the most that the clock advances between two ticks.
        now: the clock of the system.
    """

    def __init__(self, cap_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._cap_s, self._now = cap_s, now
        self._base = (0.0, now())

    def tick(self) -> float:
        """Advance the clock and return its time; only one thread may call this."""
        now_s = self._now()
        passed_s, ticked_s = self._base
        self._base = (passed_s + min(now_s - ticked_s, self._cap_s), now_s)
        return self._base[0]

    def __call__(self) -> float:
        """Return the time now; any thread may call this."""
        passed_s, ticked_s = self._base
        return passed_s + min(self._now() - ticked_s, self._cap_s)


@dataclass(frozen=True)
class Limits:
    """The time limits of the heartbeat and of its watcher, in seconds.

    Attributes:
        interval_s: between two beats of a rank.
        silent_s: after so long without a beat of a rank, ranks of its node are asked to look at its process.
        lost_s: after so long without a beat, a rank whose process no other rank can look at is lost.
        mute_s: after so long without a beat, a rank whose process is alive, or that never sent a beat, counts as mute.
        takeover_s: after so long without a new status of the watcher, another rank takes the watch over.
        gather_s: how long the watcher waits for the stacks of the other ranks.
        urgent_takeover_s: as ``takeover_s``, on a rank that is about to end by an exception from a collective.
        report_wait_s: how long such a rank waits until the watcher, or its successor, begins a report.
    """

    interval_s: float
    silent_s: float
    lost_s: float
    mute_s: float
    takeover_s: float
    gather_s: float
    urgent_takeover_s: float
    report_wait_s: float

    @classmethod
    def usual(cls, size: int, behind_door: bool) -> Limits:
        """Return the limits for ``size`` ranks: the store gets at most 1000 requests per second (behind a door 100)."""
        ranks_per_s = _RANKS_PER_SECOND_BEHIND_A_DOOR if behind_door else _RANKS_PER_SECOND
        return cls.of(max(1.0, size / ranks_per_s))

    @classmethod
    def of(cls, interval_s: float) -> Limits:
        """Return limits that are multiples of the interval between two beats."""
        return cls(
            interval_s=interval_s,
            silent_s=3 * interval_s,
            lost_s=10 * interval_s,
            mute_s=30 * interval_s,
            takeover_s=5 * interval_s,
            gather_s=max(2.5 * interval_s, 2.0),
            urgent_takeover_s=2.5 * interval_s,
            report_wait_s=3 * interval_s,
        )


@dataclass(frozen=True)
class Beat:
    """The status that one rank publishes once per interval. The agent of a node publishes one with its process's state alone.

    Attributes:
        count: number of the beat.
        pid: process number of the rank.
        start: start time of that process (``processes.start_of``), because process numbers are reused.
        node: text that is equal for ranks that can look at each other's processes.
        collectives: how many collectives the default group has started on this rank.
        idle_s: seconds since the rank last started a collective, in any group.
        still_s: seconds for which its main thread has been standing at ``place``.
        place: the place in the code where the main thread is, in words.
        waits_in: the collective that the main thread is in; "" if it is in none.
        stacks_answered: number of the last request for stacks that the rank has answered.
        process_states: the states of the processes on its node that the watcher asked for, by rank.
        trouble: the exception that a collective raised; the rank is about to end because of it.
        dead_thread: the last of its other threads that an exception ended, with that exception; "" if there is none.
        left: None while the rank runs; "" if it left as planned; else the exception that ended it.
        released_store: the rank has read that the store closes, and sends it no more requests.
        host: the name of its host, once it tells its own time.
        own_time: its own time in the last steps; None before it has made enough of them.
    """

    count: int
    pid: int
    start: int
    node: str
    collectives: int = 0
    idle_s: float = 0.0
    still_s: float = 0.0
    place: str = ""
    waits_in: str = ""
    stacks_answered: int = 0
    process_states: Mapping[int, str] = field(default_factory=dict)
    trouble: str = ""
    dead_thread: str = ""
    left: str | None = None
    released_store: bool = False
    host: str = ""
    own_time: OwnTime | None = None

    def to_bytes(self) -> bytes:
        """Encode the beat for the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Beat:
        """Return the beat that ``to_bytes`` encoded."""
        values = json.loads(data)
        states = values["process_states"]
        values["process_states"] = {int(rank): state for rank, state in states.items()}
        if values.get("own_time") is not None:
            links = tuple(tuple(each) for each in values["own_time"].pop("links"))
            values["own_time"] = OwnTime(**values["own_time"], links=links)
        return cls(**values)


@dataclass
class _Known:
    beat: Beat | None
    changed_s: float
    silent_since_s: float | None = None


class Judge:
    """The last beats of all ranks, and the decision which ranks are silent, lost or failed and whether all hang.

    Args:
        size: the number of ranks of the world.
        limits: see ``Limits``.
        hang_timeout_s: see [Note: what a hang is]; None: hangs are not detected.
        now_s: the time now, of a clock that never goes back; also in all methods.
    """

    def __init__(self, size: int, limits: Limits, hang_timeout_s: float | None, now_s: float) -> None:
        self.limits, self.hang_timeout_s = limits, hang_timeout_s
        self._known = [_Known(None, now_s) for _ in range(size)]
        self._began_s = now_s

    def take(self, rank: int, beat: Beat, now_s: float) -> None:
        """Record the beat just read from the store for ``rank``; it may be the same one as at the last read."""
        known = self._known[rank]
        if known.beat is None and known.silent_since_s is not None:
            known.beat, known.changed_s = beat, known.silent_since_s
        elif known.beat is None or known.beat.count != beat.count:
            known.beat, known.changed_s = beat, now_s

    def silent_since(self, rank: int, since_s: float) -> None:
        """Set the time since which ``rank`` is known to be silent, although this judge reads its beats only from now on.

        Call this before the first ``take`` of that rank, whose beat then counts as old and not as a sign of life.
        """
        self._known[rank].silent_since_s = since_s

    def beats(self) -> dict[int, Beat]:
        """Return the last beat of each rank that has sent one."""
        return {rank: known.beat for rank, known in enumerate(self._known) if known.beat is not None}

    def live(self, lost: Container[int]) -> dict[int, Beat]:
        """Return the last beats of the ranks that have neither left nor are among ``lost``."""
        return {rank: beat for rank, beat in self.beats().items() if beat.left is None and rank not in lost}

    def age_s(self, rank: int, now_s: float) -> float:
        """Return the seconds since the last new beat of ``rank``."""
        return now_s - self._known[rank].changed_s

    def without_beat(self) -> list[int]:
        """Return the ranks that have not sent a beat yet."""
        return [rank for rank, known in enumerate(self._known) if known.beat is None]

    def silent(self, now_s: float) -> list[int]:
        """Return the ranks that sent no beat for ``silent_s`` seconds: ranks of their nodes look at their processes then."""
        return [
            rank
            for rank, beat in self.beats().items()
            if beat.left is None and self.age_s(rank, now_s) >= self.limits.silent_s
        ]

    def failed(self) -> dict[int, str]:
        """Return the exception's text for each rank that ended by one, except ranks on which a collective raised it."""
        return {rank: beat.left for rank, beat in self.beats().items() if beat.left and not beat.trouble}

    def troubled(self) -> dict[int, str]:
        """Return the exception's text for each rank on which a collective raised one and which has not left yet."""
        return {rank: beat.trouble for rank, beat in self.beats().items() if beat.trouble and beat.left is None}

    def lost(self, now_s: float) -> dict[int, str]:
        """Return for each lost rank a text that says why it counts as lost. See [Note: what a loss is]."""
        lost, mute = self._missing(now_s)
        return lost if self.hang_timeout_s is None else dict(sorted({**lost, **mute}.items()))

    def mute(self, now_s: float) -> dict[int, str]:
        """Return a text for each rank that is silent without a known fault; {} with a hang time-out: it counts as lost then."""
        return self._missing(now_s)[1] if self.hang_timeout_s is None else {}

    def _missing(self, now_s: float) -> tuple[dict[int, str], dict[int, str]]:
        limits = self.limits
        lost: dict[int, str] = {}
        mute: dict[int, str] = {}
        silent, beats = set(self.silent(now_s)), self.beats()
        seen: dict[int, list[str]] = {}
        for witness, beat in beats.items():
            for rank, state in beat.process_states.items() if witness not in silent else ():
                seen.setdefault(rank, []).append(state)
        for rank in sorted({*seen, *silent} & beats.keys()):
            age_s, beat, states = self.age_s(rank, now_s), beats[rank], seen.get(rank, [])
            if beat.left is not None:
                continue
            if GONE in states:
                lost[rank] = f"its process {beat.pid} is gone: killed, or ended without gz.shutdown()"
            elif rank not in silent:
                continue
            elif STOPPED in states:
                lost[rank] = f"its process {beat.pid} is stopped (by a signal or a debugger)"
            elif states and age_s >= limits.mute_s:
                mute[rank] = (
                    f"no sign of life for {age_s:.0f} s, though its process {beat.pid} is there ({states[0]}): one call may "
                    "be holding Python's lock, or the store of the world does not answer it"
                )
            elif not states and age_s >= limits.lost_s:
                lost[rank] = f"no sign of life for {age_s:.0f} s" + self._of_the_node(rank, silent, beats)
        for rank in self.without_beat() if now_s - self._began_s >= limits.mute_s else ():
            mute[rank] = f"it has sent no heartbeat since the world began, {now_s - self._began_s:.0f} s ago"
        return lost, mute

    def _of_the_node(self, rank: int, silent: set[int], beats: Mapping[int, Beat]) -> str:
        here = [r for r, beat in beats.items() if beat.node == beats[rank].node and beat.left is None]
        if len({beat.node for beat in beats.values()}) > 1 and set(here) <= silent:
            return ", nor from any other rank of its node: the node is down, or cut off from the store of the world"
        return ": it is cut off from the store of the world, or its node is down"

    def hangs(self, now_s: float) -> bool:
        """Return whether the world hangs; see [Note: what a hang is]."""
        limit_s, lost = self.hang_timeout_s, self.lost(now_s)
        if limit_s is None or set(self.without_beat()) - lost.keys():
            return False
        live = self.live(lost)
        if not live or any(beat.idle_s + self.age_s(rank, now_s) < limit_s for rank, beat in live.items()):
            return False
        return any(beat.still_s + self.age_s(rank, now_s) >= limit_s for rank, beat in live.items())
