"""The store at an address that a launcher gave: the address at which rank 0 listens, and how the other ranks connect to it.

[Note: where rank 0 listens] Rank 0 listens at one address, and not on every interface as PyTorch's store does. If MASTER_ADDR
is an address of this node, or resolves to one, rank 0 listens there; if it means loopback and all ranks are on one machine, on
loopback. But the name of a node often resolves to loopback on that node alone (Debian writes 127.0.1.1), and Kubernetes'
operators give rank 0 "localhost" and the others the name of its service; then rank 0 listens at the address by which
other nodes reach it. If MASTER_ADDR is translated to this node, as a service's is, it is the source address of the route to it.
The agent of node 0 finds its address by ``--master-addr`` in the same way; an interface that the user named (``--interface``)
decides where that name gives no address of this node.
"""

from __future__ import annotations

import datetime
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net import client, interfaces
from guozhuang.net.meeting_point import MeetingPoint

_BACKLOG = 2048
_ONE_TRY_S = 5.0
_OWN_S = 3.0  # seconds for a connection of this node to itself
_log = logging.getLogger("guozhuang")


def next_part(store: dist.Store, topic: str, rank: int) -> dist.Store:
    """Return the part of a store for the next object of a kind, whose keys no other object uses.

    Each rank counts its objects in the store: the n-th objects of all ranks get the same part.

    Args:
        store: the store that all ranks use.
        topic: names the kind. Every rank must call equally often for a topic.
        rank: this process.
    """
    number = store.add(f"guozhuang/{topic}/turns/{rank}", 1)
    return dist.PrefixStore(f"guozhuang/{topic}/{number}", store)


def loopback_address(host: str) -> str | None:
    """Return the loopback address that ``host`` resolves to, IPv4 first; None if it has another address or none."""
    found = interfaces.resolve(host)
    return found[0] if found and all(map(interfaces.is_loopback, found)) else None


def listening_address(point: MeetingPoint) -> str:
    """Return the address by which the other nodes of a run reach this node. See [Note: where rank 0 listens].

    On the node that keeps the store, the store or the door in front of it listens there.
    """
    found = interfaces.resolve(point.host)
    is_looped = loopback_address(point.host) is not None
    if is_looped and point.is_loopback_meant:
        return found[0]
    address = interfaces.own_address([] if is_looped else [point.host], [])
    own = [each for each in found if not interfaces.is_loopback(each) and interfaces.is_own(each)]
    if own:
        return address if address in own else own[0]
    return interfaces.named(point.interface).address if point.interface else address


def connect_host(point: MeetingPoint) -> str:
    """Return the host by which this node connects to the store: ``point.host`` unless that is loopback here by accident."""
    if point.is_loopback_meant or loopback_address(point.host) is None:
        return point.host
    return listening_address(point)


