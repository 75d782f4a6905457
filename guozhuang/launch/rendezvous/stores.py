"""The stores that agents and ranks find each other by: where they listen, and how others come to them.

[Note: stores] Torchrun's own ways to meet let a store listen on every interface, also where all ranks are on one node;
choose a port by asking for a free one and letting it go again; keep one store for all attempts, so that ranks that were
started anew read what their predecessors left; and, where a node joins later, wait for an address that nobody writes.
So here the agent of node 0 keeps the store; its socket is bound first and handed over (``master_listen_fd``). Each attempt
finds it new: on one node and in an elastic run it is another one, between a fixed number of nodes it is emptied. On one node
it listens on loopback. Between nodes it listens at the one address that the others were told, or, where there is a secret,
on loopback behind a door (``net.door``) at that address. The ranks come as clients (TORCHELASTIC_USE_AGENT_STORE).
"""

from __future__ import annotations

import datetime
import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.launch.console.say import say
from guozhuang.net import client, interfaces, search
from guozhuang.net import store as stores
from guozhuang.net.client import PatientStore
from guozhuang.net.door import Door, pass_through
from guozhuang.net.meeting_point import PortSequence
from guozhuang.net.search import is_loopback, resolve

LOOPBACK = "127.0.0.1"
_ANSWER_S = 10.0  # for what accepted a connection to show that it is a store
_STORE_S = 300.0  # limit of one operation of a store that is there
_FREE = "choose another port, or leave it out: on one node a free one is taken then"


@dataclass
class Kept:
    """A store, and what must be kept as long as it is used.

    Attributes:
        store: itself, or a connection to it.
        host: with ``port``, where processes of this node reach it.
        port: see ``host``.
        told: what others are told to reach it by.
        close: let go of the way to it. The store ends when nobody refers to it any more.
        everybody_came: to be called when all have met: nobody needs a note of where it is any more.
    """

    store: dist.Store
    host: str
    port: int
    told: tuple[str, int]
    close: Callable[[], None] = lambda: None
    everybody_came: Callable[[], None] = lambda: None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this node; ``port`` 0 for a free one.

    Raises:
        UsageError: the port is taken.
        OSError: the address is none of this node's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} is taken by another process of this machine ({host}:{port})"
            raise UsageError(explain(what, fix=_FREE)) from error
        if error.errno == errno.EACCES:
            what = f"port {port} may not be opened by this user"
            raise UsageError(explain(what, fix="choose a port above 1023")) from error
        raise


def keep(host: str, port: int, secret: bytes | None = None) -> Kept:
    """Open a store at an address of this node; with a secret, on loopback behind a door at that address."""
    listener = listen(host, port)
    told = (host, int(listener.getsockname()[1]))
    if secret is None or is_loopback(host):  # no other node comes to loopback: a door would protect nothing
        return Kept(stores.serve(listener, _STORE_S), _own(host), told[1], told)
    inner = listen(LOOPBACK, 0)
    inner_port = int(inner.getsockname()[1])
    store = stores.serve(inner, _STORE_S)
    return Kept(store, LOOPBACK, inner_port, told, Door(listener, inner_port, secret).close)


def keep_or_share(host: str, port: int, secret: bytes | None) -> Kept:
    """Open a store, or take the one that this very process has at that port already.

    A supervisor of several hosts opens one on loopback before it becomes the agent; others come by a way of its own.
    """
    try:
        return keep(host, port, secret)
    except UsageError:
        try:
            shared = stores.share(_own(host), port, _STORE_S)
        except RuntimeError:
            shared = None
        if shared is None:
            raise
        return Kept(shared, _own(host), port, (host, port))


def keep_at(listener: socket.socket, point: PortSequence) -> Kept:
    """Open a store on loopback, and its door at a socket that listens at one of the ports of ``point``."""
    address = listener.getsockname()
    inner = listen(LOOPBACK, 0)
    inner_port = int(inner.getsockname()[1])
    store = stores.serve(inner, _STORE_S)
    door = Door(listener, inner_port, point.secret)
    told = str(address[0]), int(address[1])
    is_noted = bool(point.note) and search.write_note(point, told)

    def everybody_came() -> None:
        if is_noted:
            search.remove_note(point)

    def close() -> None:
        everybody_came()
        door.close()

    return Kept(store, LOOPBACK, inner_port, told, close, everybody_came)


def find(point: PortSequence, node_rank: int, timeout_s: float) -> Kept:
    """Connect to the store of node 0 through its door, at whichever port of ``point`` that is.

    Raises:
        WorldError: there was none within ``timeout_s`` seconds.
    """
    passage = search.passage_to_rank_0(point, node_rank, timeout_s)
    store = _client(passage[0], passage[1], "the agent of node 0")
    return Kept(store, passage[0], passage[1], (passage[0], passage[1]), passage.close)


