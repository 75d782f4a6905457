"""Ranks that made fewer optimizer steps than others: found where ranks meet, before a wait would end in a time-out.

[Note: who is behind] A rank that left out a step alone goes on one step behind: its exchange of step n meets that of the others
an iteration later, and nothing is wrong until it comes to evaluation while the others wait for it in their last step. There it
cannot know of them, since ordinary steps tell nobody where they are. So a thread looks now and then whether this rank has been
inside one step's exchange for long, and then leaves that step's number in the store. Who has come to the meeting looks for
these numbers while it waits. A number that it has not reached means for certain that it is behind: the other has begun that
step, and needs this rank to end it. It then makes up what is missing, as it would after the meeting. Any other number, of a
rank on a slow link for example, means nothing. Numbers belong to one beginning: a checkpoint may set the count of steps back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import WorldError, explain
from ..groups.agreement import store_of

_log = logging.getLogger("guozhuang")
_PATIENCE_S = 1.0  # in a step, before it is told; in a meeting, before it is asked who waits in a step
_WARN_AFTER_S = 30.0
_LONGEST_PAUSE_S = 0.1


@dataclass
class _Place:
    """Where this rank is; the trainer writes it, the thread reads it.

    Attributes:
        inside: the step in whose exchange it is, since when, and the key under which that is told; None between.
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
        self._key = self._waiting_key(self._rank)
        self._place = _Place()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._ended.set)

    def begin_anew(self) -> None:
        """Steps are counted from another number. Every rank must call, at one point, where none is inside a step."""
        self._beginning += 1
        self._key = self._waiting_key(self._rank)

    def enter(self, step: int) -> None:
        """From here on this rank may wait for others, in that step."""
        self._place.inside = step, time.monotonic(), self._key
        if self._size > 1 and (self._thread is None or not self._thread.is_alive()):  # also in a forked child
            arguments = self._place, self._store, self._ended
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
            WorldError: a rank did not come in time; the text names it.
        """
        turn = self._turns[point] = self._turns.get(point, 0) + 1
        keys = [f"{self._prefix}/{point}/{turn}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], "")
        began_s, pause_s, warned = time.monotonic(), 0.001, False
        while not self._store.check(keys):
            waited_s = time.monotonic() - began_s
            if make_up is not None and waited_s > _PATIENCE_S and (others := self._who_waits(made())):
                self._say(point, made(), others)
                make_up(max(others.values()) + 1)
                began_s = time.monotonic()
                continue
            if waited_s > (limit_s if warned else min(limit_s, _WARN_AFTER_S)):
                late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                has_ended = waited_s > limit_s
                what = f"ranks {late} did not come within {limit_s if has_ended else waited_s:.3g} s to {point}"
                text = explain(what, value=f"{made()} steps made here", rank=self._rank, fix=fix)
                if has_ended:
                    raise WorldError(text)
                _log.warning("%s (the limit is %g s)", text, limit_s)
                warned = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        with contextlib.suppress(RuntimeError):  # a store that cannot delete
            if turn > 2:  # all ranks have left that one
                self._store.delete_key(f"{self._prefix}/{point}/{turn - 2}/{self._rank}")

    def _who_waits(self, num_made: int) -> dict[int, int]:
        """Return the ranks that wait in a step which this one has not made, and in which; see [Note: who is behind]."""
        keys = {rank: self._waiting_key(rank) for rank in range(self._size) if rank != self._rank}
        there = {rank: int(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        return {rank: step for rank, step in there.items() if step >= num_made}

    def _say(self, point: str, num_made: int, others: dict[int, int]) -> None:
        where = ", ".join(f"rank {rank} in step {step}" for rank, step in sorted(others.items()))
        what = (
            f"rank {self._rank} came to {point} after {num_made} optimizer steps, and others wait for it: {where} "
            "(counted from 0). It left out steps that they made, and takes part in them now with the weights it has"
        )
        fix = "make every step on every rank: GradScaler with a fused optimizer, join() where inputs are uneven"
        _log.warning("%s", explain(what, rank=self._rank, fix=fix))

    def _waiting_key(self, rank: int) -> str:
        return f"{self._prefix}/waits/{self._beginning}/{rank}"


def _watch(place: _Place, store: dist.Store, ended: threading.Event) -> None:
    told: tuple[int, float, str] | None = None
    while not ended.wait(_PATIENCE_S / 2):
        inside = place.inside
        if inside is not None and inside != told and time.monotonic() - inside[1] > _PATIENCE_S:
            told = inside
            with contextlib.suppress(RuntimeError):  # the store is gone, or the process group
                store.set(told[2], str(told[0]))
