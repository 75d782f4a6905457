"""The protocol between workers and parameter servers: typed messages, and the gloo group in which they are sent.

[Note: messages] A worker sends a header with tag ``HEADER``, and its payload, if it has one, with tag ``PAYLOAD``; gloo keeps
the order of messages of one tag between two processes, so the n-th payload belongs to the n-th header that announces one.
The answer to a message about part i has tag ``REPLY + i``, and the worker posts the receive before it sends the message, so
answers may arrive in any order and none blocks another one. A server of its own answers GOODBYE by a byte of tag ``LIFELINE``.

[Note: numbers of steps] A worker counts its steps from the last ``agree`` of all workers, and sends this number with its
changes, the same for all parts of a step. If each part counted messages by itself, parts could disagree about how far a worker
is that returns from a rest, and two workers would wait for each other for ever. Such a worker asks one part for the step number
of the slowest other worker, and continues counting from there.

[Note: two kinds of servers] If ``guozhuang run --servers K`` started servers, they wait at a store: on one node at a store of
their own, with several nodes at the store where the ranks meet. Rank 0 of the workers announces a new group there; workers have
the first ranks of the group, servers the ranks after them. Without such servers each worker serves a share of the parts in its
own threads, and the group consists of the workers. Nothing else is sent in the group, so its messages need no order relative to
other collectives.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PeerLost, WorldError, explain
from ...groups import roll_call
from ...groups.gloo import Crossing, choose_address
from ...net.client import Client, PatientStore
from ...net.interfaces import is_about_interfaces, own_address
from ...net.meet import WorldStore, open_store
from ...net.meeting_point import MeetingPoint
from ...net.store import loopback_address
from ...watch.processes import Process, node_identity, this_process
from ...world.requests import requested_secret

HEADER, PAYLOAD, LIFELINE, REPLY = 0, 1, 2, 3
_WORDS = 6
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)
_PATIENCE_S = 1.0  # how long to wait until the process that first noticed a failure has written its cause to the store
_ANSWER_S = 2.0  # how long the store may take to answer: the report of a cause must not delay the end of a group
_FAILURE = "failure"
# Prefix of keys, because with several hosts the ranks use the same store. The number counts changes of the protocol: servers of
# another version do not meet the workers.
_PREFIX = "guozhuang servers 2"


class Opcode(enum.IntEnum):
    """The operation that a message requests."""

    SUM = 1  # add the payload to the sum of this step; answered with the sum when all workers have sent theirs
    SEED = 2  # set the weights to those of worker 0; answered with them when all workers have sent this
    DELTA = 3  # add the payload to the weights at once; answered with them when slower workers are near enough
    AGREE = 4  # add the payload to the weights; answered with them when all workers have sent this
    GOODBYE = 5  # this worker will send no more messages; answered by servers of their own, with one byte
    REST = 6  # this worker will make no step for a while; answered with the weights at once
    JOIN = 7  # this worker makes steps again after REST; answered at once with the slowest worker's step number, int64


@dataclass(frozen=True, slots=True)
class ServerMessage:
    """The header of a message to a server.

    Attributes:
        opcode: the requested operation.
        layout: the number of the bucket layout to which the part belongs, counted alike by all workers.
        part: index of the part in the layout.
        number: for SUM and DELTA the step number; for SEED the staleness bound in steps.
        dtype: dtype of the part.
        num_elements: number of elements of the part.
        has_payload: whether a payload follows; a worker that has nothing to add sends none.
    """

    opcode: Opcode
    layout: int = 0
    part: int = 0
    number: int = 0
    dtype: torch.dtype = torch.float32
    num_elements: int = 0
    has_payload: bool = False

    def encode(self) -> Tensor:
        """Return the header as an int64 tensor, in the form in which it is sent."""
        extent = 2 * self.num_elements + self.has_payload
        words = (self.opcode, self.layout, self.part, self.number, _DTYPES.index(self.dtype), extent)
        return torch.tensor(words, dtype=torch.int64)

    @classmethod
    def decode(cls, header: Tensor) -> ServerMessage:
        """Return the message of a received header.

        Raises:
            WorldError: the tensor is no valid header.
        """
        opcode, layout, part, number, dtype, extent = header.tolist()
        if opcode not in Opcode.__members__.values() or not 0 <= dtype < len(_DTYPES) or extent < 0:
            what = "a worker sent what is no message to a parameter server"
            raise WorldError(explain(what, value=header.tolist(), fix="run the same version on all hosts"))
        return cls(Opcode(opcode), layout, part, number, _DTYPES[dtype], extent // 2, bool(extent % 2))

    def __str__(self) -> str:
        """Return a description of the message for error texts, such as "weights of part 0"."""
        what = {Opcode.SUM: f"the sum of step {self.number}", Opcode.SEED: "the first weights", Opcode.DELTA: "weights"}
        return f"{what.get(self.opcode, 'the agreed weights')} of part {self.part}"


def empty_header() -> Tensor:
    """Return a tensor into which a header can be received."""
    return torch.empty(_WORDS, dtype=torch.int64)


def wire(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous CPU tensor as bytes, because gloo does not support all dtypes."""
    return tensor.view(-1).view(torch.uint8)


