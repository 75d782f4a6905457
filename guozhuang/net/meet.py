"""Find the other ranks of a world: connect each rank to one store, and wait in a roll call that names missing ranks."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net import client, interfaces, search
from guozhuang.net import store as stores
from guozhuang.net.client import PatientStore
from guozhuang.net.door import Door, Passage, pass_through, passage_from
from guozhuang.net.ended import ended_with_0
from guozhuang.net.meeting_point import MeetingPoint, PortSequence
from guozhuang.watch.processes import node_identity

# After a verdict (a failed roll call) rank 0 keeps the store open for a while, so that the other ranks can read the reason.
_AFTER_VERDICT_S = 3 * client.LONGEST_LOOK_S
_GRACE_S = _AFTER_VERDICT_S + 1.0  # seconds that an answer of the store may take beyond the roll call's limit
_MOST_NAMED = 16
_LOOPBACK_KEY = "guozhuang/loopback address"
_CPUS = "cpus"  # stands among the settings in the text of a card, but is compared by nobody
_LOOK_S = 0.5  # seconds between two looks of a waiting rank for ranks that have ended
_LOOKS_PER_S = 1000  # of all ranks together, at most
_log = logging.getLogger("guozhuang")


@dataclass(frozen=True)
class WorldStore:
    """A store that several nodes share, and each ``Door`` or ``Passage`` that this process keeps open for it.

    Attributes:
        store: the store in which ranks, or the agents of nodes, find each other.
        host: name or address by which this node reaches the node that keeps the store; None in a world of one.
        doors: the passage to the store, or the door that admits other nodes; to be closed with the store.
        note: the ports for which the keeper wrote a note into the shared folder; None if it wrote none.
        port: with ``host``, the address of the store (or of its door) for other nodes; 0 if nobody needs it.
        local: host and port at which processes of this node reach the store; ``("", 0)`` if none does.
    """

    store: dist.Store
    host: str | None = None
    doors: tuple[Door | Passage, ...] = ()
    note: PortSequence | None = None
    port: int = 0
    local: tuple[str, int] = ("", 0)

    def remove_note(self) -> None:
        """Remove the file with the store's address, which only late ranks need: all have joined. Its writer must call this."""
        if self.note is not None:
            search.remove_note(self.note)

    def close(self) -> None:
        """Close each ``Door`` and ``Passage`` of this process, and so their connections. A second call does nothing."""
        self.remove_note()
        for door in self.doors:
            door.close()


@dataclass(frozen=True)
class RankCard:
    """The data that one rank publishes about itself in the roll call.

    Attributes:
        host: identity of the rank's node (``node_identity``).
        note: the ``note`` given to ``roll_call``; in ``init`` the UUIDs of the rank's visible CUDA devices, joined by commas.
        settings: the ``settings`` given to ``roll_call``; {} from a version of this package that tells none.
        cpus: the ``cpus`` given to ``roll_call``; () where they are not told.
    """

    host: str
    note: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    cpus: Sequence[int] = ()

    def to_text(self) -> str:
        """Encode the card for the store."""
        return f"{self.host}\n{self.note}\n{json.dumps({**self.settings, _CPUS: list(self.cpus)})}"

    @classmethod
    def of_text(cls, text: str) -> RankCard:
        """Return the card that ``to_text`` encoded."""
        host, note, *rest = text.split("\n", 2)
        settings = json.loads(rest[0]) if rest else {}
        return cls(host, note, settings, tuple(settings.pop(_CPUS, ())))