def listen(point: MeetingPoint, rank: int | None = None, warn: Callable[[str], None] = _log.warning) -> socket.socket:
    """Bind a socket, on rank 0 or in the agent of node 0, for the store or for the door in front of it.

    Args:
        point: the address of the store.
        rank: the rank of this process, for errors; None where it is no rank.
        warn: called with a text if ``point.host`` is no address of this node, so that it must be translated to this node.

    Raises:
        UsageError: the port is taken, or this user may not open it.
    """
    address = listening_address(point)
    try:
        listener = interfaces.listen_at(address, point.port, _BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = f"choose another {point.port_option}; on one node `guozhuang run` finds a free one by itself"
            what = f"port {point.port} is taken by another process of this machine ({address}:{point.port})"
            raise UsageError(explain(what, rank=rank, fix=fix)) from error
        what = f"no store can be opened at {address}:{point.port}: {error.strerror or error}"
        fix = "set MASTER_ADDR (--master-addr, --rdzv-endpoint) to an address of rank 0's node, and a port above 1023"
        raise UsageError(explain(what, rank=rank, fix=fix)) from error
    if loopback_address(point.host) is None and not point.interface and address not in interfaces.resolve(point.host):
        host, port = point.host, listener.getsockname()[1]
        where = f"the store listens at {address}:{port}, and {host}:{port} must lead there"
        warn(f"{host} is no address of this node ({socket.gethostname()}): {where}")
    return listener


def innermost(store: dist.Store) -> dist.Store:
    """Return the store inside of any number of ``PrefixStore``."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def serve(listener: socket.socket, timeout_s: float, *, is_shared: bool = False) -> dist.TCPStore:
    """Start a store in this process that listens at one address, and not on every interface as torch's does.

    Args:
        listener: a bound and listening socket; the store owns it from now on.
        timeout_s: limit of each of the store's operations, in seconds.
        is_shared: allow ``share`` to find this store in this process.

    Raises:
        WorldError: this node cannot connect to its own address, so that torch would try to until the time-out.
    """
    host, port = listener.getsockname()[:2]
    _check_own(host)
    return dist.TCPStore(
        {"0.0.0.0": interfaces.LOOPBACK, "::": "::1"}.get(host, host),
        port,
        None,
        True,
        datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=is_shared,
        master_listen_fd=listener.detach(),
    )


def _check_own(host: str) -> None:
    """Raise unless this node can connect to this address of its own, as it cannot while its loopback interface is down."""
    with interfaces.listen_at(host) as there:
        address, port = there.getsockname()[:2]
        own = {"0.0.0.0": interfaces.LOOPBACK, "::": "::1"}.get(address, address)
        try:
            socket.create_connection((own, port), timeout=_OWN_S).close()
        except OSError as error:
            what = (
                f"this node ({socket.gethostname()}) cannot connect to its own address {own}: {error.strerror or error}"
            )
            fix = "bring up its loopback interface, which carries that: ip link set lo up"
            raise WorldError(explain(what, fix=fix)) from error


def share(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Return the store that this process opened at this address with ``is_shared``; start a new one if there is none.

    Raises:
        RuntimeError: the port is taken.
    """
    limit = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, True, limit, wait_for_workers=False, multi_tenant=True)


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the store of another process; waits in C++, see [Note: waiting for a store] in ``net.client``.

    Args:
        host: name or address.
        port: the TCP port.
        timeout_s: limit for the connection, and for each later operation, in seconds.

    Raises:
        RuntimeError: no store answers at this address.
    """
    return dist.TCPStore(host, port, None, False, datetime.timedelta(seconds=timeout_s), wait_for_workers=False)


def reach(
    point: MeetingPoint,
    rank: int | None,
    timeout_s: float,
    where: str,
    *,
    who: str = "rank 0's store",
    fix: str = "",
    log_notices: bool = True,
    is_up: bool = False,
    operation_s: float | None = None,
) -> tuple[dist.TCPStore, str]:
    """Connect to the store that rank 0, the launcher or an agent keeps.

    Args:
        point: the address of the store.
        rank: the rank of this process, for log and errors.
        timeout_s: how long to wait for the store, in seconds.
        where: the address as log and errors show it.
        who: what log and errors call the store.
        fix: the remedy, for errors; "" for the remedies of MASTER_ADDR and MASTER_PORT.
        log_notices: whether to log notices when the connection takes long.
        is_up: a program is known to listen at the address, so no trial connection is made first.
        operation_s: limit of each later operation of the store, in seconds; None: ``timeout_s``.

    Returns:
        The store, and the host by which it was reached.

    Raises:
        WorldError: no store answered within ``timeout_s``.
    """
    deadline, over = time.monotonic() + timeout_s, threading.Event()
    seen: list[OSError | None] = [socket.gaierror("no answer yet")]

    def try_it() -> tuple[dist.TCPStore, str]:
        host = connect_host(point)
        if not is_up:
            _wait_for_listener(host, point.port, deadline, over, seen)
        seen[0] = None
        store = connect(host, point.port, max(deadline - time.monotonic(), 1.0))
        store.set_timeout(datetime.timedelta(seconds=timeout_s if operation_s is None else operation_s))
        return store, host

    def still() -> str:
        why = client.why_no_connection(seen[0]) if seen[0] else "what listens there does not answer"
        return f"{client.who(rank)} waits for {who} at {where}: {why}" if log_notices else ""

    try:
        return client.attempt(timeout_s + 1.0, try_it, still)
    except client.OverdueError as error:
        if seen[0] is None:
            what = f"what listens at {where} is no store of PyTorch: it did not answer within {timeout_s:g} s"
            raise WorldError(explain(what, rank=rank, fix=fix or "choose another MASTER_PORT")) from None
        cause: Exception = error
    except (OSError, RuntimeError) as error:
        cause = error
    finally:
        over.set()
    why = seen[0] or cause
    usual = (
        "check that rank 0 runs, that both variables are the same on every rank, and that no firewall stands between"
    )
    if isinstance(why, socket.gaierror):
        usual = "set MASTER_ADDR to an address or to a name that every node knows (DNS or /etc/hosts)"
    text = client.why_no_connection(why) if isinstance(why, OSError) else str(why).partition("\n")[0]
    what = f"could not reach {who} at {where} within {timeout_s:g} s: {text}"
    raise WorldError(explain(what, rank=rank, fix=fix or usual)) from cause


def _wait_for_listener(
    host: str, port: int, deadline: float, over: threading.Event, seen: list[OSError | None]
) -> None:
    """Connect again and again until a program accepts; put each error into ``seen[0]``, raise the last at the deadline."""
    for left_s in client.tries(deadline, over):
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(_ONE_TRY_S, left_s))) as found:
                # TCP allows a socket to connect to itself, which happens by chance with ports of the ephemeral range.
                if found.getsockname() != found.getpeername():
                    return
                raise ConnectionRefusedError
        except OSError as error:
            seen[0] = error
    assert seen[0] is not None
    raise seen[0]
