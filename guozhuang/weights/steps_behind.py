"""Ranks that made fewer optimizer steps than others: found where ranks meet, before a wait would end in a time-out.

[Note: who is behind] A rank that left out a step alone goes on one step behind: its exchange of step n meets that of the others
an iteration later, and nothing is wrong until it comes to evaluation while the others wait for it in their last step. There it
cannot know of them, since ordinary steps tell nobody where they are. So a thread looks now and then whether this rank has been
inside one step's exchange for long, and then leaves that step's number in the store. Who has come to the meeting looks for
these numbers while it waits. A number that it has not reached means for certain that it is behind: the other has begun that
step, and needs this rank to end it. It then makes up what is missing, as it would after the meeting. Any other number, of a
rank on a slow link for example, means nothing. Numbers belong to one beginning: a checkpoint may set the count of steps back.

[Note: what waiting costs the store] Ranks may wait for minutes while one saves, and one process serves them all. So a rank asks
for a single key at a time: rank 0 alone asks whether all have come, and says so in a key that the others look at; and how often
a number was left is counted under one key, so that numbers are read only where there are new ones.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import WorldError, explain
from ..groups.agreement import store_of

_log = logging.getLogger("guozhuang")
_PATIENCE_S = 1.0  # in a step, before it is told; in a meeting, before it is asked who waits in a step, and between
_WARN_AFTER_S = 30.0
_LONGEST_PAUSE_S = 0.1
_MOST_ASKS_PER_S = 2000  # of all ranks together

MAKE_EVERY_STEP = "make every step on every rank: GradScaler with a fused optimizer, join() where inputs are uneven"


@dataclass
class _Place:
    """Where this rank is; the trainer writes it, the thread reads it.

    Attributes:
        inside: the step in whose exchange it is, since when, and under which keys that is told; None between.
    """

    inside: tuple[int, float, str] | None = None


class StepsBehind:
    """In which steps ranks wait, and for whom. Every rank of the group must construct it at one point.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size, self._store = group.rank(), group.size(), store_of(group)
        # Each rank counts in the store, so no process keeps a counter.
        number = self._store.add(f"guozhuang/steps/turns/{self._rank}", 1)
        self._prefix = f"guozhuang/steps/{number}"
        self._turns: dict[str, int] = {}
        self._beginning = 0
        self._place = _Place()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._ended.set)

    @property
    def _waits(self) -> str:
        """Under which keys ranks tell where they wait."""
        return f"{self._prefix}/waits/{self._beginning}"

    def begin_anew(self) -> None:
        """Steps are counted from another number. Every rank must call, at one point, where none is inside a step."""
        self._beginning += 1

    def enter(self, step: int) -> None:
        """From here on this rank may wait for others, in that step."""
        self._place.inside = step, time.monotonic(), self._waits
        if self._size > 1 and (self._thread is None or not self._thread.is_alive()):  # also in a forked child
            arguments = self._place, self._rank, self._store, self._ended
            self._thread = threading.Thread(target=_watch, args=arguments, name="guozhuang steps", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """It waits no more."""
        self._place.inside = None

    def gather(
        self, point: str, limit_s: float, made: Callable[[], int], make_up: Callable[[int], None] | None, fix: str
    ) -> None:
        """Wait until all ranks have come to a point of the program, and meanwhile make up steps that others wait in.

        Args:
            point: its name; every rank comes to points of one name equally often.
            limit_s: how long to wait, in seconds.
            made: tells how many steps this rank has made.
            make_up: takes part in steps until so many were made; None where nobody waits for a certain step.
            fix: for the error.

        Raises:
            WorldError: a rank did not come in time; the text names it. Or the store went away with the process that held it.
        """
        turn = self._turns[point] = self._turns.get(point, 0) + 1
        meeting = f"{self._prefix}/{point}/{turn}"
        with self._asking(point):
            self._store.set(f"{meeting}/{self._rank}", "")
        began_s = asked_s = time.monotonic()
        pause_s, longest_s, warned, num_read = 0.001, max(_LONGEST_PAUSE_S, self._size / _MOST_ASKS_PER_S), False, 0
        while not self._have_all_come(point, meeting):
            now_s = time.monotonic()
            if make_up is not None and now_s - asked_s > _PATIENCE_S:
                asked_s = now_s
                others, num_read = self._who_waits(point, made(), num_read)
                if others:
                    self._say(point, made(), others)
                    make_up(max(others.values()) + 1)
                    began_s = asked_s = time.monotonic()
                    continue
            waited_s = now_s - began_s
            if waited_s > (limit_s if warned else min(limit_s, _WARN_AFTER_S)):
                late = self._who_is_late(point, meeting)
                if not late:  # rank 0 has not said so yet
                    break
                has_ended = waited_s > limit_s
                what = f"ranks {late} did not come within {limit_s if has_ended else waited_s:.3g} s to {point}"
                text = explain(what, value=f"{made()} steps made here", rank=self._rank, fix=fix)
                if has_ended:
                    raise WorldError(text)
                _log.warning("%s (the limit is %g s)", text, limit_s)
                warned = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        if turn > 2:  # all ranks have left that one
            before = f"{self._prefix}/{point}/{turn - 2}"
            for key in (f"{before}/{self._rank}", f"{before}/all")[: 1 if self._rank else 2]:
                with contextlib.suppress(RuntimeError):  # a store that cannot delete
                    self._store.delete_key(key)

    # ---- what is asked of the store; see [Note: what waiting costs the store] ----------------------------------------------

    def _have_all_come(self, point: str, meeting: str) -> bool:
        with self._asking(point):
            if self._rank != 0:
                return self._store.check([f"{meeting}/all"])
            if not self._store.check([f"{meeting}/{rank}" for rank in range(self._size)]):
                return False
            self._store.set(f"{meeting}/all", "")
            return True

    def _who_is_late(self, point: str, meeting: str) -> list[int]:
        with self._asking(point):
            return [rank for rank in range(self._size) if not self._store.check([f"{meeting}/{rank}"])]

    def _who_waits(self, point: str, num_made: int, num_read: int) -> tuple[dict[int, int], int]:
        """Return the ranks that wait in a step which this one has not made, and in which; see [Note: who is behind].

        Args:
            point: for the error.
            num_made: steps made here.
            num_read: how many numbers had been left when this was called last. The second result is how many it are now.
        """
        with self._asking(point):
            count = f"{self._waits}/count"
            num_left = int(self._store.get(count)) if self._store.check([count]) else 0
            if num_left == num_read:
                return {}, num_left
            keys = {rank: f"{self._waits}/{rank}" for rank in range(self._size) if rank != self._rank}
            there = {rank: int(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
            return {rank: step for rank, step in there.items() if step >= num_made}, num_left

    @contextlib.contextmanager
    def _asking(self, point: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # DistNetworkError, DistStoreError
            what = f"the store went away while ranks came to {point}: {error}"
            raise WorldError(explain(what, rank=self._rank, fix="look at rank 0's own error")) from error

    def _say(self, point: str, num_made: int, others: dict[int, int]) -> None:
        where = ", ".join(f"rank {rank} in step {step}" for rank, step in sorted(others.items()))
        what = (
            f"rank {self._rank} came to {point} after {num_made} optimizer steps, and others wait for it: {where} "
            "(counted from 0). It left out steps that they made, and takes part in them now with the weights it has"
        )
        _log.warning("%s", explain(what, rank=self._rank, fix=MAKE_EVERY_STEP))


def _watch(place: _Place, rank: int, store: dist.Store, ended: threading.Event) -> None:
    told: tuple[int, float, str] | None = None
    while not ended.wait(_PATIENCE_S / 2):
        inside = place.inside
        if inside is not None and inside != told and time.monotonic() - inside[1] > _PATIENCE_S:
            told = inside
            step, _, waits = inside
            with contextlib.suppress(RuntimeError):  # the store is gone, or the process group
                store.set(f"{waits}/{rank}", str(step))
                store.add(f"{waits}/count", 1)  # behind it: whoever reads the new count finds the number