def open_store(
    point: MeetingPoint | PortSequence | None,
    rank: int,
    timeout_s: float,
    *,
    log_notices: bool = True,
    is_one_node: bool = False,
) -> WorldStore:
    """Connect to the store of the world; rank 0 starts it where the launcher does not keep one.

    In a world of one the store is in memory and no port is opened. Otherwise rank 0 listens at one address (torch's own store
    would listen on every interface); see [Note: where rank 0 listens] in ``net.store``. With a secret the store listens on
    loopback, and a door listens at that address.

    Args:
        point: the address of the store, or the ports at which it may be; None in a world of one.
        rank: the rank of this process.
        timeout_s: limit for the whole call, in seconds.
        log_notices: whether this rank logs notices when the connection takes long.
        is_one_node: all ranks are known to be on this node.

    Raises:
        UsageError: the port is taken.
        WorldError: no store (or no door with this secret) answered within ``timeout_s``.
    """
    if point is None:
        return WorldStore(dist.HashStore())
    if isinstance(point, PortSequence):
        return keep(point, timeout_s) if rank == 0 else join(point, rank, timeout_s, log_notices=log_notices)
    if rank == 0 and not point.is_kept_by_launcher:
        kept = keep(point, timeout_s, rank)
        if not _is_open(point) and not is_one_node:
            kept.store.set(_LOOPBACK_KEY, f"{kept.host}:{point.port}")
        return kept
    if _is_open(point) and point.secret and point.is_kept_by_launcher and rank == 0:
        # `guozhuang run` gives its ranks a loopback address: a launcher's store at another address has no door in front of it.
        _log.warning(
            "GUOZHUANG_SECRET is set, but the launcher that keeps the store at %s:%d checks no secret: every process that "
            "reaches it can use it. Start with `guozhuang run`, which puts a door in front of it",
            *(point.host, point.port),
        )
    return join(point, rank, timeout_s, log_notices=log_notices)


def keep(
    point: MeetingPoint | PortSequence,
    timeout_s: float,
    rank: int | None = None,
    warn: Callable[[str], None] = _log.warning,
) -> WorldStore:
    """Start a store in this process; if other nodes can reach it and there is a secret, put a ``Door`` in front of it.

    Args:
        point: the address, or the ports of which the first free one is taken; then a note is written for the other nodes.
        timeout_s: limit of each of the store's operations, in seconds.
        rank, warn: as for ``store.listen``.

    Raises:
        UsageError: the port (or every one of the ports) is taken.
    """
    if isinstance(point, PortSequence):
        listener = search.listener_of(point)
        address = listener.getsockname()[:2]
        if address[1] != point.ports[0]:
            _log.info(
                "port %d is taken here: the store is at %s:%d, where the other nodes find it", point.ports[0], *address
            )
        meeting = keep_behind_door(listener, point.secret, address[0], timeout_s)
        return replace(meeting, note=point if point.note and search.write_note(point, address) else None)
    listener = stores.listen(point, rank, warn)
    host, port = listener.getsockname()[:2]
    if _is_open(point) and point.secret:
        return keep_behind_door(listener, point.secret, host, timeout_s)
    store = stores.serve(listener, timeout_s)
    return WorldStore(store, host, port=port, local=(store.host, port))