# ---- functions and records for the store in which workers and servers find each other


class Announcement(NamedTuple):
    """The announcement of a new group to the servers: the number of workers, and the limit of each wait, in seconds."""

    num_workers: int
    limit_s: float


class _FirstCause(NamedTuple):
    """The reason why a group ended: the rank that was lost, or None, and a text."""

    lost: int | None
    text: str


def address_of(address: str) -> MeetingPoint:
    """Return the meeting point of the servers' store for an address ``host:port``."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    is_here = loopback_address(host) is not None
    return MeetingPoint(host, int(port), secret=requested_secret(), is_loopback_meant=is_here)


def keep(address: str, limit_s: float) -> WorldStore:
    """Start the servers' store at ``host:port`` of this host; on a network the run's secret, if it has one, protects it.

    Raises:
        UsageError: this process cannot listen at the address.
    """
    return open_store(address_of(address), 0, limit_s, is_one_node=True)


def connect(address: str, limit_s: float) -> dist.Store:
    """Connect to the store of the servers; prove to know the run's secret if it has one and the store is on a network.

    Args:
        address: ``host:port``.
        limit_s: how long to try, in seconds.

    Raises:
        WorldError: the store did not answer in time.
    """
    try:
        return open_store(
            address_of(address), 1, limit_s, log_notices=False
        ).store  # the connection under this store stays open until the process ends
    except (WorldError, RuntimeError) as error:
        what = f"the store of the parameter servers at {address} does not answer: {error}"
        raise WorldError(explain(what, fix="look at the output of `guozhuang run`, which keeps it")) from error


def announce(store: dist.Store, announcement: Announcement) -> int:
    """Announce a new group to the servers; return its number."""
    number = int(store.add(f"{_PREFIX}/announced", 1))
    store.set(f"{_PREFIX}/announced/{number}", json.dumps(announcement))
    return number


def announced(store: dist.Store, number: int) -> Announcement | None:
    """Return the announcement of a group, or None if it was not announced yet."""
    key = f"{_PREFIX}/announced/{number}"
    return Announcement(*json.loads(store.get(key))) if store.check([key]) else None


def store_of_group(store: dist.Store, number: int) -> dist.Store:
    """Return the part of the servers' store that belongs to one group, under a prefix of its own."""
    return dist.PrefixStore(f"{_PREFIX}/meeting/{number}", store)


# ---- the group of connected workers and servers


