"""What workers and parameter servers send each other: typed messages, and the gloo group in which they travel.

[Note: messages] A worker sends a header with tag ``HEADER``, and its payload, if it has one, with tag ``PAYLOAD``; gloo keeps
the order of messages of one tag between two processes, so the n-th payload belongs to the n-th header that announces one.
The answer to a message about part i comes with tag ``REPLY + i``, and the worker waits there before it asks: answers come in
any order, and none waits for another one.

[Note: numbers of steps] A worker counts its steps from the last time that all agreed, and sends the count with its changes: it
is the same for all parts of a step. If each part counted by itself, parts would take a worker that comes back from a rest for
faster or slower than it is, some this, some that, and two workers would wait for each other for ever. Such a worker asks one
part where the slowest other one is, and counts on from there.

[Note: two kinds of servers] Where ``guozhuang run --servers K`` started servers, they wait at a store: on one node at a store
of their own, with several nodes at the one where ranks meet. Rank 0 of the workers announces a new group there; workers have
its first ranks, servers those after them. Without such servers each worker serves a share in threads of its own, and the group
is that of the workers once more. Nothing else is sent in the group, so its messages have no order towards those of others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PeerLost, WorldError, explain
from ...groups.gloo import Crossing, choose_address
from ...net.meet import WorldStore, open_store
from ...net.meeting_point import MeetingPoint
from ...net.search import own_address
from ...net.store import loopback_address
from ...watch.processes import node_identity
from ...world.requests import requested_secret

HEADER, PAYLOAD, REPLY = 0, 1, 2
_WORDS = 6
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)
_PAUSES_S = (0.002, 0.05)  # between two looks into a store: the first, and the longest
_PATIENCE_S = 1.0  # for the first cause, which the process that noticed it writes into the store
_FAILURE = "failure"
_PREFIX = "guozhuang servers"  # with several hosts the store is the one where ranks meet


class Opcode(enum.IntEnum):
    """What a message asks for."""

    SUM = 1  # add to the sum of this step; answered when all workers have
    SEED = 2  # the weights begin with those of worker 0; answered when all workers have asked
    DELTA = 3  # add to the weights at once; answered with them, when the others are near enough
    AGREE = 4  # add to the weights; answered with them when all workers have asked
    GOODBYE = 5  # nothing more will come
    REST = 6  # no step will come for a while; answered with the weights at once
    JOIN = 7  # a step will come after a rest; answered at once with the number of the slowest active worker's last step, int64


@dataclass(frozen=True, slots=True)
class ServerMessage:
    """A header.

    Attributes:
        opcode: what is asked for.
        layout: which layout the part is of; workers count them alike.
        part: index in the layout.
        number: the step of a sum or delta; the bound of staleness of a seed.
        dtype: of the part.
        num_elements: of the part.
        has_payload: whether values follow; a worker that has nothing to add sends none.
    """

    opcode: Opcode
    layout: int = 0
    part: int = 0
    number: int = 0
    dtype: torch.dtype = torch.float32
    num_elements: int = 0
    has_payload: bool = False

    def encode(self) -> Tensor:
        """Return the header as it travels."""
        extent = 2 * self.num_elements + self.has_payload
        words = (self.opcode, self.layout, self.part, self.number, _DTYPES.index(self.dtype), extent)
        return torch.tensor(words, dtype=torch.int64)

    @classmethod
    def decode(cls, header: Tensor) -> ServerMessage:
        """Read a header.

        Raises:
            WorldError: it is none of ours.
        """
        opcode, layout, part, number, dtype, extent = header.tolist()
        if opcode not in Opcode.__members__.values() or not 0 <= dtype < len(_DTYPES) or extent < 0:
            what = "a worker sent what is no message to a parameter server"
            raise WorldError(explain(what, value=header.tolist(), fix="run the same version on all hosts"))
        return cls(Opcode(opcode), layout, part, number, _DTYPES[dtype], extent // 2, bool(extent % 2))

    def __str__(self) -> str:
        """Say it in words."""
        what = {Opcode.SUM: f"the sum of step {self.number}", Opcode.SEED: "the first weights", Opcode.DELTA: "weights"}
        return f"{what.get(self.opcode, 'the agreed weights')} of part {self.part}"


def empty_header() -> Tensor:
    """Make room for a header."""
    return torch.empty(_WORDS, dtype=torch.int64)


def wire(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous CPU tensor: gloo does not know all dtypes."""
    return tensor.view(-1).view(torch.uint8)


