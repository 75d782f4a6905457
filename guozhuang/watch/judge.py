"""The rules of the heartbeat: which ranks are lost, and whether all hang. Pure: the clock is an argument.

[Note: what a hang is] Torch has no hook for "a collective has finished" that is cheap and serves all backends. Three
things can be had for nothing from a second thread, for gloo, NCCL and groups of our own:

- the *number of collectives* (and sends and receives) that each group has started; torch counts them itself,
- the *place* of the main thread, looked at once per beat; it stands while every look finds the same calls at the same
  instruction,
- the beat itself.

A hang: for the whole time-out **no** rank that is there has started a collective, **and** the main thread of at least one
has been standing at one place for as long. Counting alone would call any long time between two collectives a hang, such as
a compilation on all ranks. Standing alone would call a loop of one long call a hang, and never a data loader that polls
dead workers. Together: a rank waits, and no rank does anything that could end the wait. What remains is a rank that
computes for longer than the time-out while another one waits for it (evaluation on rank 0, a checkpoint, a first compile):
nothing tells it from a rank that is stuck, so the time-out must be longer than that, as that of a collective must be.
Ranks that are lost or have left do not count: they start nothing any more, and ranks that wait for them hang.

[Note: what a loss is] A missing beat alone says little: a call that holds Python's lock for long stops the heartbeat
thread too. So ranks of the same node are asked to look at the process: of a silent rank, and of all ranks when an exception
came out of a collective of any rank. A process that is gone or stopped is reported at once. One that is alive gets patience;
and without a hang time-out it is no loss at all: a long call may be what the script wants, and is worth one line. If no rank
can look, because the whole node is silent, the limit is in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from guozhuang.watch.processes import GONE, STOPPED

# Behind a door every request goes through the Python of rank 0, which has a training step to do.
_RANKS_PER_SECOND, _RANKS_PER_SECOND_BEHIND_A_DOOR = 500, 50


class AwakeClock:
    """Seconds during which this process was awake. See [Note: the clock] in ``heartbeat``.

    Args:
        cap_s: how much may pass between two ticks at most.
        now: the clock of the system.
    """

    def __init__(self, cap_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._cap_s, self._now = cap_s, now
        self._base = (0.0, now())

    def tick(self) -> float:
        """Called by one thread alone, now and then."""
        now_s = self._now()
        passed_s, ticked_s = self._base
        self._base = (passed_s + min(now_s - ticked_s, self._cap_s), now_s)
        return self._base[0]

    def __call__(self) -> float:
        """The time now; any thread may ask."""
        passed_s, ticked_s = self._base
        return passed_s + min(self._now() - ticked_s, self._cap_s)


@dataclass(frozen=True)
class Limits:
    """The limits of a watch, in seconds.

    Attributes:
        interval_s: between two beats of a rank.
        silent_s: without a beat for so long, its neighbours are asked to look at the process.
        lost_s: without a beat for so long, a rank whose process nobody can look at is called lost.
        mute_s: the same for a rank whose process is alive; also for one that never gave a sign.
        takeover_s: without a word of the rank that watches all for so long, another one takes its place.
        gather_s: how long the stacks of the others are waited for.
        hasty_takeover_s: as ``takeover_s``, on a rank that an exception out of a collective is about to end.
        heard_s: how long such a rank waits until the watching one, or its successor, knows of it.
    """

    interval_s: float
    silent_s: float
    lost_s: float
    mute_s: float
    takeover_s: float
    gather_s: float
    hasty_takeover_s: float
    heard_s: float

    @classmethod
    def usual(cls, size: int, behind_door: bool) -> Limits:
        """Those of ``size`` ranks, so that the store has no more than 1000 requests per second (a door 100)."""
        ranks_per_s = _RANKS_PER_SECOND_BEHIND_A_DOOR if behind_door else _RANKS_PER_SECOND
        return cls.of(max(1.0, size / ranks_per_s))

    @classmethod
    def of(cls, interval_s: float) -> Limits:
        """All limits are so many beats."""
        return cls(
            interval_s=interval_s,
            silent_s=3 * interval_s,
            lost_s=10 * interval_s,
            mute_s=30 * interval_s,
            takeover_s=5 * interval_s,
            gather_s=max(2.5 * interval_s, 2.0),
            hasty_takeover_s=2.5 * interval_s,
            heard_s=3 * interval_s,
        )


@dataclass(frozen=True)
class Beat:
    """The status of one rank, which it publishes once per interval.

    Attributes:
        count: number of the beat.
        pid: its process.
        start: when that process began, as ``processes.start_of`` says: process numbers are used again.
        node: equal for processes that can look at each other.
        collectives: how many the default group has started on this rank.
        idle_s: since it last started a collective, of any group.
        still_s: since when its main thread has been standing at ``place``.
        place: of the main thread, in words.
        waits_in: the collective that the main thread is in; "" in none.
        gave: the number of the last request for stacks that it has answered.
        saw: the state of the processes of silent ranks on its node.
        trouble: the exception that came out of a collective; the rank is about to end because of it.
        left: None while it runs; "" if it left as it should; else the exception that ended it.
        let_go: it has read that the store closes, and asks it for nothing more.
    """

    count: int
    pid: int
    start: int
    node: str
    collectives: int
    idle_s: float
    still_s: float
    place: str
    waits_in: str = ""
    gave: int = 0
    saw: Mapping[int, str] = field(default_factory=dict)
    trouble: str = ""
    left: str | None = None
    let_go: bool = False

    def to_bytes(self) -> bytes:
        """For the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Beat:
        """The reverse of ``to_bytes``."""
        values = json.loads(data)
        values["saw"] = {int(rank): state for rank, state in values["saw"].items()}
        return cls(**values)


