"""When a rank comes to the next round.

[Note: pace] A round costs each rank some tens of microseconds, and wakes all of them, so it should find much to do; but what is
ready early should travel while backward still computes. Without a fixed cycle a rank comes when somebody waits; when enough
bytes have come together (little for the first time since somebody waited, so that sending begins early, then a bucketful); or
when what came first is a tenth of a second old: longer than the backward of a small model, which so goes as one. (At 20 ms a
model of 45 MB took 8 rounds a step where four ranks share two cores, and lost a tenth of its speed to them on gloo.) Whoever
wants it sooner waits, polls, or fixes the cycle. If a round made nothing ready, ranks are pending on each other's next
requests: the next one comes after a pause that doubles, unless there is something new on this rank.
"""

from __future__ import annotations

from typing import Final

FIRST_BYTES: Final = 4 << 20
BYTES: Final = 25 << 20
AGE_S: Final = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class Pace:
    """Decides when; knows no clock: every moment is an argument, in seconds. See [Note: pace].

    Args:
        cycle_time_ms: between the beginnings of two rounds; None: as above.

    Attributes:
        cycle_time_ms: may be set between rounds.
        is_urgent: the rank comes to every round at once: it has joined, or leaves.
    """

    def __init__(self, cycle_time_ms: float | None) -> None:
        self.cycle_time_ms = cycle_time_ms
        self.is_urgent = False
        self._num_pending = self._num_fresh = self._num_wanted = 0
        self._fresh_bytes, self._oldest = 0, 0.0
        self._is_first = True
        self._began = self._ended = -1.0
        self._pause_s = 0.0

    def submitted(self, num_bytes: int, now: float) -> bool:
        """Take note of a submission; tell whether ``due`` has to be asked anew."""
        is_idle = self._num_pending == 0
        if self._num_fresh == 0:
            self._oldest = now
        limit = FIRST_BYTES if self._is_first else BYTES
        was_enough = self._fresh_bytes >= limit
        self._num_pending += 1
        self._num_fresh += 1
        self._fresh_bytes += num_bytes
        is_enough = self._fresh_bytes >= limit and not was_enough
        if is_idle or self._num_fresh == 1:  # what is fresh waits for no pause
            return True
        return self.cycle_time_ms is None and (is_enough or self._num_wanted > 0)

    def wanted(self) -> None:
        """Take note that somebody waits for something that is pending."""
        self._num_wanted += 1

    def settled(self, was_wanted: bool) -> None:
        """Take note that something pending has ended."""
        self._num_pending -= 1
        if was_wanted:
            self._num_wanted -= 1
            self._is_first = True

    def due(self, now: float) -> float | None:
        """When the next round is due, now or later; None if there is nothing to come for."""
        if self.is_urgent:
            return now
        if self._num_pending == 0:
            return None
        if self.cycle_time_ms is not None:
            earliest = self._began + self.cycle_time_ms / 1e3
            return max(now, earliest if self._num_fresh else max(earliest, self._ended + self._pause_s))
        if self._num_fresh:
            if self._num_wanted or self._fresh_bytes >= (FIRST_BYTES if self._is_first else BYTES):
                return now
            return max(now, self._oldest + AGE_S)
        pause_s = self._pause_s if self._num_wanted else max(self._pause_s, AGE_S)
        return max(now, self._ended + pause_s)

    def begins(self, now: float) -> None:
        """Take note that a round begins with all that was submitted."""
        self._began = now
        if self._fresh_bytes:
            self._is_first = False
        self._num_fresh, self._fresh_bytes = 0, 0

    def ends(self, now: float, was_fruitful: bool) -> None:
        """Take note of the end of a round: whether it made something ready."""
        self._ended = now
        self._pause_s = 0.0 if was_fruitful else min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
