"""How the ranks of a world find each other: a store, and a roll call that says who is missing."""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.world import search
from guozhuang.world.door import Door, Passage, pass_through, passage_from
from guozhuang.world.identity import Identity, MeetingPoint, PortSequence

# A waiting rank looks into the store at least that often, and soon after it began to wait; the rank that keeps the store
# leaves it open for longer when it gives up, for the others to read why.
_LOOK_S, _FIRST_LOOK_S = 0.5, 0.002
_log = logging.getLogger("guozhuang")


@dataclass(frozen=True)
class Meeting:
    """The store of a world, and what this process keeps open for it.

    Attributes:
        store: through which the ranks find each other.
        host: name or address of the node that keeps it, as this node reaches it; None in a world of one.
        doors: what leads to the store, or lets others in.
        note: where rank 0 wrote down where it is; None if it did not.
    """

    store: dist.Store
    host: str | None = None
    doors: tuple[Door | Passage, ...] = ()
    note: PortSequence | None = None

    def everybody_came(self) -> None:
        """Every rank must call once all are here: nobody needs a note any more."""
        if self.note is not None:
            search.remove_note(self.note)

    def close(self) -> None:
        """End what this process keeps open; connections of the store end with it. A second call does nothing."""
        self.everybody_came()
        for door in self.doors:
            door.close()


def open_store(identity: Identity, timeout_s: float) -> Meeting:
    """Connect to the store of the world; rank 0 starts it where the launcher does not keep one.

    In a world of one the store is in memory and no port is opened. Where the meeting point is a loopback address, or there
    is a secret, the store listens on loopback only (torch's own would listen on every interface); with a secret, the other
    nodes come to it through a door.

    Raises:
        UsageError: the port is taken, or the address is not one of this machine.
        WorldError: nothing that speaks the store's language, and knows the secret, answered within ``timeout_s``.
    """
    point = identity.meeting_point
    if point is None:
        return Meeting(dist.HashStore())
    if isinstance(point, PortSequence):
        return _meet_at_a_sequence(point, identity.rank, timeout_s)
    keeps = identity.rank == 0 and not point.is_kept_by_launcher
    has_door = bool(point.secret) and _loopback_address(point.host) is None
    if has_door and keeps:
        return _behind_a_door(_listen_at(point), point.secret, point.host, timeout_s)
    if has_door:
        passage = pass_through(point.host, point.port, point.secret, timeout_s)
        return _through(passage, point.host, identity.rank, timeout_s, f"{point.host}:{point.port}")
    where = f"{point.host}:{point.port} (MASTER_ADDR:MASTER_PORT)"
    return Meeting(_connect_or_say(point, keeps, identity.rank, timeout_s, where), point.host)


def _meet_at_a_sequence(point: PortSequence, rank: int, timeout_s: float) -> Meeting:
    if rank == 0:
        listener = search.listener_of(point)
        address = listener.getsockname()[:2]
        if address[1] != point.ports[0]:
            _log.info(
                "port %d is taken here: rank 0 listens on %s:%d, and the others find it", point.ports[0], *address
            )
        meeting = _behind_a_door(listener, point.secret, address[0], timeout_s)
        is_noted = bool(point.note) and search.write_note(point, address)
        return replace(meeting, note=point if is_noted else None)
    started = time.monotonic()
    found = search.find(point, rank, timeout_s)
    where = f"{found.host}:{found.port}"
    left_s = max(timeout_s - (time.monotonic() - started), 1.0)
    if point.is_one_node:
        found.connection.close()
        there = MeetingPoint(search.LOOPBACK, found.store_port)
        return Meeting(_connect_or_say(there, False, rank, left_s, where), found.host)
    passage = passage_from(found.connection, found.host, found.port, point.secret)
    return _through(passage, found.host, rank, left_s, where)


def _through(passage: Passage, host: str, rank: int, timeout_s: float, where: str) -> Meeting:
    try:
        store = _connect_or_say(MeetingPoint(*passage), False, rank, timeout_s, where)
    except BaseException:
        passage.close()
        raise
    return Meeting(store, host, (passage,))


def _behind_a_door(listener: socket.socket, secret: bytes, host: str, timeout_s: float) -> Meeting:
    """A store of this process on loopback, at a port that the system chooses, and the door in front of it."""
    try:
        inner = socket.create_server((search.LOOPBACK, 0))
        port = inner.getsockname()[1]
        limit = datetime.timedelta(seconds=timeout_s)
        store = dist.TCPStore(
            search.LOOPBACK, port, None, True, limit, wait_for_workers=False, master_listen_fd=inner.detach()
        )
    except BaseException:
        listener.close()
        raise
    return Meeting(store, host, (Door(listener, port, secret),))


