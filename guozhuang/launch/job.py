"""Decide which ranks of one node are stopped or restarted, and when the attempt is over. Pure.

The agent reports events (``ended``, ``interrupt``, ``stop`` ...) and carries out the decisions that ``turn`` returns. No method
looks at a clock or a process: the time is an argument, in seconds of any clock that does not go back.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from guozhuang.watch.processes import ENDED_BY_SIGTERM

# Seconds that ranks get after Ctrl-C to return from a collective (Python handles SIGINT only then) before they get SIGTERM.
INTERRUPT_S = 5.0
# Seconds; a process that has not ended so long after SIGKILL is in uninterruptible sleep, and the agent leaves it behind.
KILLED_S = 5.0


class Policy(enum.Enum):
    """The rule for the failure of one rank: restart all ranks, or only that rank."""

    RESTART_ALL = "restart-all"
    KEEP_SURVIVORS = "keep-survivors"


class Outcome(enum.Enum):
    """How an attempt ended. All its ranks have ended by then, except ranks in uninterruptible sleep."""

    SUCCEEDED = enum.auto()
    FAILED = enum.auto()
    RETRY = enum.auto()  # a rank failed, and all ranks are to be restarted
    RESTART = enum.auto()  # another node restarts its ranks, so this node must restart its own
    STOPPED = enum.auto()  # a call of ``interrupt`` or ``stop`` ended the attempt
    HELD = enum.auto()  # a rank was in uninterruptible sleep for too long


@dataclass(frozen=True)
class Send:
    """The decision to send a signal to these ranks."""

    ranks: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class Replace:
    """The decision to restart one rank, which ended with ``code``, while the other ranks keep running."""

    rank: int
    code: int


@dataclass(frozen=True)
class Over:
    """The decision that the attempt is over."""

    outcome: Outcome


Decision = Send | Replace | Over


class Job:
    """The state of one node's ranks, from which ``turn`` derives decisions.

    Args:
        max_restarts: how many times ranks may be restarted after a failure; replacing a single rank counts as one restart.
        shutdown_s: time between SIGTERM and SIGKILL, in seconds.
        policy: whether a failure restarts all ranks or only the failed one.
        held_s: how many seconds a rank may be in uninterruptible sleep before the run is aborted; 0: without limit.
    """

    def __init__(
        self, max_restarts: int, shutdown_s: float, policy: Policy = Policy.RESTART_ALL, held_s: float = 0.0
    ) -> None:
        self.max_restarts = self.restarts_left = max_restarts
        self.shutdown_s, self._policy, self._held_s = shutdown_s, policy, held_s
        self._held_since: dict[int, float] = {}
        self.begin(())

    def begin(self, ranks: Iterable[int]) -> None:
        """Reset the state for an attempt with these ranks."""
        self.living = set(ranks)  # the ranks whose processes run; the agent adds a rank that it replaced
        self.codes: dict[int, int] = {}  # exit codes of the ranks that have ended; negative for a signal
        self._outcome: Outcome | None = None  # how the attempt will end; set when its ranks begin to be stopped
        self.ranks_know = False  # whether the ranks end by themselves, as they were asked to, and get no signal
        self._pending: list[Send] = []
        self._term_at = self._kill_at = self._leave_at = float("inf")
        self._held_since.clear()
        self.held: list[int] = []

    @property
    def failed(self) -> dict[int, int]:
        """Return the exit codes of the ranks that ended with another code than 0."""
        return {rank: code for rank, code in sorted(self.codes.items()) if code != 0}

    @property
    def is_watching_kernel(self) -> bool:
        """Return whether the agent must report ranks in uninterruptible sleep, by ``kernel_holds``."""
        return self._held_s > 0

    def ended(self, rank: int, code: int) -> None:
        """Record that the process of a rank has ended, with this exit code (negative for a signal)."""
        self.living.discard(rank)
        self.codes[rank] = code
        if code not in (0, ENDED_BY_SIGTERM):
            self.signal_after_all()

    def interrupt(self, number: int, now: float, ranks_know: bool = False) -> None:
        """Record a signal to the agent that ends the run: the ranks get the signal too; a second one kills them at once.

        Args:
            number: the signal.
            now: the time.
            ranks_know: the ranks were asked in another way to end; they get no signal but SIGKILL after ``shutdown_s``, unless
                one of them fails: then the others get SIGTERM.
        """
        if self._outcome is Outcome.STOPPED:
            self._kill_at = now
            return
        self._stop_ranks(Outcome.STOPPED, number, now, ranks_know)
        if number == signal.SIGINT:
            self._term_at = now + INTERRUPT_S

    def stop(self, now: float, restart: bool = False, ranks_know: bool = False) -> None:
        """Stop the ranks, because another node or a server failed, restarts, or got a signal.

        Args:
            now: the time.
            restart: they are to be started again.
            ranks_know: as for ``interrupt``.
        """
        if self._outcome is None:
            self._stop_ranks(Outcome.RESTART if restart else Outcome.STOPPED, signal.SIGTERM, now, ranks_know)

    def signal_after_all(self) -> None:
        """Send SIGTERM to ranks that were asked to end by themselves, because they cannot."""
        if self.ranks_know:
            self.ranks_know = False
            self._send(signal.SIGTERM)

    def kernel_holds(self, ranks: Iterable[int], now: float) -> None:
        """Record the ranks that are in uninterruptible sleep (state D) now; ``held`` then lists those over the limit."""
        if self._outcome is not None:
            return
        there = set(ranks) & self.living
        self._held_since = {rank: self._held_since.get(rank, now) for rank in there}
        self.held = [rank for rank, since in sorted(self._held_since.items()) if now >= since + self._held_s]
        if self.held:
            self._stop_ranks(Outcome.HELD, signal.SIGTERM, now)

    def turn(self, now: float) -> list[Decision]:
        """Return the decisions that the agent must carry out now."""
        found: list[Decision] = []
        if self._outcome is None and self.failed:
            if self._policy is Policy.KEEP_SURVIVORS and self.restarts_left >= len(self.failed):
                for rank, code in self.failed.items():
                    self.restarts_left -= 1
                    del self.codes[rank]
                    found.append(Replace(rank, code))
                return found
            self._stop_ranks(Outcome.FAILED, signal.SIGTERM, now)
        if self._outcome is None:
            return [] if self.living else [Over(Outcome.SUCCEEDED)]
        found += self._pending
        self._pending = []
        if self.living and now >= self._kill_at:
            self._kill_at, self._term_at, self._leave_at = float("inf"), float("inf"), now + KILLED_S
            self.ranks_know = False
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

    def _stop_ranks(self, outcome: Outcome, number: int, now: float, ranks_know: bool = False) -> None:
        self._outcome, self.ranks_know = outcome, ranks_know
        self._kill_at = now + self.shutdown_s
        if not ranks_know:
            self._send(number)

    def _send(self, number: int) -> None:
        if self.living:
            self._pending.append(Send(tuple(sorted(self.living)), number))
