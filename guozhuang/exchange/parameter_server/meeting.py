"""How workers and servers come together: who takes part, one gloo group of all of them, and word of who was lost.

[Note: two ways] Where `guozhuang run --servers K` started servers, they wait at a store: on one node at one of
their own, with several at the one where ranks meet. Rank 0 of the workers
announces a meeting there; workers have the first ranks of the new group, servers those after them. Where there are none, each
worker serves a share in threads of its own, and the group is that of the workers once more.

Nothing else is sent in that group, so its messages have no order towards those of other groups.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import PeerLost, UsageError, WorldError, explain
from guozhuang.groups.agreement import store_of
from guozhuang.groups.gloo import Crossing, choose_address
from guozhuang.groups.subgroups import timeout_s
from guozhuang.net.door import pass_through
from guozhuang.net.search import own_address
from guozhuang.net.store import connect as connect_store
from guozhuang.net.store import loopback_address
from guozhuang.watch.processes import node_identity
from guozhuang.world.requests import requested_secret, requested_servers

_PAUSES_S = (0.002, 0.05)  # between two looks into a store: the first, and the longest
_PATIENCE_S = 1.0  # for word of the cause, which who noticed it first leaves in the store
_FAILURE = "failure"
_PLACE = "guozhuang servers"  # with several hosts the store is the one where ranks meet


@dataclass(frozen=True)
class Meeting:
    """A group of workers and servers, made.

    Attributes:
        rank: this process in the group.
        num_workers: they have the first ranks.
        servers: rank of each server.
        limit_s: of each wait for another process, in seconds.
        store: of this meeting alone.
        crossing: the connections.
        names: what each rank is called in texts, and where it runs.
    """

    rank: int
    num_workers: int
    servers: Sequence[int]
    limit_s: float
    store: dist.Store
    crossing: Crossing
    names: Sequence[str]

    @property
    def limit(self) -> timedelta:
        """The limit of a wait."""
        return timedelta(seconds=self.limit_s)

    @property
    def serves_too(self) -> bool:
        """Whether the workers are the servers."""
        return self.servers[0] < self.num_workers

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """Begin to send; the returned work keeps the memory until it was waited for."""
        return self.crossing.group.send([tensor], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Begin to receive."""
        return self.crossing.group.recv([tensor], source, tag)

    def leave_word(self, lost: int | None, text: str) -> None:
        """Tell the others why everything ends now, unless somebody did before."""
        with contextlib.suppress(RuntimeError):
            self.store.compare_set(_FAILURE, "", json.dumps([lost, text]))

    def give_up(self, lost: int | None, text: str) -> None:
        """Leave word, and end all connections: whoever waits, here or elsewhere, fails."""
        self.leave_word(lost, text)
        self.crossing.cut()

    def why(self, peer: int, doing: str, error: BaseException) -> WorldError:
        """Return what is to be raised after a wait for a peer failed: the first cause that anybody noticed.

        Args:
            peer: whom this process waited for.
            doing: what for.
            error: what the wait raised.
        """
        word = self._read_word()
        if word is None:
            text = f"{self.names[peer]} {how_lost(error, self.limit_s)}"
            self.leave_word(peer, text)
            word = peer, text
        lost, text = word
        fix = "look at the output of that process for its own error"
        if lost is None:
            fix = "make the same model and take the same steps on all ranks (join() where data is uneven)"
        said = explain(f"{text}; this rank was waiting for {doing}", rank=self.rank, fix=fix)
        if lost is None:
            return WorldError(said)
        return PeerLost(said, rank=lost, pid=None, waiting_in=doing)

    def _read_word(self) -> tuple[int | None, str] | None:
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(RuntimeError):  # whoever kept the store is gone
            while True:
                if self.store.check([_FAILURE]):
                    lost, text = json.loads(self.store.get(_FAILURE))
                    return lost, text
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        return None


def how_lost(error: BaseException, limit_s: float) -> str:
    """Say what became of a process, from what gloo raised."""
    text = str(error)
    if "imed out" in text:
        return f"did not answer within {limit_s:g} s"
    if "losed" in text or "reset" in text.lower() or "Broken pipe" in text:
        return "is gone"
    return f"cannot be heard: {text}"


def num_servers(asked: int | None) -> int:
    """Return how many server processes an exchange is to use; 0: the workers serve.

    Args:
        asked: what the user gave; None: whatever this run has.

    Raises:
        UsageError: it was given and is not what this run has.
    """
    there = requested_servers()
    if asked == 0 or (asked is None and there is None):
        return 0
    num_there = 0 if there is None else there[0]
    if asked is not None and asked != num_there:
        what = f"the exchange asks for {asked} parameter servers, and this run has {num_there}"
        raise UsageError(explain(what, fix=f"start it with `guozhuang run --servers {asked}`, or leave servers out"))
    return num_there


