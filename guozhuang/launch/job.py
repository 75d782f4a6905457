"""The decisions on the ranks of one node: who is ended, who is restarted, and when the run is over. Pure.

The agent reports events (``ended``, ``interrupt``, ``stop`` ...) and carries out the decisions that ``turn`` returns. No method
looks at a clock or a process: the time is an argument, in seconds of any clock that does not go back.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable
from dataclasses import dataclass

# After Ctrl-C, for ranks to come out of a collective: Python handles the signal only then. After that they get SIGTERM.
INTERRUPT_S = 5.0
# A process that was killed and has not ended after so long is held by the kernel, and is left behind.
KILLED_S = 5.0


class Policy(enum.Enum):
    """What a failed rank means for the others."""

    RESTART_ALL = "restart-all"
    KEEP_SURVIVORS = "keep-survivors"


class Outcome(enum.Enum):
    """How an attempt ended. All its ranks have ended then, but those that the kernel holds."""

    SUCCEEDED = enum.auto()
    FAILED = enum.auto()
    RETRY = enum.auto()  # failed, and the ranks are to be started again
    RESTART = enum.auto()  # another node starts its ranks again, for which all must
    STOPPED = enum.auto()  # by ``interrupt`` or ``stop``
    HELD = enum.auto()  # the kernel held a rank for too long


@dataclass(frozen=True)
class Send:
    """Send these ranks a signal."""

    ranks: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class Replace:
    """Start this rank again; it ended with ``code``. The others go on."""

    rank: int
    code: int


@dataclass(frozen=True)
class Over:
    """The attempt is over."""

    outcome: Outcome


Decision = Send | Replace | Over


class Job:
    """See the module.

    Args:
        max_restarts: how many times ranks may be restarted after a failure; a single rank that is replaced counts as one.
        shutdown_s: between SIGTERM and SIGKILL.
        policy: what a failed rank means for the others.
        held_s: how long the kernel may hold a rank before the run is given up; 0: for ever.
    """

    def __init__(
        self, max_restarts: int, shutdown_s: float, policy: Policy = Policy.RESTART_ALL, held_s: float = 0.0
    ) -> None:
        self.max_restarts = self.restarts_left = max_restarts
        self._shutdown_s, self._policy, self._held_s = shutdown_s, policy, held_s
        self._held_since: dict[int, float] = {}
        self.begin(())

    def begin(self, ranks: Iterable[int]) -> None:
        """An attempt begins with these ranks."""
        self.living = set(ranks)
        self.codes: dict[int, int] = {}  # of the ranks that have ended, as of ``subprocess``
        self._outcome: Outcome | None = None  # decided; the ranks are being ended
        self._pending: list[Send] = []
        self._term_at = self._kill_at = self._leave_at = float("inf")
        self._held_since.clear()
        self.held: list[int] = []

    @property
    def failed(self) -> dict[int, int]:
        """The exit codes of the ranks that did not end with 0."""
        return {rank: code for rank, code in sorted(self.codes.items()) if code != 0}

    @property
    def is_watching_kernel(self) -> bool:
        """Whether ``kernel_holds`` is to be called."""
        return self._held_s > 0

    def ended(self, rank: int, code: int) -> None:
        """The process of a rank has ended."""
        self.living.discard(rank)
        self.codes[rank] = code

    def interrupt(self, number: int, now: float) -> None:
        """The agent got a signal that ends the run. The ranks get it too; a second one ends them at once."""
        if self._outcome is Outcome.STOPPED:
            self._kill_at = now
            return
        self._stop_ranks(Outcome.STOPPED, number, now)
        if number == signal.SIGINT:
            self._term_at = now + INTERRUPT_S

    def stop(self, now: float, restart: bool = False) -> None:
        """Another node, or a server, ended the attempt; ``restart``: the ranks are to be started again."""
        if self._outcome is None:
            self._stop_ranks(Outcome.RESTART if restart else Outcome.STOPPED, signal.SIGTERM, now)

    def kernel_holds(self, ranks: Iterable[int], now: float) -> None:
        """These ranks are in uninterruptible sleep at the moment (state D); ``held`` lists those that are for too long."""
        if self._outcome is not None:
            return
        there = set(ranks) & self.living
        self._held_since = {rank: self._held_since.get(rank, now) for rank in there}
        self.held = [rank for rank, since in sorted(self._held_since.items()) if now >= since + self._held_s]
        if self.held:
            self._stop_ranks(Outcome.HELD, signal.SIGTERM, now)

    def turn(self, now: float) -> list[Decision]:
        """What is to be done now."""
        found: list[Decision] = []
        if self._outcome is None and self.failed:
            if self._policy is Policy.KEEP_SURVIVORS and self.restarts_left >= len(self.failed):
                for rank, code in self.failed.items():
                    self.restarts_left -= 1
                    del self.codes[rank]
                    self.living.add(rank)
                    found.append(Replace(rank, code))
                return found
            self._stop_ranks(Outcome.FAILED, signal.SIGTERM, now)
        if self._outcome is None:
            return [] if self.living else [Over(Outcome.SUCCEEDED)]
        found += self._pending
        self._pending = []
        if self.living and now >= self._kill_at:
            self._kill_at, self._term_at, self._leave_at = float("inf"), float("inf"), now + KILLED_S
            found.append(Send(tuple(sorted(self.living)), signal.SIGKILL))
        elif self.living and now >= self._term_at:
            self._term_at = float("inf")
            found.append(Send(tuple(sorted(self.living)), signal.SIGTERM))
        if not self.living or now >= self._leave_at:
            outcome = self._outcome
            if outcome is Outcome.FAILED and self._policy is Policy.RESTART_ALL and self.restarts_left > 0:
                self.restarts_left -= 1
                outcome = Outcome.RETRY
            found.append(Over(outcome))
        return found

    def _stop_ranks(self, outcome: Outcome, number: int, now: float) -> None:
        self._outcome = outcome
        self._kill_at = now + self._shutdown_s
        if self.living:
            self._pending.append(Send(tuple(sorted(self.living)), number))
