"""What is active at one moment shares cores and links.

[Note: sharing] Cores of a node, its network cards in each direction and the link inside it have fixed rates. Whatever is
active at one moment shares them max-min fairly: who needs less than an equal share gets what it needs, and the rest is divided
equally among the others, thread by thread, as the scheduler of an operating system does. A collective needs processor time on
its ranks and bytes of the links, one after the other for each segment: while cores are crowded its work takes longer, and the
link is idle meanwhile (see :func:`partly_hidden`). What computes gets the cores that transfers leave. On crowded cores who
receives a small message waits for its turn first: a transfer takes at least ``_TURN_S`` for each message and for each thread
too many on a core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: What is shared, and where: ``(CORES, host)``, or a link of a node in one direction, whose capacity counts as 1.
Resource = tuple[str, int]
CORES = "cores"
_TURN_S = 0.45e-3  # of an all-reduce of 4 KiB to 512 KiB among 4 ranks on 2 cores: 12 messages, 4.6 to 6.0 ms
_HIDING = 1.15  # 1: nothing is hidden; infinite: the smaller is


@dataclass(eq=False)
class ActivePiece:
    """Something that progresses: a piece of work, or the transfer of a collective. ``left`` is in seconds of it alone."""

    left: float
    needs: dict[Resource, tuple[float, float]]  # of a transfer, by resource: its use at full speed, by how many threads
    done: Callable[[], None]
    host: int = -1  # of a piece of work
    threads: float = 0.0  # that compute; of a transfer 0
    messages: float = 0.0  # of a transfer: those that a rank sends one after another, in each second of it alone
    rate: float = 0.0


class Active:
    """Everything that progresses at this moment.

    Args:
        cores: of each host; infinite if they do not limit.
        crowding: as for :func:`guozhuang.cost.simulate.simulate`.
    """

    def __init__(self, cores: float, crowding: Sequence[float]) -> None:
        self._cores, self._crowding = cores, crowding
        self._tasks: dict[ActivePiece, None] = {}
        self._ended: list[ActivePiece] = []
        self._changed = False

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def add(self, task: ActivePiece) -> None:
        """Begin something."""
        self._tasks[task] = None
        self._changed = True

    def pass_time(self) -> float:
        """Go on to the next moment at which something ends, and return the seconds until then."""
        if self._changed:
            self._share()
        # Transfers may take all cores of a host for a while; work that has none then waits.
        passed = min(task.left / task.rate for task in self._tasks if task.rate > 0.0)
        for task in self._tasks:
            task.left -= passed * task.rate
        self._ended = [task for task in self._tasks if task.left <= 1e-12]
        for task in self._ended:
            del self._tasks[task]
        self._changed = bool(self._ended)
        return passed

    def take_ended(self) -> list[Callable[[], None]]:
        """Return what is to be done about what has just ended."""
        return [task.done for task in self._ended]

    def _share(self) -> None:
        """Set the speed of everything that is active; see [Note: sharing]."""
        computing: dict[int, float] = {}
        for task in self._tasks:
            if task.threads:
                computing[task.host] = computing.get(task.host, 0.0) + task.threads
        users: dict[Resource, list[tuple[float, float]]] = {}
        runnable = dict(computing)
        transfers = [task for task in self._tasks if task.needs]
        for task in transfers:
            for resource, (use, threads) in task.needs.items():
                if resource[0] == CORES:
                    runnable[resource[1]] = runnable.get(resource[1], 0.0) + threads
                else:
                    users.setdefault(resource, []).append((use, threads))
        levels = {resource: _level(1.0, wanted) for resource, wanted in users.items()}
        left = dict.fromkeys(runnable, self._cores)
        for task in transfers:
            link, link_alone, work, work_alone = 0.0, 0.0, 0.0, 0.0
            for resource, (use, threads) in task.needs.items():
                if resource[0] == CORES:
                    a_thread = use / threads
                    work_alone = max(work_alone, a_thread)
                    work = max(work, a_thread / min(1.0, self._cores / runnable[resource[1]]))
                else:
                    link_alone, link = max(link_alone, use), max(link, use / min(1.0, levels[resource] * threads / use))
            alone = partly_hidden(link_alone, work_alone)
            hosts = [resource[1] for resource in task.needs if resource[0] == CORES]
            excess = max((runnable[host] / self._cores - 1.0 for host in hosts), default=0.0)
            stretched = max(0.0, 1.0 - alone) + partly_hidden(link, work) / max(1.0, alone)
            task.rate = 1.0 / max(stretched, task.messages * _TURN_S * excess)
            for resource, (use, _) in task.needs.items():
                if resource[0] == CORES:
                    left[resource[1]] -= use * task.rate
        for task in self._tasks:
            if task.threads:
                share = min(1.0, max(left[task.host], 0.0) / computing[task.host])
                task.rate = share / self._slowness(computing[task.host])
            elif not task.needs:
                task.rate = 1.0

    def _slowness(self, computing: float) -> float:
        """How many times the processor time that a piece of work takes while so many threads compute."""
        if not self._crowding:
            return 1.0
        last = len(self._crowding)
        if computing >= last:
            return self._crowding[-1] / max(1.0, last / self._cores)
        below = max(1, int(computing))
        at = [self._crowding[n - 1] / max(1.0, n / self._cores) for n in (below, below + 1)]
        return max(1.0, at[0] + (at[1] - at[0]) * (computing - below))


def partly_hidden(link: float, work: float) -> float:
    """Return the time of a transfer whose bytes take so long on the link, and so long on the cores.

    Between the larger of the two, if one hides behind the other, and their sum, if they alternate. Gloo has two segments under
    way at a time, but the ranks of a ring wait for each other at every segment. With 2 to 4 ranks on 2 cores, and links of 100
    Mbit/s to 10 Gbit/s, the best exponents were between 1 and 1.5.
    """
    return float((link**_HIDING + work**_HIDING) ** (1 / _HIDING))


def _level(capacity: float, wanted: list[tuple[float, float]]) -> float:
    """Return what each thread may use at most, so that together they use no more than the capacity.

    Args:
        capacity: the rate of the resource.
        wanted: what each task would use, and the number of its threads.
    """
    if sum(use for use, _ in wanted) <= capacity:
        return math.inf
    left, threads = capacity, sum(number for _, number in wanted)
    for use, number in sorted(wanted, key=lambda one: one[0] / one[1]):
        if use * threads > left * number:
            return left / threads
        left -= use
        threads -= number
    return math.inf
