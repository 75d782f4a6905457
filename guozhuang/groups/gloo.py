"""Gloo groups with connections that can be cut, groups that a rank can abort, and NCCL for the GPU tensors of other groups.

[Note: cutting a crossing]
A rank that loses a peer raises within a second, but its partners on other nodes still wait for it in gloo: gloo reports
nothing to them while this process lives, and has no call to stop it. So a rank that fails shuts down its own gloo connections:
`shutdown(2)` on the sockets, which gloo's threads on both ends see as a closed connection. The partners fail because of this,
cut their own connections, and abort the group inside their node, so that its ranks fail too. So a failure reaches every rank
over a chain of connections, some milliseconds each, and no unfinished work is left that would keep a process from ending.
A socket is gloo's if its own port, or its peer's port, is one on which a gloo device of this group listens. Every rank
publishes the address of its device when the group is made.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.groups import roll_call, subgroups
from guozhuang.groups.agreement import STORE_S, store_of
from guozhuang.groups.base import PythonGroup
from guozhuang.net.client import within
from guozhuang.net.interfaces import LOOPBACK, is_loopback, own_address_towards
from guozhuang.net.store import innermost
from guozhuang.units import ranks_text
from guozhuang.watch.processes import open_descriptors
from guozhuang.world import requested_gloo_interface

_ABORTED, _NOTICES = "guozhuang/aborted", "the store, which tells whether a group was aborted"


class Connections:
    """The connections of a gloo group, which a rank can cut. It must be constructed before the group is made.

    Meanwhile no other thread of this process should begin to listen on a socket.
    """

    def __init__(self) -> None:
        self._before = {fd for fd, _ in _listeners()}
        self._ours: set[tuple[str, int]] = set()

    def learn(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        """Learn, once the group is made, where its devices listen. Every rank of the group must call it.

        Args:
            store: a store that only this group uses.
            rank: this process within the group.
            size: the number of its ranks.
            timeout_s: limit of the wait for the other ranks, in seconds.

        Raises:
            WorldError: a rank did not come in time; the text names it.
        """
        mine = sorted(name for fd, name in _listeners() if fd not in self._before)
        self._ours = set(mine)
        card, purpose = ",".join(f"{host} {port}" for host, port in mine), "to connect a gloo group"
        for text in roll_call.call(store, "listens", rank, size, card, timeout_s, purpose=purpose, named=ranks_text):
            self._ours |= {(host, int(port)) for host, port in (one.split() for one in text.split(",") if one)}

    def cut(self) -> None:
        """Shut down every connection, so that works fail on both ends. See [Note: cutting a crossing]."""
        for fd in _sockets():
            with contextlib.suppress(OSError), _borrowed(fd) as each:
                if _is_stream(each) and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ends = (each.getsockname()[:2], each.getpeername()[:2])
                    if any(end in self._ours for end in ends):
                        each.shutdown(socket.SHUT_RDWR)


class Crossing:
    """A gloo process group (``group``) of some ranks, whose connections a rank can cut, so that waiting peers fail.

    All of these ranks must construct it; it returns when all have connected.

    Args:
        store: a store that only this crossing uses.
        rank: this process within the crossing.
        size: the number of its ranks.
        timeout_s: limit of each operation, in seconds.
        address: the local address to listen on and to connect from, see ``choose_address``; "": gloo uses the interfaces
            that GLOO_SOCKET_IFNAME names.

    Raises:
        WorldError: a rank did not connect in time; the text names it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float, address: str) -> None:
        self._connections = Connections()
        devices = _devices(address)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = devices
        options._threads = 2 * len(devices)
        options._timeout = datetime.timedelta(seconds=timeout_s)
        backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
        kind = dist.ProcessGroup.BackendType.GLOO
        group: Any = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(kind)
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), kind, backend)
        self._group: Any = group
        # A rank that closed its connections while another rank still connects would leave that one waiting for gloo's limit.
        self._connections.learn(store, rank, size, timeout_s)

    @property
    def group(self) -> Any:
        """Return the gloo process group of this crossing.

        Raises:
            WorldError: the crossing was closed.
        """
        if self._group is None:
            raise WorldError(explain("this group was shut down", fix="make a new group"))
        return self._group

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the limit of each operation that begins from now on."""
        self.group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)

    def close(self) -> None:
        """Drop the gloo group, which ends its threads and connections after its unfinished works. Not collective."""
        self._group = None

    def cut(self) -> None:
        """Shut down every connection of the gloo group, so that works fail on both ends. See [Note: cutting a crossing]."""
        self._connections.cut()


def choose_address(store: dist.Store, rank: int, others: Sequence[int]) -> str:
    """Return the local address that other nodes can reach; "" if GLOO_SOCKET_IFNAME is set. Every rank must call it.

    The address is the source address of the route to the store's host. A rank on that host may know it by a loopback name
    only; it uses the route to the first rank of another node that has an address. If no such rank exists, as when the "nodes"
    are processes of one machine, it returns the loopback address.

    Args:
        store: a store used for this purpose only.
        rank: this process.
        others: the ranks of the other nodes.
    """
    if requested_gloo_interface() is not None:
        return ""
    mine = _route_to(_host_of(store))
    store.set(f"address/{rank}", mine)
    for other in others if not mine else ():
        theirs = store.get(f"address/{other}").decode()
        mine = _route_to(theirs) if theirs else ""
        if mine:
            return mine
    return mine or LOOPBACK


def _devices(address: str) -> list[dist.ProcessGroupGloo.Device]:
    if address:
        return [dist.ProcessGroupGloo.create_device(hostname=address)]
    names = (requested_gloo_interface() or "").split(",")
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names]


def _host_of(store: dist.Store) -> str:
    store = innermost(store)
    return str(store.host) if isinstance(store, dist.TCPStore) else ""


def _route_to(host: str) -> str:
    """Return the local address of the route to a host; "" if it is a loopback address or no route exists. Sends nothing."""
    with contextlib.suppress(WorldError):
        if host and not is_loopback(address := own_address_towards(host)):
            return address
    return ""


def _sockets() -> list[int]:
    """Return this process's socket descriptors; none where the system does not list them."""
    return [fd for fd, target in open_descriptors().items() if target.startswith("socket:")]


