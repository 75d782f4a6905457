"""Groups of PyTorch's own that ours stand on: gloo between nodes, which can be cut off, and NCCL for other devices.

[Note: cutting a crossing]
A rank that loses a peer raises within a second, but its partners on other nodes wait for it in gloo, which tells them nothing
while this process lives, and cannot be told to stop. So a rank that fails shuts its own gloo connections down: `shutdown(2)`
on the sockets, which gloo's own threads then see as a closed connection, here and on the other side. The partners fail for
that reason, cut their own, and tell the ranks of their node through the group inside it. So a failure reaches every rank in
as many steps as there are links between them, some milliseconds each, and no work is left in flight that would keep a process
from leaving. Which sockets are gloo's: those whose own port, or whose peer's port, is one on which a gloo device of this group
listens. Every rank publishes the address of its device when the group is made.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net.store import innermost
from guozhuang.watch.processes import open_descriptors
from guozhuang.world import requested_gloo_interface

_LOOPBACK = "127.0.0.1"


class Crossing:
    """A gloo group among some ranks, usable as a process group, whose connections can be cut.

    Every rank of it must construct it.

    Args:
        store: of this crossing alone.
        rank: this process within the crossing.
        size: how many ranks it joins.
        timeout_s: limit of each operation, in seconds.
        address: the local address to listen on and to connect from, see ``choose_address``; "": what gloo itself was told
            to use (GLOO_SOCKET_IFNAME).
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float, address: str) -> None:
        before = {fd for fd, _ in _listeners()}
        devices = _devices(address)
        mine = sorted(name for fd, name in _listeners() if fd not in before)
        store.set(f"listens/{rank}", ",".join(f"{host} {port}" for host, port in mine))
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
        self._ours = set(mine)
        for other in range(size):  # gloo is connected, so all have set it
            text = store.get(f"listens/{other}").decode()
            self._ours |= {(host, int(port)) for host, port in (one.split() for one in text.split(",") if one)}

    @property
    def group(self) -> Any:
        """The process group; calls on it go to gloo.

        Raises:
            WorldError: it was closed.
        """
        if self._group is None:
            raise WorldError(explain("this group was shut down", fix="make a new group"))
        return self._group

    def close(self) -> None:
        """Let gloo end its threads and connections, after what they still have to do. Not collective."""
        self._group = None

    def cut(self) -> None:
        """End every connection: what is under way fails here and at the other ends. See [Note: cutting a crossing]."""
        for fd in _sockets():
            with contextlib.suppress(OSError), _borrowed(fd) as each:
                if _is_stream(each) and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ends = (each.getsockname()[:2], each.getpeername()[:2])
                    if any(end in self._ours for end in ends):
                        each.shutdown(socket.SHUT_RDWR)


def choose_address(store: dist.Store, rank: int, others: Sequence[int]) -> str:
    """The local address from which the other nodes are reached; "" where gloo was told by GLOO_SOCKET_IFNAME.

    It is the source address of the route to the host that keeps the store. A rank on that host itself may know it by a
    loopback name; it takes the route to the first rank of another node that has an address. Without any such rank, where
    "nodes" are processes of one machine, it is the loopback address. Every rank must call.

    Args:
        store: of this purpose alone.
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
    return mine or _LOOPBACK


def _devices(address: str) -> list[dist.ProcessGroupGloo.Device]:
    if address:
        return [dist.ProcessGroupGloo.create_device(hostname=address)]
    names = (requested_gloo_interface() or "").split(",")
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names]


def _host_of(store: dist.Store) -> str:
    store = innermost(store)
    return str(store.host) if isinstance(store, dist.TCPStore) else ""


def _route_to(host: str) -> str:
    """The local address of the route to a host; "" if that is a loopback address or there is none. Sends nothing."""
    if not host:
        return ""
    try:
        found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, where in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            address = str(probe.getsockname()[0])
            if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                return address
    return ""


def _sockets() -> list[int]:
    """The descriptors of this process that are sockets; none where the system does not list them."""
    return [fd for fd, target in open_descriptors().items() if target.startswith("socket:")]


def _borrowed(fd: int) -> socket.socket:
    """A socket object over a copy of the descriptor, so that closing it closes nothing of others."""
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


class OtherDevices:
    """PyTorch's own groups of the same ranks for tensors that are not on the CPU: NCCL for CUDA. Made when first needed.

    ``torch.distributed`` forgets the backends of other devices when a group written in Python comes along, as in
    "cpu:shm,cuda:nccl"; so such a group has to bring them itself.

    Args:
        store: a key-value store of these groups alone.
        rank: this process in the group.
        size: number of ranks.
        timeout: of the creation and of each collective.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._nccl: dist.ProcessGroup | None = None

    def devices(self) -> list[torch.device]:
        """The kinds of accelerators whose tensors can be sent."""
        return [torch.device("cuda")] if dist.is_nccl_available() and torch.cuda.is_available() else []

    def group_on(self, device: torch.device) -> dist.ProcessGroup:
        """The group for a device. Every rank must use it.

        Raises:
            NoBackendError: there is none for this device.
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
        """End the groups."""
        group, self._nccl = self._nccl, None
        if group is not None:
            (group.abort if at_once else group.shutdown)()


class NoBackendError(UsageError, RuntimeError):
    """A tensor on a device that the group does not serve; a RuntimeError too, since torch.distributed catches that."""
