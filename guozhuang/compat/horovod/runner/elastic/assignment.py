"""Chooses the slots of hosts that get workers, and the rank of each; keeps hosts where a worker failed on a blacklist. Pure.

Survivors of the last round keep their order. They get lower ranks than new workers on their host, and their hosts lower ranks
than hosts without survivors. So rank 0, whose state all ranks take over, is a survivor if there is one. The ranks of a host are
consecutive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostSlot:
    """A slot of a host, in which one worker can run.

    Attributes:
        host: the name of the host.
        index: the number of the slot on its host, from 0; not the local rank, which may change from round to round.
    """

    host: str
    index: int


def choose(hosts: Mapping[str, int], living: Sequence[HostSlot], max_np: int | None) -> list[HostSlot]:
    """Return the slots that shall have workers, in the order of their ranks.

    Args:
        hosts: the number of slots of each usable host, in the order in which the hosts were found.
        living: slots whose workers are alive, in the order of their ranks.
        max_np: the largest number of workers; None: one in each slot.
    """
    limit = sum(hosts.values()) if max_np is None else max_np
    kept = [slot for slot in living if slot.index < hosts.get(slot.host, 0)][:limit]
    order = list(dict.fromkeys([*(slot.host for slot in kept), *hosts]))
    taken = set(kept)
    free = [slot for host in order for index in range(hosts[host]) if (slot := HostSlot(host, index)) not in taken]
    free = free[: limit - len(kept)]
    return [slot for host in order for slot in (*kept, *free) if slot.host == host]


class Blacklist:
    """The hosts that get no workers because one failed there, for ever or for a time that doubles with each failure.

    It reads no clock: each call gets the time.

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
