"""When to save: after a number of steps, or of seconds, or when asked to end; all ranks save after the same step.

[Note: all ranks save after the same step] A save by number of steps needs no message: ranks count alike. A save by time does,
because clocks differ, and so does the last one of a run that its launcher asks to end. A collective or an answer per step would
cost too much, so rank 0 decides ahead. Certain steps are *checks*; at each check rank 0 posts whether all shall save at the
next check, whether they shall end then, and which step the check after that one is. When
the other ranks come to the next check this was posted a second ago, so reading it takes a fraction of a millisecond. Rank 0
chooses checks about a second apart by the duration of its steps, and at most 64 steps, so that a sudden slowness delays
a save by no more than that. A rank that is ahead of rank 0 (under asynchronous methods) waits at a check.
At a save rank 0 posts whether it takes place: it does not while the one before is still being written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from guozhuang.checkpoint.saver import Board
from guozhuang.units import duration

_CHECK_EVERY_S = 1.0
_MAX_CHECK_STEPS = 64


class SaveTimes:
    """Tells after which steps all ranks save. Every rank must construct it, and call ``is_due`` once after each step.

    Args:
        steps: save when so many steps have been made; None to go by time.
        seconds: save when so many seconds have passed since the last save; read on rank 0 only.
        board: how ranks agree.
        limit_s: the longest wait for rank 0's decision.
        must_end: tells whether the run is asked to end; called on rank 0 only. None: it never is.
        clock: gives seconds; tests replace it.

    Attributes:
        is_last: whether the save that is due is the last one, because the run is asked to end.
        num_steps: how many steps were made since the construction: the calls of ``is_due``. Checks are counted by it, because
            the step of the training goes back where the script restores an older checkpoint.
    """

    def __init__(
        self,
        steps: int | None,
        seconds: float | None,
        board: Board,
        limit_s: float,
        must_end: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert (steps is None) != (seconds is None)
        self._steps, self._seconds, self._board, self._limit_s, self._clock = steps, seconds, board, limit_s, clock
        self._must_end = must_end
        self.is_last = False
        self.num_steps = 0
        self._check: int | None = None  # the next check, as a number of calls; None before the first step
        self._posted: dict[str, Any] = {}  # what rank 0 posted for the next check
        self._last_s = self._looked_s = clock()  # when the last save was, and the last check
        self._looked_at = 0  # the number of the last check
        self._saved_at = 0  # ``num_steps`` at the last save
        self._posted_for: list[int] = []  # the checks for which something is posted

    def is_due(self, step: int) -> bool:
        """Return whether all ranks save after this step of the training.

        Raises:
            CheckpointError: rank 0's decision did not come in time.
        """
        is_counted = self._steps is not None and step % self._steps == 0
        self.num_steps += 1
        if self._check is not None and self.num_steps < self._check:
            return is_counted
        if self._check is None:  # the first step is a check of which all ranks know without a message
            told: dict[str, Any] = {"save": False, "end": False, "next": 2}
            self._looked_s = self._clock()
        elif self._board.rank == 0:
            told = self._posted
        else:
            told = self._board.read(f"check/{self.num_steps}", self._limit_s, 0)
        self._check, self.is_last = told["next"], told["end"]
        if self._board.rank == 0:
            self._decide(told["next"])
        return is_counted or bool(told["save"])

    def saved(self) -> None:
        """Record that all ranks save now; all have taken part in the save before, so they have read what was posted for it."""
        self._board.forget(*(f"check/{check}" for check in self._posted_for if check <= self._saved_at))
        self._posted_for = [check for check in self._posted_for if check > self._saved_at]
        self._saved_at = self.num_steps

    def _decide(self, check: int) -> None:
        """On rank 0, at a check: decide whether to save at the next one, ``check``, and which one follows it."""
        now, step = self._clock(), self.num_steps
        per_step_s = (now - self._looked_s) / (step - self._looked_at)
        self._looked_at, self._looked_s = step, now
        ahead = max(1, min(_MAX_CHECK_STEPS, round(_CHECK_EVERY_S / per_step_s))) if per_step_s > 0 else 1
        expected_s = now + (check - step) * per_step_s
        ends = self._must_end is not None and self._must_end()
        saves = ends or (self._seconds is not None and expected_s - self._last_s >= self._seconds)
        if saves:
            self._last_s = expected_s
        self._posted = {"save": saves, "end": ends, "next": check + ahead}
        self._board.post(f"check/{check}", self._posted)
        self._posted_for.append(check)

    def __str__(self) -> str:
        return f"every {self._steps} steps" if self._seconds is None else f"every {duration(self._seconds)}"
