"""Finds ranks that made fewer optimizer steps than others, where all ranks wait for each other, and names them in errors.

[Note: who is behind] A rank that left out one step stays one step behind: it starts its exchange of step n an iteration after
the others start theirs, and nothing fails until this rank reaches evaluation while the others wait for it in their last step.
It cannot know that there, since ordinary steps do not publish step numbers. So a thread on each rank tests regularly whether
the rank has been inside one step's exchange for long, and then writes that step's number to the store. A rank that waits in
``gather`` reads these numbers. A number not below its own count of steps proves that it is behind: the other rank has started
that step, and cannot end it without this rank. This rank then raises, and writes a notice for the others, whose exchange fails
when it ends. Any other number, for example of a rank on a slow link, proves nothing. Keys contain the number of restarts,
because a checkpoint may set the count of steps back.

Because of [Note: what waiting costs the store] in groups/roll_call.py, one key counts how often a step number was written, and
numbers are read only if there are new ones.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from ..errors import MismatchError, WorldError, explain, rank_table
from ..groups import roll_call
from ..groups.agreement import members_of, store_of
from ..groups.serial import SerialThread
from ..net.store import next_part

_log = logging.getLogger("guozhuang")
_PATIENCE_S = 1.0  # a rank writes a step's number when it has waited so long in it; numbers are read at this interval
_WARN_AFTER_S = 30.0
_IDLE_S = 2.0  # a thread ends after so long without a step

MAKE_EVERY_STEP = "make every step on every rank: GradScaler with a fused optimizer, join() where inputs are uneven"


@dataclass
class _Waiting:
    """What the thread that watches this rank reads.

    Attributes:
        inside: the step in whose exchange this rank waits, the monotonic start time in seconds, the key prefix, and the name of
            the call, where not all are steps (see points.py); None: it waits in none.
        is_watched: whether there is a thread. It ends where this rank waits in no step for some time.
        lock: held where one of both changes with the other.
    """

    inside: tuple[int, float, str, str] | None = None
    is_watched: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Begun:
    """What outlives a :class:`StepsBehind`, so that another one goes on. Every rank must construct it at one point.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.store, self.members = next_part(store_of(group), "steps", group.rank()), members_of(group)
        self.turns: dict[str, int] = {}  # how often each point was reached