def _borrowed(fd: int) -> socket.socket:
    """Return a socket object over a duplicate of the descriptor, so that closing it leaves the original open."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_stream(each: socket.socket) -> bool:
    return each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM


def _listeners() -> list[tuple[int, tuple[str, int]]]:
    found = []
    for fd in _sockets():
        with contextlib.suppress(OSError), _borrowed(fd) as each:
            if _is_stream(each) and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                host, port = each.getsockname()[:2]
                found.append((fd, (str(host), int(port))))
    return found


class AbortableGroup:
    """A group of some ranks, like that of :func:`subgroups.subgroup`, whose waiting collectives each of its ranks can end.

    Every member must construct it, and no other rank. Collectives of it are called through ``torch.distributed``.

    [Note: aborted or lost] Aborting ends the connections of the group, which its other ranks see as if this one were lost.
    So a rank that aborts leaves a notice in the store first, and a rank whose collective has failed looks for one. If it
    finds one, it ends its own connections too: another rank may wait for it, and has no connection to the one that aborted.

    Args:
        group: a group made by ``torch.distributed`` or registered with it.
        members: ranks in ``group``, rising; this rank is one of them.

    Attributes:
        aborted_by: who aborted it, as "this rank" or "rank 3" of it; "" as long as this rank knows of nobody.

    Raises:
        WorldError: a member did not come within the time-out of the group; the text names it.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        backends = dist.get_backend_config(group).split(",")
        has_gloo = len(members) > 1 and any(each.rpartition(":")[2] == "gloo" for each in backends)
        connections = Connections() if has_gloo else None
        made = subgroups.subgroup(group, members)
        if connections is not None:
            connections.learn(store_of(made), made.rank(), made.size(), subgroups.timeout_s(made))
        self._group, self._connections, self._store = weakref.ref(made), connections, store_of(made)
        self.aborted_by = ""

    @property
    def group(self) -> dist.ProcessGroup:
        """The group.

        Raises:
            WorldError: it was destroyed, as all groups are with the default one.
        """
        found = self._group()
        if found is None or not subgroups.is_open(found):
            raise WorldError(explain("the process group was destroyed", fix="make a new one after init_process_group"))
        return found

    def abort(self) -> None:
        """End waiting collectives, here and on the other ranks, with an error. The group is of no use then. Any thread."""
        made = self._group()
        if self.aborted_by or made is None or not subgroups.is_open(made):
            return
        self.aborted_by = "this rank"
        with contextlib.suppress(WorldError, RuntimeError):
            within(STORE_S, _NOTICES, lambda: self._store.set(_ABORTED, f"rank {made.rank()}"), rank=made.rank())
        end_waits(made, self._connections)

    def look(self) -> str:
        """Look for another rank's notice, set ``aborted_by`` from it, and return that. See [Note: aborted or lost]."""
        if not self.aborted_by:
            with contextlib.suppress(WorldError, RuntimeError):
                if within(STORE_S, _NOTICES, lambda: self._store.check([_ABORTED])):
                    self.aborted_by = within(STORE_S, _NOTICES, lambda: self._store.get(_ABORTED)).decode()
            if self.aborted_by and (made := self._group()) is not None:
                end_waits(made, self._connections)
        return self.aborted_by