def of_workers(group: dist.ProcessGroup, asked: int | None) -> Meeting | None:
    """Make the group of workers and servers, at a worker. Every rank of ``group`` must call.

    Args:
        group: the workers.
        asked: see :func:`num_servers`.

    Returns:
        The meeting; None where a single worker would serve itself.

    Raises:
        UsageError: see :func:`num_servers`.
        WorldError: somebody did not come within the group's time-out; the text names it.
    """
    rank, size, limit_s = group.rank(), group.size(), timeout_s(group)
    count = num_servers(asked)
    if count == 0 and size == 1:
        return None
    own = store_of(group)
    # Each rank counts in the store, so no process keeps a counter.
    turn = own.add(f"guozhuang/parameter server/turns/{rank}", 1)
    store: dist.Store = dist.PrefixStore(f"guozhuang/parameter server/{turn}", own)
    keeper = ""
    if count:
        there = requested_servers()
        assert there is not None
        outer, keeper = connect(there[1], limit_s), towards(there[1])
        if rank == 0:
            store.set("number", str(announce(outer, size, limit_s)))
        _until(lambda: store.check(["number"]), limit_s, lambda: "rank 0 announced no meeting with the servers", rank)
        store = place_of(outer, int(store.get("number")))
    return join(store, rank, size, count, limit_s, keeper)


def connect(address: str, limit_s: float) -> dist.Store:
    """Come to the store of the servers, through its door where it is on the network and the run has a secret.

    Args:
        address: ``host:port``.
        limit_s: how long to try, in seconds.

    Raises:
        WorldError: nobody answered.
    """
    host, port = host_and_port(address)
    secret = requested_secret()
    if secret and loopback_address(host) is None:
        host, port = pass_through(host, port, secret, limit_s)  # which lasts as long as this process
    try:
        return connect_store(host, port, limit_s)
    except RuntimeError as error:
        what = f"the store of the parameter servers at {address} does not answer: {error}"
        raise WorldError(explain(what, fix="look at the output of `guozhuang run`, which keeps it")) from error


def host_and_port(address: str) -> tuple[str, int]:
    """Take ``host:port`` apart."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def towards(address: str) -> str:
    """The host that keeps the store of the servers, for :func:`join`; "" if that is this machine's loopback."""
    host, _ = host_and_port(address)
    return "" if loopback_address(host) is not None else host


def announce(store: dist.Store, num_workers: int, limit_s: float) -> int:
    """Ask the servers to a new meeting; return its number."""
    number = int(store.add(f"{_PLACE}/announced", 1))
    store.set(f"{_PLACE}/announced/{number}", json.dumps([num_workers, limit_s]))
    return number


def announced(store: dist.Store, number: int) -> tuple[int, float] | None:
    """Return (number of workers, limit in seconds) of a meeting; None before it is announced."""
    if not store.check([f"{_PLACE}/announced/{number}"]):
        return None
    num_workers, limit_s = json.loads(store.get(f"{_PLACE}/announced/{number}"))
    return int(num_workers), float(limit_s)


def place_of(store: dist.Store, number: int) -> dist.Store:
    """Return the part of the servers' store that a meeting has to itself."""
    return dist.PrefixStore(f"{_PLACE}/meeting/{number}", store)


def join(store: dist.Store, rank: int, num_workers: int, count: int, limit_s: float, keeper: str = "") -> Meeting:
    """Take part in a meeting, as a worker or a server; return when all are connected.

    Args:
        store: of this meeting alone.
        rank: of this process among workers and servers.
        num_workers: they have the ranks from 0 on.
        count: server processes; 0: the workers serve.
        limit_s: see :class:`Meeting`.
        keeper: a host of another network address than loopback by which all reach each other, if servers are on other hosts.

    Raises:
        WorldError: somebody did not come; the text names it.
    """
    size = num_workers + count
    store.set(f"here/{rank}", json.dumps([node_identity(), os.getpid()]))
    keys = [f"here/{r}" for r in range(size)]

    def call(other: int) -> str:
        return f"rank {other}" if other < num_workers else f"parameter server {other - num_workers}"

    def missing() -> str:
        late = ", ".join(call(r) for r in range(size) if not store.check([keys[r]]))
        return f"{late} did not come to the meeting of workers and servers"

    _until(lambda: store.check(keys), limit_s, missing, rank)
    told = [json.loads(store.get(key)) for key in keys]
    hosts = [host for host, _ in told]
    names = [f"{call(r)} (process {pid} on {host.split('/')[0]})" for r, (host, pid) in enumerate(told)]
    others = [r for r in range(size) if hosts[r] != hosts[rank]]
    # Ranks that are all on one host were told to use loopback among themselves, which leads to no server elsewhere.
    address = own_address([keeper], []) if keeper else choose_address(dist.PrefixStore("route", store), rank, others)
    try:
        crossing = Crossing(dist.PrefixStore("gloo", store), rank, size, limit_s, address)
    except RuntimeError as error:
        what = f"workers and servers met, but gloo could not connect them: {error}"
        fix = "set GLOO_SOCKET_IFNAME to the network interface that leads to the other hosts"
        raise WorldError(explain(what, rank=rank, fix=fix)) from error
    servers = range(num_workers, size) if count else range(num_workers)
    return Meeting(rank, num_workers, servers, limit_s, store, crossing, names)


def _until(is_so: Callable[[], bool], limit_s: float, why_not: Callable[[], str], rank: int) -> None:
    """Look until something is so. Not a wait of the store: that would keep its connection from other threads."""
    deadline, pause_s = time.monotonic() + limit_s, _PAUSES_S[0]
    while not is_so():
        if time.monotonic() > deadline:
            fix = "look at their own errors; every rank must reach this point"
            raise WorldError(explain(f"{why_not()} within {limit_s:g} s", rank=rank, fix=fix))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S[1])