@dataclass
class _Known:
    beat: Beat | None
    changed_s: float
    silent_since_s: float | None = None


class Judge:
    """The known state of all ranks, and the judgement on it.

    Args:
        size: of the world.
        limits: see ``Limits``.
        hang_timeout_s: see [Note: what a hang is]; None: nothing is ever called a hang.
        now_s: the time of a clock that never goes back, as in all methods.
    """

    def __init__(self, size: int, limits: Limits, hang_timeout_s: float | None, now_s: float) -> None:
        self.limits, self.hang_timeout_s = limits, hang_timeout_s
        self._known = [_Known(None, now_s) for _ in range(size)]
        self._began_s = now_s

    def take(self, rank: int, beat: Beat, now_s: float) -> None:
        """A beat of ``rank`` was read; it may be the one that is known already."""
        known = self._known[rank]
        if known.beat is None and known.silent_since_s is not None:
            known.beat, known.changed_s = beat, known.silent_since_s
        elif known.beat is None or known.beat.count != beat.count:
            known.beat, known.changed_s = beat, now_s

    def silent_since(self, rank: int, since_s: float) -> None:
        """The caller knows that ``rank`` gave no sign since then, although it itself watches only from now on.

        To be said before the first beat is taken; so that one is the last one, not news.
        """
        self._known[rank].silent_since_s = since_s

    def beats(self) -> dict[int, Beat]:
        """The last beat of each rank that gave one."""
        return {rank: known.beat for rank, known in enumerate(self._known) if known.beat is not None}

    def age_s(self, rank: int, now_s: float) -> float:
        """Since the last sign of life of ``rank``."""
        return now_s - self._known[rank].changed_s

    def unheard(self) -> list[int]:
        """The ranks that have not given one beat yet."""
        return [rank for rank, known in enumerate(self._known) if known.beat is None]

    def silent(self, now_s: float) -> list[int]:
        """The ranks whose processes their neighbours should look at."""
        return [
            rank
            for rank, beat in self.beats().items()
            if beat.left is None and self.age_s(rank, now_s) >= self.limits.silent_s
        ]

    def failed(self) -> dict[int, str]:
        """The ranks that an exception of their own ended, and which; those in trouble are told by ``troubled``."""
        return {rank: beat.left for rank, beat in self.beats().items() if beat.left and not beat.trouble}

    def troubled(self) -> dict[int, str]:
        """The ranks out of whose collectives an exception came, and which."""
        return {rank: beat.trouble for rank, beat in self.beats().items() if beat.trouble and beat.left is None}

    def lost(self, now_s: float) -> dict[int, str]:
        """The lost ranks, and what is known of each. See [Note: what a loss is]."""
        lost, mute = self._missing(now_s)
        return lost if self.hang_timeout_s is None else dict(sorted({**lost, **mute}.items()))

    def mute(self, now_s: float) -> dict[int, str]:
        """The ranks that give no sign although nothing is known to be wrong with them; with a hang time-out they are lost."""
        return self._missing(now_s)[1] if self.hang_timeout_s is None else {}

    def _missing(self, now_s: float) -> tuple[dict[int, str], dict[int, str]]:
        limits = self.limits
        lost: dict[int, str] = {}
        mute: dict[int, str] = {}
        silent, beats = set(self.silent(now_s)), self.beats()
        seen: dict[int, list[str]] = {}
        for witness, beat in beats.items():
            for rank, state in beat.saw.items() if witness not in silent else ():
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
        for rank in self.unheard() if now_s - self._began_s >= limits.mute_s else ():
            mute[rank] = f"it has given no sign of life since the world began, {now_s - self._began_s:.0f} s ago"
        return lost, mute

    def _of_the_node(self, rank: int, silent: set[int], beats: Mapping[int, Beat]) -> str:
        here = [r for r, beat in beats.items() if beat.node == beats[rank].node and beat.left is None]
        if len({beat.node for beat in beats.values()}) > 1 and set(here) <= silent:
            return ", nor from any other rank of its node: the node is down, or cut off from the store of the world"
        return ": it is cut off from the store of the world, or its node is down"

    def hangs(self, now_s: float) -> bool:
        """See [Note: what a hang is]."""
        limit_s, lost = self.hang_timeout_s, self.lost(now_s)
        if limit_s is None or set(self.unheard()) - lost.keys():
            return False
        live = {r: b for r, b in self.beats().items() if b.left is None and r not in lost}
        if not live or any(beat.idle_s + self.age_s(rank, now_s) < limit_s for rank, beat in live.items()):
            return False
        return any(beat.still_s + self.age_s(rank, now_s) >= limit_s for rank, beat in live.items())