def end_waits(made: Any, connections: Connections | None = None) -> None:
    """End what waits in a group, here and on the other ranks, with an error. Any thread may call it.

    Args:
        made: a group made by ``subgroups.subgroup``.
        connections: those of gloo, which has no call that ends a wait.
    """
    if isinstance(made, PythonGroup):
        made.abort()
        return
    if connections is not None:
        connections.cut()
    for device in made._device_types:
        with contextlib.suppress(Exception):  # gloo's does nothing; a group that raises is broken already
            made._get_backend(device).abort()


class OtherDevices:
    """Holds PyTorch's groups for the tensors of a group that are not on the CPU: NCCL for CUDA, made when first needed.

    When a group written in Python is made, as for "cpu:shm,cuda:nccl", ``torch.distributed`` drops the backends of other
    devices; so such a group has to make them itself.

    Args:
        store: a key-value store that only these groups use.
        rank: this process in the group.
        size: number of ranks.
        timeout: limit of the creation and of each collective.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._nccl: dist.ProcessGroup | None = None

    def devices(self) -> list[torch.device]:
        """Return the types of accelerators whose tensors ``group_on`` has a group for."""
        return [torch.device("cuda")] if dist.is_nccl_available() and torch.cuda.is_available() else []

    def group_on(self, device: torch.device) -> dist.ProcessGroup:
        """Return the group for tensors on a device, made on the first call. Every rank must call it.

        Raises:
            NoBackendError: no group supports this device.
        """
        if torch.device(device.type) not in self.devices():
            what = f'the "shm" group carries CPU tensors; it has nothing for {device.type}'
            fix = 'move the tensor to the CPU, or make another group for it: new_group(backend="nccl")'
            raise NoBackendError(explain(what, rank=self._rank, fix=fix))
        if self._nccl is None:
            store, backend_type = dist.PrefixStore("cuda/", self._store), dist.ProcessGroup.BackendType.NCCL
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._nccl = dist.ProcessGroup(store, self._rank, self._size)
            self._nccl._set_default_backend(backend_type)
            backend = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
            self._nccl._register_backend(torch.device("cuda"), backend_type, backend)
        return self._nccl

    def end(self, *, at_once: bool) -> None:
        """End the groups for other devices: abort them if ``at_once``, else shut them down."""
        group, self._nccl = self._nccl, None
        if group is not None:
            (group.abort if at_once else group.shutdown)()


class NoBackendError(UsageError, RuntimeError):
    """A tensor is on a device that the group does not support. Also a RuntimeError, which torch.distributed catches."""
