"""The hosts that get no workers because one failed there, for ever or for a time that doubles with each failure. Pure."""

from __future__ import annotations

import math


class Blacklist:
    """The hosts that get no workers at present. It reads no clock: each call gets the time.

    Args:
        cooldown_range: the least and the most seconds for which a host gets no workers; None: for ever.
    """

    def __init__(self, cooldown_range: tuple[float, float] | None = None) -> None:
        self._range = cooldown_range
        self._counts: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def add(self, host: str, now: float) -> float:
        """Blacklist a host on which a worker failed. Further failures count only after its time on the list has passed.

        Args:
            host: its name.
            now: the present time in seconds, by one clock for all calls.

        Returns:
            The seconds from now for which the host stays blacklisted; infinite without a cooldown range.
        """
        if not self.holds(host, now):
            self._counts[host] = self._counts.get(host, 0) + 1
            self._until[host] = now + self._cooldown_s(self._counts[host])
        return self._until[host] - now

    def holds(self, host: str, now: float) -> bool:
        """Return whether a host is blacklisted at the time ``now``."""
        return now < self._until.get(host, -math.inf)

    def was_added(self, host: str) -> bool:
        """Return whether a host was ever blacklisted."""
        return host in self._until

    def is_for_ever(self, host: str) -> bool:
        """Return whether a host is blacklisted for the rest of the run."""
        return self._until.get(host, -math.inf) == math.inf

    def _cooldown_s(self, count: int) -> float:
        if self._range is None:
            return math.inf
        least, most = self._range
        return min(float(most), least * 2.0 ** min(count - 1, 60))