@dataclass(frozen=True)
class ServerGroup:
    """A group of connected workers and servers.

    Attributes:
        rank: the rank of this process in the group.
        num_workers: the number of workers, which have the first ranks.
        servers: the rank of each server.
        limit_s: the limit of each wait for another process, in seconds.
        store: the part of the store that belongs to this group; its calls have a short limit, and fail where it is silent.
        crossing: the gloo connections.
        names: a name for each rank in error texts, with its process id and host.
    """

    rank: int
    num_workers: int
    servers: Sequence[int]
    limit_s: float
    store: PatientStore
    crossing: Crossing
    names: Sequence[str]

    @property
    def limit(self) -> timedelta:
        """The longest time to wait for another process, as a ``timedelta``."""
        return timedelta(seconds=self.limit_s)

    @property
    def workers_serve(self) -> bool:
        """Whether the workers themselves serve, because there are no server processes."""
        return self.servers[0] < self.num_workers

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """Start to send a tensor to rank ``to``; the returned work keeps the tensor's memory alive until it was waited for."""
        return self.crossing.group.send([tensor], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Start to receive a tensor from rank ``source``; return the work."""
        return self.crossing.group.recv([tensor], source, tag)

    def _report(self, cause: _FirstCause) -> None:
        with contextlib.suppress(RuntimeError):  # the process that keeps the store may have ended, or be silent
            self.store.compare_set(_FAILURE, "", json.dumps(cause))  # keeps a cause that was reported before

    def abort(self, lost: int | None, text: str) -> None:
        """Report the cause of a failure and close all connections, so that every wait of the group fails in all processes."""
        self._report(_FirstCause(lost, text))
        self.crossing.cut()

    def close(self) -> None:
        """End the threads of this process for the group, when nothing more is to be sent or received. Not collective."""
        self.crossing.close()
        self.store.close()

    def error_of(self, peer: int, doing: str, error: BaseException) -> WorldError:
        """Return the error to raise after a wait for a peer failed: the first cause that any process reported.

        Args:
            peer: the rank for which this process waited.
            doing: the purpose of the wait.
            error: the exception that the wait raised.
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
        with contextlib.suppress(RuntimeError):
            text = self.store.read(_FAILURE, _PATIENCE_S)
            return None if text is None else _FirstCause(*json.loads(text))
        return None


def how_lost(error: BaseException, limit_s: float) -> str:
    """Return a text that says what happened to a process, judged by the error that gloo raised."""
    text = str(error)
    if "imed out" in text:
        return f"did not answer within {limit_s:g} s"
    if "losed" in text or "reset" in text.lower() or "Broken pipe" in text:
        return "is gone"
    return f"cannot be heard: {text}"


def join(
    store: dist.Store,
    rank: int,
    num_workers: int,
    count: int,
    limit_s: float,
    keeper: str = "",
    members: Sequence[int] = (),
) -> ServerGroup:
    """Join a group, as a worker or a server, and return when all its processes are connected.

    Args:
        store: the part of the store that belongs to this group.
        rank: the rank of this process among workers and servers.
        num_workers: the number of workers, which have the ranks from 0 on.
        count: the number of server processes; 0 if the workers serve.
        limit_s: the limit of each wait for another process, in seconds.
        keeper: the host that keeps the servers' store, if it may be another host than this one.
        members: the numbers of the workers in the world, in a worker.

    Raises:
        WorldError: a process did not join in time; the text names it.
    """
    size = num_workers + count
    called = [f"rank {r}" if r < num_workers else f"parameter server {r - num_workers}" for r in range(size)]
    cards = roll_call.call(
        store,
        "here",
        rank,
        size,
        str(this_process(node_identity())),
        limit_s,
        purpose="to connect workers and servers",
        named=lambda missing: ", ".join(called[r] for r in missing),
        members=members,
    )
    present = [Process.read(card) for card in cards]
    names = [f"{who} (process {p.pid} on {p.node.split('/')[0]})" for who, p in zip(called, present, strict=True)]
    others = [r for r in range(size) if present[r].node != present[rank].node]
    # If all ranks are on one host, they may be set to use loopback, over which a server on another host cannot be reached.
    is_remote = keeper and loopback_address(keeper) is None
    address = own_address([keeper], []) if is_remote else choose_address(dist.PrefixStore("route", store), rank, others)
    try:
        crossing = Crossing(dist.PrefixStore("gloo", store), rank, size, limit_s, address)
    except RuntimeError as error:
        if isinstance(error, WorldError) or not is_about_interfaces(error):
            raise
        what = f"workers and servers met, but gloo could not connect them: {error}"
        fix = "set GLOO_SOCKET_IFNAME to the network interface that leads to the other hosts"
        raise WorldError(explain(what, rank=rank, fix=fix)) from error
    servers = range(num_workers, size) if count else range(num_workers)
    # Its thread starts now, because a process that exits after an error reports it, and can start no thread then.
    limited = PatientStore(store, client=Client(_ANSWER_S, retries=True, starts=True))
    return ServerGroup(rank, num_workers, servers, limit_s, limited, crossing, names)
