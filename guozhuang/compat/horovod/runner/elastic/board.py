"""Messages between the driver of an elastic run and its workers, in the driver's store. See [Note: bytes] in the package."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from guozhuang.compat.horovod.common.elastic_variables import verdict_key
from guozhuang.net.client import PatientStore

_PART = "horovod elastic"
_KEPT_ROUNDS = 20  # older rounds are deleted from the store: a waiting worker reads only the newest one


class HostUpdateResult(enum.IntFlag):
    """The kind of a change of the hosts; both bits are set if some hosts were added and others removed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


@dataclass(frozen=True)
class Round:
    """A round of an elastic run, as the driver announces it: its workers in the order of their ranks.

    Attributes:
        number: counts rounds from 1.
        may_skip_sync: all its workers hold the same state already, so none needs to be sent.
        workers: for each host, the numbers of its workers in the order of their ranks, which are consecutive.
        towards: for each host, the address by which it reaches the driver's host; "" if all workers are on one machine.
        updated: the time stamp of the newest ``Update`` that this round takes into account.
    """

    number: int
    may_skip_sync: bool
    workers: Sequence[Sequence[int]]
    towards: Sequence[str]
    updated: float

    def place_of(self, worker: int) -> tuple[int, int] | None:
        """Return the index of a worker's host and its local rank; None if the worker is not in this round."""
        found = ((node, each.index(worker)) for node, each in enumerate(self.workers) if worker in each)
        return next(found, None)


@dataclass(frozen=True)
class Update:
    """The driver's notice that hosts were added or removed: workers that ask for a new round will get one.

    Attributes:
        timestamp: seconds since the epoch; each notice has a larger one than the last.
        result: how the set of hosts changed.
    """

    timestamp: float
    result: HostUpdateResult


@dataclass(frozen=True)
class News:
    """The driver's status, which a worker polls in the store while it waits for a round.

    Attributes:
        newest: the number of the newest round; 0: none yet.
        over: the reason why no further round will begin; "" while one may.
        beat: the driver's heartbeat, a count that rises as long as the driver works.
    """

    newest: int
    over: str
    beat: int


class DriverBoard:
    """Writes the driver's messages into its store, and reads those that workers left there.

    Args:
        store: the store that the driver's process serves.
    """

    def __init__(self, store: dist.Store) -> None:
        self._whole, self._store = store, dist.PrefixStore(_PART, store)
        self._num_seen = 0
        self._beat = 0
        self._updated = 0.0
        for name, value in (("newest", "0"), ("over", ""), ("beat", "0")):
            self._store.set(name, value)

    def beat(self) -> None:
        """Write a heartbeat, by which workers see that the driver still works."""
        self._beat += 1
        self._store.set("beat", str(self._beat))

    def announce(
        self, number: int, may_skip_sync: bool, workers: Sequence[Sequence[int]], towards: Sequence[str]
    ) -> None:
        """Begin a round by writing it to the store, where its workers wait for it; ``Round`` describes the arguments."""
        announced = Round(number, may_skip_sync, workers, towards, self._updated)
        old = number - _KEPT_ROUNDS
        for name in (f"round/{old}", f"lost/{old}"):
            self._store.delete_key(name)
        self._whole.delete_key(verdict_key(old))
        self._store.set(f"round/{number}", json.dumps(asdict(announced)))
        self._store.set("newest", str(number))

    def give_up(self, number: int, why: str) -> None:
        """Report to the ranks of a round that one of its workers is gone, so that none waits for that worker any longer."""
        self._store.set(f"lost/{number}", why)
        self._whole.set(verdict_key(number), why)

    def forget(self, worker: int) -> None:
        """Delete the message that a worker, which has ended, left in the store."""
        self._store.delete_key(f"waiting/{worker}")

    def update(self, result: HostUpdateResult, timestamp: float) -> None:
        """Notify the running workers that hosts were added or removed."""
        self._updated = max(timestamp, self._updated + 1e-3)
        self._store.set("update", json.dumps([self._updated, int(result)]))

    def dismiss(self, why: str) -> None:
        """Report to waiting workers the reason why no further round will begin."""
        self._store.set("over", why)

    def arrivals(self, running: list[int]) -> dict[int, tuple[int, bool, bool, bool]]:
        """Return, by worker number, the arguments of ``WorkerBoard.come``; empty if no worker called it since the last look.

        Args:
            running: the workers to look for.
        """
        num = self._store.add("arrivals", 0)
        if num == self._num_seen:
            return {}
        self._num_seen = num
        found = {}
        for worker in running:
            if self._store.check([f"waiting/{worker}"]):
                after, *flags = json.loads(self._store.get(f"waiting/{worker}"))
                may_skip_sync, has_state, has_entered = map(bool, flags)
                found[worker] = (int(after), may_skip_sync, has_state, has_entered)
        return found


class WorkerBoard:
    """Reads and writes a worker's messages in the driver's store. Methods raise RuntimeError if the store is gone or silent.

    Args:
        store: the connection to the driver's store.
        worker: the number of this worker.
    """

    def __init__(self, store: PatientStore, worker: int) -> None:
        self._store, self._worker = store.within(_PART), worker

    def come(self, after: int, may_skip_sync: bool, has_state: bool, has_entered: bool) -> None:
        """Report that this worker waits for the round that follows ``after``; see ``Membership`` for the other arguments."""
        self._store.set(f"waiting/{self._worker}", json.dumps([after, may_skip_sync, has_state, has_entered]))
        self._store.add("arrivals", 1)

    def news(self) -> News:
        """Read the newest round's number, whether the job is over, and the driver's heartbeat."""
        newest, over, beat = (value.decode() for value in self._store.multi_get(["newest", "over", "beat"]))
        return News(int(newest), over, int(beat))

    def round(self, number: int) -> Round:
        """Read the round ``number``, which the driver has announced."""
        return Round(**json.loads(self._store.get(f"round/{number}")))

    def lost(self, number: int) -> str:
        """Read which worker of a round is gone, and how it ended; "" as long as none is."""
        key = f"lost/{number}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def update(self) -> Update | None:
        """Read the driver's newest notice of changed hosts; None if there was none yet."""
        if not self._store.check(["update"]):
            return None
        timestamp, result = json.loads(self._store.get("update"))
        return Update(float(timestamp), HostUpdateResult(int(result)))
