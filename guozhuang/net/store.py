"""The store at the address that a launcher told: where rank 0 listens, and how the others come to it.

[Note: where rank 0 listens] At one address, and not on every interface as PyTorch's store does. If MASTER_ADDR is an address of
this node, or a name that has one, there. If it means loopback, on loopback: so it is on one machine. But the name of a node
often leads to loopback on that node alone (Debian writes 127.0.1.1), and Kubernetes' operators tell rank 0 "localhost" and the
others the name of its service; then the others come from outside, and it is the address that leads there. If MASTER_ADDR is
an address that leads here by translation, as that of a service, it is where the route towards it leaves from.
"""

from __future__ import annotations

import datetime
import errno
import logging
import random
import socket
import threading
import time

import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net import search, waiting
from guozhuang.net.meeting_point import MeetingPoint

_BACKLOG = 2048
_ONE_TRY_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_log = logging.getLogger("guozhuang")


def loopback_address(host: str) -> str | None:
    """The loopback address that ``host`` stands for, IPv4 if it has one; None if other machines can reach it."""
    found = search.resolve(host)
    return found[0] if found and all(map(search.is_loopback, found)) else None


def listening_address(point: MeetingPoint) -> str:
    """The address of this node, rank 0's, that the store (or its door) listens at. See [Note: where rank 0 listens]."""
    loopback = loopback_address(point.host)
    if loopback is not None:
        return loopback if point.is_loopback_meant else search.own_address([], [])
    address = search.own_address([point.host], [])
    if address not in search.resolve(point.host):
        _log.warning(
            "MASTER_ADDR=%s is no address of this node (%s): rank 0 listens at %s:%d, which is right only if that leads here",
            *(point.host, socket.gethostname(), address, point.port),
        )
    return address


def where_to_go(point: MeetingPoint) -> str:
    """The host at which this node reaches what ``listen`` opened: the told one, but where that leads to loopback wrongly."""
    if point.is_loopback_meant or loopback_address(point.host) is None:
        return point.host
    return search.own_address([], [])


def listen(point: MeetingPoint) -> socket.socket:
    """Rank 0's part: a socket for the store, or for the door before it.

    Raises:
        UsageError: the port is taken, or may not be had.
    """
    address = listening_address(point)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, point.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = "choose another MASTER_PORT, or start with `guozhuang run`, which finds a free one"
            what = f"MASTER_PORT is taken by another process of this machine: {address}:{point.port}"
            raise UsageError(explain(what, fix=fix)) from error
        what = f"rank 0 cannot listen at {address}:{point.port} (MASTER_ADDR:MASTER_PORT): {error}"
        fix = "set MASTER_ADDR to an address of the node that rank 0 runs on, and MASTER_PORT to one above 1023"
        raise UsageError(explain(what, rank=0, fix=fix)) from error


def serve(listener: socket.socket, timeout_s: float) -> dist.TCPStore:
    """A store of this process that listens there and nowhere else; ``timeout_s`` is the limit of its operations."""
    host, port = listener.getsockname()[:2]
    limit = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def reach(
    point: MeetingPoint, rank: int, timeout_s: float, where: str, *, says: bool = True, is_up: bool = False
) -> tuple[dist.TCPStore, str]:
    """Connect to the store that rank 0 or the launcher keeps.

    Args:
        point: where it is.
        rank: of this process, for the texts.
        timeout_s: how long to wait for it, in seconds; later of each of the store's operations.
        where: what the user calls that place, for the texts.
        says: whether to say in the log what is waited for when it takes long.
        is_up: whether somebody is known to listen there; then nobody knocks before.

    Returns:
        The store, and the host by which it was reached.

    Raises:
        WorldError: nothing that speaks the store's language answered within ``timeout_s``.
    """
    deadline, over = time.monotonic() + timeout_s, threading.Event()
    seen = ["the name is not resolved yet"]

    def connect() -> tuple[dist.TCPStore, str]:
        host = where_to_go(point)
        if not is_up:
            until_somebody_listens(host, point.port, deadline, over, seen)
        seen[0] = ""
        left = datetime.timedelta(seconds=max(deadline - time.monotonic(), 1.0))
        store = dist.TCPStore(host, point.port, None, False, left, wait_for_workers=False)
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        return store, host

    def still() -> str:
        why = seen[0] or "what listens there does not answer"
        return f"rank {rank} waits for rank 0's store at {where}: {why}" if says else ""

    fix = "check that rank 0 runs, that both variables are the same on every rank, and that no firewall stands between"
    try:
        return waiting.attempt(timeout_s + 1.0, connect, still)
    except waiting.OverdueError:
        if not seen[0]:
            what = f"what listens at {where} is no store of PyTorch: it did not answer within {timeout_s:g} s"
            raise WorldError(explain(what, rank=rank, fix="choose another MASTER_PORT")) from None
        raise _not_reached(where, timeout_s, seen[0], rank, fix) from None
    except NobodyListensError as error:
        raise _not_reached(where, timeout_s, str(error), rank, fix) from error
    except RuntimeError as error:
        raise _not_reached(where, timeout_s, str(error), rank, fix) from error
    finally:
        over.set()


def _not_reached(where: str, timeout_s: float, why: str, rank: int, fix: str) -> WorldError:
    if "resolved" in why:
        fix = "set MASTER_ADDR to an address or to a name that every node knows (DNS or /etc/hosts)"
    return WorldError(
        explain(f"could not reach rank 0's store at {where} within {timeout_s:g} s: {why}", rank=rank, fix=fix)
    )


class NobodyListensError(Exception):
    """Nobody accepted a connection in time; the text says what happened at the last try."""


def until_somebody_listens(
    host: str, port: int, deadline: float, over: threading.Event | None = None, seen: list[str] | None = None
) -> None:
    """Try until somebody accepts a connection. In Python: a signal can end it.

    Args:
        host: name or address.
        port: the TCP port.
        deadline: by ``time.monotonic``.
        over: ends the waiting early when it is set.
        seen: its first element is kept at what happened at the last try.

    Raises:
        NobodyListensError: nobody did.
    """
    over = over or threading.Event()
    pause_s, why = _FIRST_PAUSE_S, ""
    while True:
        left_s = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(_ONE_TRY_S, left_s))) as found:
                # TCP allows a connection to itself, and a port of the ephemeral range can come to it.
                if found.getsockname() != found.getpeername():
                    return
                why = "nobody listens there"
        except OSError as error:
            why = waiting.why_no_connection(error)
        if seen is not None:
            seen[0] = why
        left_s = deadline - time.monotonic()
        if over.is_set() or left_s <= 0:
            raise NobodyListensError(why)
        over.wait(min(left_s, pause_s * random.uniform(0.7, 1.3)))  # thousands may be trying
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