def _own(host: str) -> str:
    """What a process of this node connects to where the store listens at ``host``."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def reach(host: str, port: int, secret: bytes | None, timeout_s: float, who: str) -> Kept:
    """Connect to a store of another process; with a secret, through its door.

    Args:
        host: with ``port``, what ``Kept.told`` says.
        port: see ``host``.
        secret: of the run; None without one.
        timeout_s: how long to wait for it to be opened, in seconds.
        who: who keeps it, for the error.

    Raises:
        WorldError: nothing of the kind was there in time, or it does not know the secret.
    """
    if secret is not None and stores.loopback_address(host) is None:
        passage = pass_through(host, port, secret, timeout_s)
        store = _client(passage[0], passage[1], who)
        return Kept(store, passage[0], passage[1], (host, port), passage.close)
    _wait_for_listener(host, port, timeout_s, who)
    return Kept(_client(host, port, who), host, port, (host, port))


def _client(host: str, port: int, who: str) -> dist.Store:
    """A connection to what listens there; a program that accepts it and is silent is no store."""
    fix = "check the address and the port, that no other program has it, and that both or none have GUOZHUANG_SECRET"
    try:
        store = client.attempt(_ANSWER_S + 1.0, lambda: stores.connect(host, port, _ANSWER_S))
    except client.OverdueError:
        what = f"what listens at {host}:{port} does not answer as the store of {who} would, within {_ANSWER_S:g} s"
        raise WorldError(explain(what, fix=fix)) from None
    except RuntimeError as error:
        what = f"what listens at {host}:{port} is not the store of {who}: {str(error).splitlines()[0]}"
        raise WorldError(explain(what, fix=fix)) from error
    store.set_timeout(datetime.timedelta(seconds=_STORE_S))
    return store


def _wait_for_listener(host: str, port: int, timeout_s: float, who: str) -> None:
    """In Python, where a signal can end the waiting; torch's own waits inside one call."""
    try:
        stores.until_somebody_listens(host, port, time.monotonic() + timeout_s)
    except stores.NobodyListensError as error:
        what = f"{who} was not reached at {host}:{port} within {timeout_s:g} s: {error}"
        fix = "check that `guozhuang run` was started there, the address, the port, and firewalls between"
        raise WorldError(explain(what, fix=fix)) from error


def wait_for(store: PatientStore, key: str, timeout_s: float, who: str) -> str:
    """Read a key that ``who`` sets, in steps that a signal can come between, and what ``store.while_waiting`` raises.

    Raises:
        WorldError: it was not set within ``timeout_s`` seconds.
    """
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        what = f"{who} did not say {key!r} within {timeout_s:g} s"
        raise WorldError(explain(what, fix="look at its output")) from None
    return store.get(key).decode()


def interface_address(host: str, interface: str | None = None) -> str:
    """What node 0 listens at, so that other nodes reach it by the name ``host``.

    Its address, if it is one of this node's. If it is not (a name of a service, a translated address), or a name means
    loopback here (as a node's own name often does in /etc/hosts), the address of the interface that the user named, else of
    the one that leads out of this node.

    Args:
        host: name or address, as the agents were told.
        interface: the one that the user named (``--interface``).
    """
    if host == "localhost":
        return LOOPBACK
    found = resolve(host)
    if found[:1] == [host] and is_loopback(host):
        return host
    for address in found:
        if not is_loopback(address) and is_ours(address):
            return address
    if interface is not None:
        return interfaces.named(interface).address
    address = search.own_address([each for each in found if not is_loopback(each)], [])
    if found and not all(map(is_loopback, found)):
        say(
            f"{host} is no address of this node ({socket.gethostname()}): the store is at {address}, to which it must lead"
        )
    return address


def meeting_address(host: str, interface: str | None = None) -> str:
    """What an agent connects to: ``host``, but where that name leads to loopback on its own node; see ``interface_address``."""
    is_name_of_this_node = (
        host != "localhost" and host not in resolve(host) and stores.loopback_address(host) is not None
    )
    return interface_address(host, interface) if is_name_of_this_node else host


def say_if_open(kept: Kept, secret: bytes | None) -> None:
    """Tell the user where other nodes reach the store, if whoever reaches it is let in."""
    host, port = kept.told
    if secret is None and not is_loopback(host):
        what = "with the same GUOZHUANG_SECRET on all nodes it would ask for it"
        say(f"the store is at {host}:{port}, open to whoever reaches that; {what}")


def is_ours(address: str) -> bool:
    """Whether the address belongs to an interface of this node."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