def _listen_at(point: MeetingPoint) -> socket.socket:
    """On the address of this node that ``point`` names, and no other.

    Raises:
        UsageError: the port is taken, or the address is not one of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _port_is_taken(point) from error
        what = f"rank 0 cannot listen at {point.host}:{point.port} (MASTER_ADDR:MASTER_PORT): {error}"
        raise UsageError(
            explain(what, rank=0, fix="set MASTER_ADDR to an address of the node that rank 0 runs on")
        ) from error


def _connect_or_say(point: MeetingPoint, keeps: bool, rank: int, timeout_s: float, where: str) -> dist.Store:
    # In its own thread, because a service that accepts the connection and says nothing would hold us for ever.
    answer: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            answer.append(_connect(point, keeps, timeout_s))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=connect, name="guozhuang store", daemon=True)
    thread.start()
    # The socket's own time-out comes first (it can take half as long again); this one is for silence.
    thread.join(2 * timeout_s + 1)
    fix = "check that rank 0 runs, that both variables are the same on every rank, and that no firewall stands between"
    if not answer:
        what = f"what listens at {where} is no store of PyTorch: it did not answer within {timeout_s:g} s"
        raise WorldError(explain(what, rank=rank, fix="choose another MASTER_PORT"))
    if isinstance(answer[0], UsageError):
        raise answer[0]
    if isinstance(answer[0], Exception):
        what = f"could not reach rank 0's store at {where} within {timeout_s:g} s: {answer[0]}"
        raise WorldError(explain(what, rank=rank, fix=fix)) from answer[0]
    return answer[0]


def _connect(point: MeetingPoint, keeps: bool, timeout_s: float) -> dist.Store:
    limit = datetime.timedelta(seconds=timeout_s)
    if not keeps:
        return dist.TCPStore(point.host, point.port, None, False, limit, wait_for_workers=False)
    address = _loopback_address(point.host)
    try:
        if address is None:
            return dist.TCPStore(point.host, point.port, None, True, limit, wait_for_workers=False)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, point.port), family=family)
        return dist.TCPStore(
            address, point.port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    except (OSError, dist.DistNetworkError) as error:
        if "in use" not in str(error):
            raise
        raise _port_is_taken(point) from error


def _port_is_taken(point: MeetingPoint) -> UsageError:
    fix = "choose another MASTER_PORT, or start with `guozhuang run`, which finds a free one"
    what = f"MASTER_PORT is taken by another process of this machine: {point.host}:{point.port}"
    return UsageError(explain(what, fix=fix))


def _loopback_address(host: str) -> str | None:
    """The loopback address that ``host`` stands for, IPv4 if it has one; None if other machines can reach it."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    if not found or not all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in found):
        return None
    return min(found, key=lambda a: ":" in a)


def host_identity() -> str:
    """A text that is equal for processes that share a kernel, a host name and a network, and differs otherwise."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/net"
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(boot.read_text().strip())
        parts.append(str(os.stat(network).st_ino))
    return "/".join(parts)


def roll_call(store: dist.Store, rank: int, size: int, timeout_s: float) -> list[str]:
    """Wait until every rank is here; return the host identity of each, in rank order.

    Every rank must call, with a store (or prefix) that no other call uses.

    Raises:
        UsageError: two processes claim the same rank.
        WorldError: somebody did not come within ``timeout_s``, or the process that keeps the store is gone; the text
            names who is missing. Every rank that waits raises.
    """
    deadline = time.monotonic() + timeout_s
    try:
        if store.add(f"claim/{rank}", 1) > 1:
            what = f"two processes say that they are rank {rank} of {size}"
            text = explain(what, fix="give each process its own RANK; end processes that are left from an earlier run")
            store.set("verdict", text)
            raise UsageError(text)
        store.set(f"host/{rank}", host_identity())
        if store.add("present", 1) == size:
            store.set("complete", "1")
        # Not `store.wait` with a limit: torch prints two warnings each time that one runs out.
        while not store.check(["complete"]):
            if store.check(["verdict"]):
                raise WorldError(store.get("verdict").decode())
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                _give_up(store, rank, size, timeout_s)
            waited_s = timeout_s - left_s
            time.sleep(max(0.0, min(left_s, _LOOK_S, max(_FIRST_LOOK_S, 0.1 * waited_s))))
        return [store.get(f"host/{r}").decode() for r in range(size)]
    except dist.DistNetworkError as error:
        what = "the process that keeps the store of the world is gone, so the ranks cannot find each other"
        fix = "look at the output of rank 0 and of the launcher for the first error"
        raise WorldError(explain(what, rank=rank, fix=fix)) from error


def _give_up(store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
    missing = [r for r in range(size) if not store.check([f"host/{r}"])]
    names = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    what = f"{len(missing)} of {size} ranks did not come within {timeout_s:g} s: {names}"
    fix = "look at their output for the first error, check MASTER_ADDR and MASTER_PORT there, or raise timeout_s"
    text = explain(what, fix=fix)
    store.set("verdict", text)
    if rank == 0:
        time.sleep(3 * _LOOK_S)
    raise WorldError(text)


def places(hosts: Sequence[str], rank: int) -> tuple[int, int, int, int]:
    """(local_rank, local_size, node_rank, num_nodes) of ``rank``, from the host identity of each rank.

    Nodes are numbered in the order of their lowest rank.
    """
    nodes = list(dict.fromkeys(hosts))
    here = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    return here.index(rank), len(here), nodes.index(hosts[rank]), len(nodes)