class StepsBehind:
    """Publishes the steps in which ranks wait, and finds ranks that left out steps.

    Every rank must construct it at one point, unless it gives what was begun there.

    Args:
        group: the ranks.
        begun: goes on with this; None: begins anew.
    """

    def __init__(self, group: dist.ProcessGroup, begun: Begun | None = None) -> None:
        self._rank, self._size = group.rank(), group.size()
        begun = begun or Begun(group)
        self._store, self._members, self._turns = begun.store, begun.members, begun.turns
        self._beginning = 0
        self._waiting = _Waiting()
        self._ended = threading.Event()
        self._thread: SerialThread | None = None
        weakref.finalize(self, self._ended.set)

    @property
    def _waits(self) -> str:
        """The prefix of the keys under which ranks write the step in which they wait."""
        return f"waits/{self._beginning}"

    def restart(self) -> None:
        """Start counting steps from another number. Every rank must call, at one point, where no rank is inside a step."""
        self._beginning += 1

    @contextlib.contextmanager
    def inside(self, step: int, call: str = "") -> Iterator[None]:
        """Record that inside this context this rank may wait for other ranks, in the exchange of step ``step``.

        Args:
            step: its number; ranks that wait in ``gather`` compare it with the number of steps that they made.
            call: the name of the call, where not all are steps.

        Raises:
            WorldError: the exchange failed, and another rank has left a notice that it left out this step.
        """
        with self._waiting.lock:
            self._waiting.inside = step, time.monotonic(), self._waits, call
            is_watched, self._waiting.is_watched = self._waiting.is_watched, True
        if self._size > 1 and not is_watched:
            self._thread = SerialThread("guozhuang steps")
            self._thread.run(functools.partial(_watch, self._waiting, self._rank, self._store, self._ended))
            self._thread.close()
        try:
            yield
        except RuntimeError as error:
            if (notice := self._notice()) is not None:
                raise WorldError(notice) from error
            raise
        finally:
            self._waiting.inside = None

    def gather(self, point: str, limit_s: float, num_made: int | None, fix: str, *, is_step: bool = True) -> None:
        """Wait until all ranks have reached a point of the program, and compare how many steps they made.

        Args:
            point: name of the point; every rank calls this equally often for one name.
            limit_s: how long to wait, in seconds.
            num_made: the number of steps this rank has made; None if numbers need not be equal.
            fix: advice for the error text.
            is_step: False: ``num_made`` is a number of calls, which need not be equal; it tells who has gone on to others.

        Raises:
            MismatchError: ranks made different numbers of steps; on every rank, with a table.
            WorldError: this rank is behind, and others wait for it in a step; or a rank did not arrive in time (the text names
                ranks and steps); or the store was lost with the process that held it.
        """
        turn = self._turns[point] = self._turns.get(point, 0) + 1
        num_read, has_warned = 0, False
        late = "" if num_made is None or not is_step else f" ({num_made} steps made here)"

        def look(missing: Sequence[int], waited_s: float) -> None:
            nonlocal num_read, has_warned
            if (notice := self._notice()) is not None:
                raise WorldError(notice)
            if num_made is not None:
                others, num_read = self._who_waits(num_made, num_read)
                others = {rank: each for rank, each in others.items() if each != (num_made, point)}
                if others and not is_step:
                    where = ", ".join(f"rank {rank} in {call}" for rank, (_, call) in sorted(others.items()))
                    what = f"{point} needs every rank, and others wait for this one elsewhere: {where}"
                    raise self._behind(what, fix)
                if others:
                    where = ", ".join(f"rank {rank} in step {step}" for rank, (step, _) in sorted(others.items()))
                    what = f"rank {self._rank} came to {point} after {num_made} optimizer steps, and others wait for it"
                    raise self._behind(
                        f"{what}: {where} (counted from 0). It left out optimizer.step()", MAKE_EVERY_STEP
                    )
            if missing and not has_warned and _WARN_AFTER_S < waited_s < limit_s:
                has_warned = True
                text = f"ranks {missing} did not come within {waited_s:.3g} s to {point}{late}"
                _log.warning("%s (the limit is %g s)", explain(text, rank=self._rank, fix=fix), limit_s)

        everybody = roll_call.call(
            self._store,
            f"{point}/{turn}",
            self._rank,
            self._size,
            "" if num_made is None or not is_step else str(num_made),
            limit_s,
            look=look,
            look_every_s=_PATIENCE_S,
            purpose=f"to {point}{late}",
            fix=fix,
            members=self._members,
        )
        if turn > 2:
            roll_call.forget(self._store, f"{point}/{turn - 2}", self._rank)
        if len(set(everybody)) > 1:
            table = rank_table(("rank", "optimizer steps made"), list(enumerate(everybody)))
            text = explain(f"ranks came to {point} after different numbers of optimizer steps", fix=MAKE_EVERY_STEP)
            raise MismatchError(f"{text}\n{table}")

    def _behind(self, what: str, fix: str) -> WorldError:
        """Return the error of a rank that left out a step, and write its text to the store for ranks that wait in a step."""
        text = explain(what, rank=self._rank, fix=fix)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._waits}/behind", text)
        return WorldError(text)

    # ---- methods that read from the store ------------------------------------------------------------------------------------

    def _notice(self) -> str | None:
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"{self._waits}/behind"]):
                return self._store.get(f"{self._waits}/behind").decode()
        return None

    def _who_waits(self, num_made: int, num_read: int) -> tuple[dict[int, tuple[int, str]], int]:
        """Return the ranks that wait in a step which this rank has not made, with it and its call; see [Note: who is behind].

        Args:
            num_made: the number of steps made here.
            num_read: the second result of the last call: how many numbers had been written then.
        """
        count = f"{self._waits}/count"
        num_left = int(self._store.get(count)) if self._store.check([count]) else 0
        if num_left == num_read:
            return {}, num_left
        keys = {rank: f"{self._waits}/{rank}" for rank in range(self._size) if rank != self._rank}
        texts = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        there = {rank: (int(step), call) for rank, text in texts.items() for step, _, call in [text.partition(" ")]}
        return {rank: (step, call) for rank, (step, call) in there.items() if step >= num_made}, num_left


def _watch(waiting: _Waiting, rank: int, store: dist.Store, ended: threading.Event) -> None:
    left: tuple[int, float, str, str] | None = None
    last_s = time.monotonic()
    while not ended.wait(_PATIENCE_S / 2):
        inside = waiting.inside
        if inside is not None:
            last_s = time.monotonic()
        elif time.monotonic() - last_s > _IDLE_S:
            with waiting.lock:
                if waiting.inside is None:
                    waiting.is_watched = False
                    return
        if inside is not None and inside != left and time.monotonic() - inside[1] > _PATIENCE_S:
            left = inside
            step, _, waits, call = inside
            with contextlib.suppress(RuntimeError):  # the store or the process group may have ended
                store.set(f"{waits}/{rank}", f"{step} {call}")
                store.add(f"{waits}/count", 1)  # last, so that a rank that reads the count finds the number