# ---- in the store


class _Entry:
    """A dataclass that stands in a store as JSON."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.astuple(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return cls(*json.loads(text))


@dataclass(frozen=True)
class Announcement(_Entry):
    """A new group to which workers call the servers: how many workers, and the limit of waits in it, in seconds."""

    num_workers: int
    limit_s: float


@dataclass(frozen=True)
class _Presence(_Entry):
    """A process that has come: its host identity and its process number."""

    host: str
    pid: int


@dataclass(frozen=True)
class _FirstCause(_Entry):
    """Why a group ended: the rank that was lost, or None, and a text."""

    lost: int | None
    text: str


def address_of(address: str) -> MeetingPoint:
    """Return where the store of the servers is, from ``host:port``."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    is_here = loopback_address(host) is not None
    return MeetingPoint(host, int(port), secret=requested_secret(), is_loopback_meant=is_here)


def keep(address: str, limit_s: float) -> WorldStore:
    """Keep the store of the servers at ``host:port`` of this host, behind a door if it is on the network and there is a secret.

    Raises:
        UsageError: one cannot listen there.
    """
    return open_store(address_of(address), 0, limit_s, is_one_node=True)


def connect(address: str, limit_s: float) -> dist.Store:
    """Connect to the store of the servers, through its door where it is on the network and the run has a secret.

    Args:
        address: ``host:port``.
        limit_s: how long to try, in seconds.

    Raises:
        WorldError: nobody answered.
    """
    try:
        return open_store(
            address_of(address), 1, limit_s, says=False
        ).store  # its passage lasts as long as this process
    except (WorldError, RuntimeError) as error:
        what = f"the store of the parameter servers at {address} does not answer: {error}"
        raise WorldError(explain(what, fix="look at the output of `guozhuang run`, which keeps it")) from error


def announce(store: dist.Store, announcement: Announcement) -> int:
    """Call the servers to a new group; return its number."""
    number = int(store.add(f"{_PREFIX}/announced", 1))
    store.set(f"{_PREFIX}/announced/{number}", announcement.to_json())
    return number


def announced(store: dist.Store, number: int) -> Announcement | None:
    """Return the announcement of a group; None before there is one."""
    key = f"{_PREFIX}/announced/{number}"
    return Announcement.from_json(store.get(key)) if store.check([key]) else None


def store_of_group(store: dist.Store, number: int) -> dist.Store:
    """Return the part of the servers' store that a group has to itself."""
    return dist.PrefixStore(f"{_PREFIX}/meeting/{number}", store)


# ---- the group


@dataclass(frozen=True)
class ServerGroup:
    """Workers and servers that are connected.

    Attributes:
        rank: this process in the group.
        num_workers: they have the first ranks.
        servers: rank of each server.
        limit_s: of each wait for another process, in seconds.
        store: of this group alone.
        crossing: the connections.
        names: of each rank in texts, with its process and host.
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
    def workers_serve(self) -> bool:
        """Whether the workers are the servers."""
        return self.servers[0] < self.num_workers

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """Begin to send; the returned work keeps the memory until it was waited for."""
        return self.crossing.group.send([tensor], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Begin to receive."""
        return self.crossing.group.recv([tensor], source, tag)

    def _report(self, cause: _FirstCause) -> None:
        with contextlib.suppress(RuntimeError):  # the process that kept the store is gone
            self.store.compare_set(_FAILURE, "", cause.to_json())  # unless another process did before

    def abort(self, lost: int | None, text: str) -> None:
        """Report a cause, and end all connections: every wait of the group, here and elsewhere, fails."""
        self._report(_FirstCause(lost, text))
        self.crossing.cut()

    def error_of(self, peer: int, doing: str, error: BaseException) -> WorldError:
        """Return the error to raise after a wait for a peer failed: the first cause that any process reported.

        Args:
            peer: for which this process waited.
            doing: the purpose of the wait.
            error: raised by the wait.
        """
        cause = self._first_cause()
        if cause is None:
            cause = _FirstCause(peer, f"{self.names[peer]} {how_lost(error, self.limit_s)}")
            self._report(cause)
        fix = "look at the output of that process for its own error"
        if cause.lost is None:
            fix = "make the same model and take the same steps on all ranks (join() where data is uneven)"
        text = explain(f"{cause.text}; this rank was waiting for {doing}", rank=self.rank, fix=fix)
        return WorldError(text) if cause.lost is None else PeerLost(text, rank=cause.lost, pid=None, waiting_in=doing)

    def _first_cause(self) -> _FirstCause | None:
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(RuntimeError):
            while not self.store.check([_FAILURE]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.02)
            return _FirstCause.from_json(self.store.get(_FAILURE))
        return None