def join(
    point: MeetingPoint | PortSequence,
    rank: int | None,
    timeout_s: float,
    *,
    log_notices: bool = True,
    who: str = "rank 0's store",
    fix: str = "",
    operation_s: float | None = None,
) -> WorldStore:
    """Connect to the store of another process, through its door if there is one.

    Args:
        point: the address, or the ports at which the door is searched.
        rank: the rank of this process, for log and errors; None where it is no rank.
        timeout_s: limit for the whole call, in seconds.
        log_notices: whether to log notices when the connection takes long.
        who: what log and errors call the store.
        fix: the remedy, for errors; "" for the remedies of MASTER_ADDR and MASTER_PORT.
        operation_s: limit of each later operation of the store, in seconds; None: ``timeout_s``.

    Raises:
        WorldError: no store (or no door with this secret) answered within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    operation_s = timeout_s if operation_s is None else operation_s
    passage: Passage | None = None
    if isinstance(point, PortSequence):
        found = search.find(point, rank or 0, timeout_s, log_notices=log_notices)
        host, port, inner = found.host, found.port, (interfaces.LOOPBACK, found.store_port)
        if point.is_one_node:
            found.connection.close()
        else:
            inner = passage = passage_from(found, point.secret)
    elif _is_open(point) and point.secret and not point.is_kept_by_launcher:
        host, port = stores.connect_host(point), point.port
        inner = passage = pass_through(host, port, point.secret, timeout_s, rank=rank, log_notices=log_notices)
    else:
        where = f"{point.host}:{point.port}" + ("" if fix else " (MASTER_ADDR:MASTER_PORT)")
        store, host = stores.reach(
            point, rank, timeout_s, where, who=who, fix=fix, log_notices=log_notices, operation_s=operation_s
        )
        return WorldStore(store, host, port=point.port, local=(host, point.port))
    left_s = max(deadline - time.monotonic(), 1.0)
    try:
        there = MeetingPoint(*inner)
        store, _ = stores.reach(
            there, rank, left_s, f"{host}:{port}", who=who, fix=fix, is_up=True, operation_s=operation_s
        )
    except BaseException:
        if passage is not None:
            passage.close()
        raise
    return WorldStore(store, host, () if passage is None else (passage,), port=port, local=inner)


def _is_open(point: MeetingPoint) -> bool:
    """Return whether other nodes reach the store, so that its keeper puts a door in front of it if there is a secret."""
    return stores.loopback_address(point.host) is None or not point.is_loopback_meant


def keep_behind_door(listener: socket.socket, secret: bytes, host: str, timeout_s: float) -> WorldStore:
    """Start a store in this process on loopback, at a port that the system chooses, and a ``Door`` in front of it.

    Args:
        listener: a bound and listening socket that other nodes reach; the door owns it from now on.
        secret: the secret that the door asks for.
        host: the address of ``listener`` for other nodes.
        timeout_s: limit of each of the store's operations, in seconds.
    """
    outer_port = int(listener.getsockname()[1])
    try:
        inner = socket.create_server((interfaces.LOOPBACK, 0))
        port = inner.getsockname()[1]
        store = stores.serve(inner, timeout_s)
    except BaseException:
        listener.close()
        raise
    return WorldStore(store, host, (Door(listener, port, secret),), port=outer_port, local=(interfaces.LOOPBACK, port))


def claim(store: PatientStore, rank: int, size: int) -> None:
    """Register this rank's number in the store, where no other process may use it again; every rank must call once.

    Raises:
        UsageError: another process has the number. Ranks that wait in a roll call raise the same text.
    """
    if store.add(f"claim/{rank}", 1) > 1:
        what = f"two processes say that they are rank {rank} of {size}"
        fix = "give each process its own RANK; end processes that are left from an earlier run; and let --max-restarts start "
        text = explain(what, fix=f"{fix}all ranks again: a world takes no rank back (--on-failure keep-survivors)")
        store.set("verdict", text)
        raise UsageError(text)


def roll_call(
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    note: str = "",
    settings: Mapping[str, str] | None = None,
    cpus: Sequence[int] = (),
) -> list[RankCard]:
    """Wait until every rank has joined; return the ``RankCard`` of every rank, in rank order.

    Every rank must call this, with a store (or prefix) that no other call uses.

    Args:
        store: the store of the world, or a part of it.
        rank: the rank of this process.
        size: number of ranks.
        timeout_s: limit for the whole call, in seconds.
        note: one line of text that this rank publishes besides its host.
        settings: further texts by name that this rank publishes.
        cpus: numbers of the CPUs on which this rank may run.

    Raises:
        UsageError: two processes claim the same rank, or were told different numbers of ranks.
        WorldError: a rank did not join within ``timeout_s`` (the text names the missing ranks), or its launcher told that it
            ended before (``net.ended``), or the process that keeps the store is gone or does not answer. Every rank that
            waits raises.
    """
    call = _RollCall(store, rank, size, timeout_s, RankCard(node_identity(), note, settings or {}, cpus))
    try:
        return call.run()
    finally:
        call.close()


class _RollCall:
    """The roll call as one rank runs it: publish its own card, wait for those of all ranks, or name the missing ranks."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float, card: RankCard) -> None:
        self._rank, self._size, self._timeout_s, self._card = rank, size, timeout_s, card
        self._deadline, self._notices = time.monotonic() + timeout_s, client.Notices()
        self._next_look_s = 0.0
        self._client = client.Client(timeout_s + _GRACE_S)
        name = f"the store that the ranks meet at{_address(store)}"
        self._store = PatientStore(store, client=self._client, name=name, rank=rank, num_pollers=size)
        self._store.while_waiting = self._look
        self._root = PatientStore(stores.innermost(store), client=self._client, name=name, rank=rank)
        self.close = self._client.close

    def run(self) -> list[RankCard]:
        store, rank, size = self._store, self._rank, self._size
        first = int(store.compare_set("size", "", str(size)))
        if first != size:
            what = f"the processes do not agree how many they are: rank {rank} was told {size}, and another one {first}"
            text = explain(
                what, fix="give all of them the same numbers; end processes that are left from an earlier run"
            )
            store.set("verdict", text)
            raise UsageError(text)
        claim(store, rank, size)
        store.set(f"host/{rank}", self._card.to_text())
        if store.add("present", 1) == size:
            store.set("complete", "1")
        if not store.exist_within(["complete"], self._timeout_s):
            self._abort()
        cards = store.multi_get([f"host/{r}" for r in range(size)])
        return [RankCard.of_text(text.decode()) for text in cards]

    def _look(self) -> None:
        """Raise if another rank has ended the roll call; log which ranks are missing, now and then."""
        self._client.limit_s = max(self._deadline - time.monotonic(), 0.0) + _GRACE_S
        if verdict := self._store.read("verdict"):
            raise WorldError(verdict.decode())
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + max(_LOOK_S, self._size / _LOOKS_PER_S)
            self._raise_if_ended()
        if self._notices.are_due() and self._is_to_log(self._notices.num):
            self._notices.say(self._missing_ranks("are not here yet") + self._loopback_hint())

    def _raise_if_ended(self) -> None:
        """Raise if the launcher told that a missing rank has ended; it ends the other ranks itself unless that was with 0."""
        if missing := _missing(self._store, ended_with_0(self._root)):
            noun, names = "ranks" if len(missing) > 1 else "rank", ", ".join(map(str, missing[:_MOST_NAMED]))
            what = f"{noun} {names} of {self._size} ended with exit code 0 before the world began"
            fix = "look for an early return or exit in the script: every rank must call gz.init()"
            text = explain(what, fix=fix)
            self._store.set("verdict", text)
            raise WorldError(text)

    def _is_to_log(self, turn: int) -> bool:
        """Return whether this rank logs the missing ranks: rank 0 does; if rank 0 is missing too, the first that asks."""
        return self._rank == 0 or (not self._store.check(["host/0"]) and self._store.add(f"logged/{turn}", 1) == 1)

    def _missing_ranks(self, what: str) -> str:
        missing = _missing(self._store, range(self._size))
        names = ", ".join(map(str, missing[:_MOST_NAMED]))
        names += f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        return f"{len(missing)} of {self._size} ranks {what}: {names}"

    def _loopback_hint(self) -> str:
        """Return a text for errors if rank 0 listens on loopback, the likely cause of missing ranks on other hosts; else ""."""
        where = self._root.read(_LOOPBACK_KEY)
        if where is None:
            return ""
        return f" (rank 0 listens at {where.decode()}, which other hosts cannot reach: set MASTER_ADDR to its other address)"

    def _abort(self) -> NoReturn:
        who = self._missing_ranks(f"did not come within {self._timeout_s:g} s")
        fix = "look at their output for the first error, check MASTER_ADDR and MASTER_PORT there, or raise timeout_s"
        text = explain(who + self._loopback_hint(), fix=fix)
        self._store.set("verdict", text)
        if self._rank == 0:
            time.sleep(_AFTER_VERDICT_S)
        raise WorldError(text)


def _missing(store: PatientStore, ranks: Sequence[int]) -> list[int]:
    """Return those of ``ranks`` that have not joined yet, by bisection: one request checks whether all of many keys exist."""
    if not ranks or store.check([f"host/{r}" for r in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return _missing(store, ranks[:half]) + _missing(store, ranks[half:])


def _address(store: dist.Store) -> str:
    """Return the store's address for errors; "" for loopback, which may be only the local end of a relayed connection."""
    store = stores.innermost(store)
    if not isinstance(store, dist.TCPStore) or store.host == "localhost":
        return ""
    if interfaces.is_address(store.host) and interfaces.is_loopback(store.host):
        return ""
    return f" at {store.host}:{store.port}"


def places(hosts: Sequence[str], rank: int) -> tuple[int, int, int, int]:
    """Return (local_rank, local_size, node_rank, num_nodes) of ``rank``, from the host identity of each rank.

    Nodes are numbered in the order of their lowest rank.
    """
    nodes = list(dict.fromkeys(hosts))
    here = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    return here.index(rank), len(here), nodes.index(hosts[rank]), len(nodes)
