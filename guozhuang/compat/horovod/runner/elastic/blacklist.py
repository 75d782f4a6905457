"""Hosts on which a worker failed: for ever, or for a while that doubles with each failure. Pure: the clock is an argument."""

from __future__ import annotations

import math


class Blacklist:
    """Which hosts get no workers.

    Args:
        cooldown_range: the least and the most seconds for which a host is left alone; None: for ever.
    """

    def __init__(self, cooldown_range: tuple[float, float] | None = None) -> None:
        self._range = cooldown_range
        self._counts: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def add(self, host: str, now: float) -> float:
        """Put a host on it. Failures of a host that is on it already, as of other workers there, are the same failure.

        Args:
            host: its name.
            now: by the clock that all calls use, in seconds.

        Returns:
            For how many seconds from now; infinite without a range.
        """
        if not self.holds(host, now):
            self._counts[host] = self._counts.get(host, 0) + 1
            self._until[host] = now + self._cooldown_s(self._counts[host])
        return self._until[host] - now

    def holds(self, host: str, now: float) -> bool:
        """Whether it is on it."""
        return now < self._until.get(host, -math.inf)

    def was_added(self, host: str) -> bool:
        """Whether it was ever put on it."""
        return host in self._until

    def is_for_ever(self, host: str) -> bool:
        """Whether it never comes back."""
        return self._until.get(host, -math.inf) == math.inf

    def _cooldown_s(self, count: int) -> float:
        if self._range is None:
            return math.inf
        least, most = self._range
        return min(float(most), least * 2.0 ** min(count - 1, 60))