def how_lost(error: BaseException, limit_s: float) -> str:
    """Say what became of a process, from the error that gloo raised."""
    text = str(error)
    if "imed out" in text:
        return f"did not answer within {limit_s:g} s"
    if "losed" in text or "reset" in text.lower() or "Broken pipe" in text:
        return "is gone"
    return f"cannot be heard: {text}"


def join(store: dist.Store, rank: int, num_workers: int, count: int, limit_s: float, keeper: str = "") -> ServerGroup:
    """Join a group, as a worker or a server; return when all are connected.

    Args:
        store: of this group alone.
        rank: of this process among workers and servers.
        num_workers: they have the ranks from 0 on.
        count: server processes; 0: the workers serve.
        limit_s: see :class:`ServerGroup`.
        keeper: the host that keeps the servers' store, if that may be another one than this.

    Raises:
        WorldError: a process did not come; the text names it.
    """
    size = num_workers + count
    store.set(f"here/{rank}", _Presence(node_identity(), os.getpid()).to_json())
    keys = [f"here/{r}" for r in range(size)]

    def name(other: int) -> str:
        return f"rank {other}" if other < num_workers else f"parameter server {other - num_workers}"

    def missing() -> str:
        late = ", ".join(name(r) for r in range(size) if not store.check([keys[r]]))
        return f"{late} did not come to the meeting of workers and servers"

    wait_until(lambda: store.check(keys), limit_s, missing, rank)
    present = [_Presence.from_json(store.get(key)) for key in keys]
    names = [f"{name(r)} (process {each.pid} on {each.host.split('/')[0]})" for r, each in enumerate(present)]
    others = [r for r in range(size) if present[r].host != present[rank].host]
    # Ranks that are all on one host were told to use loopback among themselves, which leads to no server elsewhere.
    is_remote = keeper and loopback_address(keeper) is None
    address = own_address([keeper], []) if is_remote else choose_address(dist.PrefixStore("route", store), rank, others)
    try:
        crossing = Crossing(dist.PrefixStore("gloo", store), rank, size, limit_s, address)
    except RuntimeError as error:
        what = f"workers and servers met, but gloo could not connect them: {error}"
        fix = "set GLOO_SOCKET_IFNAME to the network interface that leads to the other hosts"
        raise WorldError(explain(what, rank=rank, fix=fix)) from error
    servers = range(num_workers, size) if count else range(num_workers)
    return ServerGroup(rank, num_workers, servers, limit_s, store, crossing, names)


def wait_until(is_so: Callable[[], bool], limit_s: float, why_not: Callable[[], str], rank: int) -> None:
    """Look until a condition holds. A wait of the store itself would keep its connection from other threads.

    Raises:
        WorldError: it does not hold within the limit; ``why_not`` is called for the text.
    """
    deadline, pause_s = time.monotonic() + limit_s, _PAUSES_S[0]
    while not is_so():
        if time.monotonic() > deadline:
            fix = "look at their own errors; every rank must reach this point"
            raise WorldError(explain(f"{why_not()} within {limit_s:g} s", rank=rank, fix=fix))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S[1])
