"""What the driver and its workers write for each other into the driver's store. See [Note: bytes] in the package."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

from guozhuang.compat.horovod.common.elastic_variables import Place, verdict_key

_PART = "horovod elastic"
_KEPT_ROUNDS = 20  # a worker that waits reads the newest round, and none that is older than its own


class HostUpdateResult(enum.IntFlag):
    """What became of the hosts; both bits: some came and others went."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


@dataclass(frozen=True)
class Round:
    """One round, as the driver announces it.

    Attributes:
        number: counts from 1.
        may_skip_sync: all who are in it hold the same state already.
        places: of each worker that is in it.
        towards: for hosts whose ranks reach others over a network, an address of the driver's host as seen from there.
        updated: the time stamp of the newest ``Update`` that this round is the answer to.
    """

    number: int
    may_skip_sync: bool
    places: Mapping[int, Place]
    towards: Mapping[int, str]
    updated: float


@dataclass(frozen=True)
class Update:
    """Hosts came or went; a new round is to be had by who comes for it.

    Attributes:
        timestamp: in seconds since the epoch, rising.
        result: what became of the hosts.
    """

    timestamp: float
    result: HostUpdateResult


@dataclass(frozen=True)
class News:
    """What a waiting worker sees.

    Attributes:
        newest: the number of the newest round; 0: none yet.
        over: why no round will come any more; "": one may.
        beat: changes as long as the driver is at work.
    """

    newest: int
    over: str
    beat: int


class DriverBoard:
    """The driver's side.

    Args:
        store: of this process.
    """

    def __init__(self, store: dist.Store) -> None:
        self._whole, self._store = store, dist.PrefixStore(_PART, store)
        self._num_seen = 0
        self._beat = 0
        self._updated = 0.0
        for name, value in (("newest", "0"), ("over", ""), ("beat", "0")):
            self._store.set(name, value)

    def beat(self) -> None:
        """Say that the driver is at work."""
        self._beat += 1
        self._store.set("beat", str(self._beat))

    def announce(
        self, number: int, may_skip_sync: bool, places: Mapping[int, Place], towards: Mapping[int, str]
    ) -> None:
        """Begin a round."""
        told = Round(number, may_skip_sync, places, towards, self._updated)
        old = number - _KEPT_ROUNDS
        for name in (f"round/{old}", f"lost/{old}"):
            self._store.delete_key(name)
        self._whole.delete_key(verdict_key(old))
        self._store.set(f"round/{number}", json.dumps(asdict(told)))
        self._store.set("newest", str(number))

    def give_up(self, number: int, why: str) -> None:
        """A worker of a round is gone: nobody is to wait for it any more, in a collective or for it to come into the round."""
        self._store.set(f"lost/{number}", why)
        self._whole.set(verdict_key(number), why)

    def forget(self, worker: int) -> None:
        """A worker has ended; nobody reads any more what it wrote."""
        self._store.delete_key(f"waiting/{worker}")

    def update(self, result: HostUpdateResult, timestamp: float) -> None:
        """Tell the running workers that hosts came or went."""
        self._updated = max(timestamp, self._updated + 1e-3)
        self._store.set("update", json.dumps([self._updated, int(result)]))

    def dismiss(self, why: str) -> None:
        """No further round will come."""
        self._store.set("over", why)

    def arrivals(self, running: list[int]) -> dict[int, tuple[int, bool, bool, bool]]:
        """Who came to wait since the last call: what each gave to ``come``.

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
                after, *told = json.loads(self._store.get(f"waiting/{worker}"))
                may_skip_sync, has_state, has_entered = map(bool, told)
                found[worker] = (int(after), may_skip_sync, has_state, has_entered)
        return found


class WorkerBoard:
    """A worker's side. Calls wait for an answer of the driver's process without a limit: let a thread make them.

    Args:
        store: the driver's.
        worker: the number of this worker.
    """

    def __init__(self, store: dist.Store, worker: int) -> None:
        self._store, self._worker = dist.PrefixStore(_PART, store), worker

    def come(self, after: int, may_skip_sync: bool, has_state: bool, has_entered: bool) -> None:
        """Wait from now on for the round that follows ``after``; the others as in ``Membership``."""
        self._store.set(f"waiting/{self._worker}", json.dumps([after, may_skip_sync, has_state, has_entered]))
        self._store.add("arrivals", 1)

    def news(self) -> News:
        """How things stand."""
        newest, over, beat = (value.decode() for value in self._store.multi_get(["newest", "over", "beat"]))
        return News(int(newest), over, int(beat))

    def round(self, number: int) -> Round:
        """A round that was announced."""
        told = json.loads(self._store.get(f"round/{number}"))
        places = {int(worker): Place(**place) for worker, place in told["places"].items()}
        towards = {int(worker): str(address) for worker, address in told["towards"].items()}
        return Round(int(told["number"]), bool(told["may_skip_sync"]), places, towards, float(told["updated"]))

    def lost(self, number: int) -> str:
        """Which worker of a round is gone, and how it ended; "" as long as none is."""
        key = f"lost/{number}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def update(self) -> Update | None:
        """The newest change of hosts; None as long as there was none."""
        if not self._store.check(["update"]):
            return None
        timestamp, result = json.loads(self._store.get("update"))
        return Update(float(timestamp), HostUpdateResult(int(result)))
