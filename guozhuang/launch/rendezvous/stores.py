"""Open and reach the stores by which agents and ranks find each other.

[Note: stores] Torchrun's own rendezvous has four faults: its store listens on every interface, even if all ranks are on one
node; it chooses a port by binding a free one and releasing it again; it keeps one store for all attempts, so restarted ranks
read keys of earlier ranks; and a node that joins later waits for an address that no node writes.
So here the agent of node 0 keeps the store, and passes it a socket that is already bound (``master_listen_fd``). Each attempt
starts with an empty store: on one node and in an elastic run it is a new one, between a fixed number of nodes its keys are
deleted. On one node it listens on loopback. Between nodes it listens at the one address that the other nodes know, or, with
a secret, on loopback behind a door (``net.door``) at that address. Ranks connect as clients (TORCHELASTIC_USE_AGENT_STORE).
"""

from __future__ import annotations

import datetime
import errno
import socket

import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch.console.say import say
from guozhuang.net import interfaces, search
from guozhuang.net import store as stores
from guozhuang.net.client import PatientStore
from guozhuang.net.door import pass_through
from guozhuang.net.interfaces import is_loopback, resolve
from guozhuang.net.meet import WorldStore, keep_behind_door
from guozhuang.net.meeting_point import MeetingPoint, PortSequence

LOOPBACK = "127.0.0.1"
_ANSWER_S = 10.0  # time for a program that accepted a connection to answer as a store
STORE_S = 300.0  # timeout of one operation of a connected store
_FREE = "choose another port, or leave it out: on one node a free one is taken then"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this node; ``port`` 0: any free port.

    Raises:
        UsageError: the port is taken, or this user may not open it.
        OSError: the address does not belong to this node.
    """
    try:
        return interfaces.listen_at(host, port, 2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} is taken by another process of this machine ({host}:{port})"
            raise UsageError(explain(what, fix=_FREE)) from error
        if error.errno == errno.EACCES:
            what = f"port {port} may not be opened by this user"
            raise UsageError(explain(what, fix="choose a port above 1023")) from error
        raise


def keep(host: str, port: int, secret: bytes | None = None) -> WorldStore:
    """Open a store at an address of this node, or, with a secret, on loopback behind a door at that address."""
    listener = listen(host, port)
    if secret is not None and not is_loopback(host):  # no other node reaches loopback: a door would protect nothing
        return keep_behind_door(listener, secret, host, STORE_S)
    port = int(listener.getsockname()[1])
    return WorldStore(stores.serve(listener, STORE_S), host, port=port, local=(_own(host), port))


def keep_or_share(host: str, port: int, secret: bytes | None) -> WorldStore:
    """Open a store, or share the one that this process already keeps at that port.

    With -H the process opens a store on loopback before it becomes the agent; other hosts reach that through a door.
    """
    try:
        return keep(host, port, secret)
    except UsageError:
        try:
            shared = stores.share(_own(host), port, STORE_S)
        except RuntimeError:
            shared = None
        if shared is None:
            raise
        return WorldStore(shared, host, port=port, local=(_own(host), port))


def find(point: PortSequence, node_rank: int, timeout_s: float) -> WorldStore:
    """Search the ports of ``point`` for the door of node 0, and connect to the store behind it.

    Raises:
        WorldError: no door was found within ``timeout_s`` seconds.
    """
    passage = search.passage_to_rank_0(point, node_rank, timeout_s)
    store = _connect(*passage, _ANSWER_S, "the agent of node 0", is_up=True)
    return WorldStore(store, passage.host, (passage,), port=passage.port, local=passage)


def _own(host: str) -> str:
    """Return the address at which a process of this node reaches a store that listens at ``host``."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def reach(host: str, port: int, secret: bytes | None, timeout_s: float, who: str) -> WorldStore:
    """Connect to a store of another process; with a secret, through its door.

    Args:
        host: with ``port``, the address of the store for other nodes (``WorldStore.host``).
        port: see ``host``.
        secret: the secret of the run; None without one.
        timeout_s: how long to wait until the store is open, in seconds.
        who: the keeper of the store, for the error.

    Raises:
        WorldError: no store could be reached in time, or the door has another secret.
    """
    if secret is not None and stores.loopback_address(host) is None:
        passage = pass_through(host, port, secret, timeout_s)
        return WorldStore(_connect(*passage, _ANSWER_S, who, is_up=True), host, (passage,), port=port, local=passage)
    return WorldStore(_connect(host, port, timeout_s, who, is_up=False), host, port=port, local=(host, port))


def _connect(host: str, port: int, timeout_s: float, who: str, *, is_up: bool) -> dist.Store:
    fix = "check that `guozhuang run` was started there, the address, the port, and that both or none have GUOZHUANG_SECRET"
    where = f"{host}:{port}"
    point = MeetingPoint(host, port)
    store, _ = stores.reach(point, None, timeout_s, where, who=f"the store of {who}", fix=fix, is_up=is_up)
    store.set_timeout(datetime.timedelta(seconds=STORE_S))
    return store


def wait_for(store: PatientStore, key: str, timeout_s: float, who: str) -> str:
    """Wait for a key that ``who`` sets, and return its value. Signals and ``store.while_waiting`` can interrupt the wait.

    Raises:
        WorldError: the key was not set within ``timeout_s`` seconds.
    """
    value = store.read(key, timeout_s)
    if value is None:
        what = f"{who} did not set the key {key!r} within {timeout_s:g} s"
        raise WorldError(explain(what, fix="look at its output"))
    return value.decode()


def interface_address(host: str, interface: str | None = None) -> str:
    """Return the address at which node 0 must listen so that other nodes reach it by the name ``host``.

    That is the address of ``host`` if it belongs to this node. If it does not (the name of a service, a translated address),
    or resolves to loopback (as a node's own name often does by /etc/hosts), it is the address of the interface that the user
    named, or else of the interface that leads out of this node.

    Args:
        host: name or address of node 0 in the options of the agents.
        interface: the network interface that the user named (``--interface``).
    """
    if host == "localhost":
        return LOOPBACK
    found = resolve(host)
    if found[:1] == [host] and is_loopback(host):
        return host
    for address in found:
        if not is_loopback(address) and interfaces.is_own(address):
            return address
    if interface is not None:
        return interfaces.named(interface).address
    address = interfaces.own_address([each for each in found if not is_loopback(each)], [])
    if found and not all(map(is_loopback, found)):
        say(
            f"{host} is no address of this node ({socket.gethostname()}): the store is at {address}, to which it must lead"
        )
    return address


def meeting_address(host: str, interface: str | None = None) -> str:
    """Return the address to connect to: ``host``, or, if that is a name for loopback here, ``interface_address``."""
    is_name_of_this_node = (
        host != "localhost" and host not in resolve(host) and stores.loopback_address(host) is not None
    )
    return interface_address(host, interface) if is_name_of_this_node else host


def say_if_open(kept: WorldStore, secret: bytes | None) -> None:
    """Print the address of the store if it is open to other nodes without a secret."""
    if secret is None and kept.host is not None and not is_loopback(kept.host):
        what = "with the same GUOZHUANG_SECRET on all nodes it would ask for it"
        say(f"the store is at {kept.host}:{kept.port}, open to whoever reaches that; {what}")
