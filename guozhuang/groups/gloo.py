"""Gloo between nodes: over the interface that leads to the other nodes, and cut off at once when a rank fails.

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
import select
import socket
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import PeerLost, UsageError, WorldError, explain
from guozhuang.groups.base import PythonGroup
from guozhuang.groups.turns import DoneWork, take_timeout
from guozhuang.watch.processes import open_descriptors, pidfd_open
from guozhuang.world import requested_gloo_interface

_LOOPBACK = "127.0.0.1"
_SLICE = datetime.timedelta(seconds=0.2)  # between two looks at the other processes
_PATIENCE_S = 0.3  # a process's connections end before the process does


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
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
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
    """PyTorch's own groups of the same ranks: gloo for the CPU, NCCL for CUDA.

    Args:
        store: a key-value store of these groups alone.
        rank: this process in the group.
        size: number of ranks.
        timeout: of the creation and of each collective.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._groups: dict[str, dist.ProcessGroup] = {}

    def devices(self) -> list[torch.device]:
        """The kinds of accelerators whose tensors can be sent."""
        return [torch.device("cuda")] if dist.is_nccl_available() and torch.cuda.is_available() else []

    def group_for(self, tensor: Tensor) -> dist.ProcessGroup:
        """The group for a tensor. Every rank must ask for it."""
        return self.group_on(tensor.device)

    def group_on(self, device: torch.device) -> dist.ProcessGroup:
        """The group for a device. Every rank must use it.

        Raises:
            UsageError: there is none for this device.
        """
        kind = device.type
        if kind not in self._groups:
            self._groups[kind] = self._make(kind)
        return self._groups[kind]

    def _make(self, kind: str) -> dist.ProcessGroup:
        store = dist.PrefixStore(f"{kind}/", self._store)
        group = dist.ProcessGroup(store, self._rank, self._size)
        types = dist.ProcessGroup.BackendType
        if kind == "cpu":
            return WatchedGloo(store, self._rank, self._size, self._timeout)
        if torch.device(kind) in self.devices():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            backend = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
            backend_type = types.NCCL
        else:
            raise _no_backend(kind, self._rank)
        group._set_default_backend(backend_type)
        group._register_backend(torch.device(kind), backend_type, backend)
        return group

    def shutdown(self) -> None:
        """End the groups."""
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()

    def abort(self) -> None:
        """End the groups at once."""
        for group in self._groups.values():
            group.abort()
        self._groups.clear()


class WatchedGloo(PythonGroup):
    """Gloo for sparse tensors among ranks of one node, with an eye on their processes. Every rank must construct it.

    Gloo tells only the neighbours of a rank that dies; the others would wait for the whole time-out.

    Args:
        store: of this group alone.
        rank: this process in the group.
        size: number of ranks.
        timeout: of each call that brings none.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size, "gloo")
        self._timeout_s = timeout.total_seconds()
        store.set(f"process/{rank}", str(os.getpid()))
        # All ranks are on this node: nothing needs to be heard outside of it.
        self._gloo = Crossing(store, rank, size, self._timeout_s, _LOOPBACK)
        self._pids = [int(store.get(f"process/{peer}")) for peer in range(size)]
        self._pidfds = {
            peer: fd for peer, pid in enumerate(self._pids) if peer != rank and (fd := _open_pidfd(pid)) >= 0
        }
        self._close = weakref.finalize(self, _close_all, list(self._pidfds.values()))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Combine a tensor of all ranks; ends before it returns.

        Raises:
            PeerLost: a rank's process is gone; within half a second.
            WorldError: the time ran out, or gloo lost a connection and no process is gone.
        """
        opts = dist.AllreduceOptions() if opts is None else opts
        limit_s = take_timeout(opts) or self._timeout_s
        deadline = time.monotonic() + limit_s
        what = f"all_reduce of {str(tensors[0].dtype).removeprefix('torch.')}, sparse"
        opts.asyncOp = True
        opts.timeout = datetime.timedelta(seconds=2 * limit_s)  # this class looks at the clock; gloo only says less
        work: dist.Work = self._gloo.group.allreduce(tensors, opts)
        while True:
            has_ended = work.is_completed()
            try:
                work.wait(_SLICE)
                return DoneWork(tensors)
            except RuntimeError as error:
                # Either the slice is over, or the work failed: then it has ended, and the next look tells.
                if has_ended:
                    if "gloo/" not in str(error):
                        raise  # what it refuses, on all ranks
                    self._raise_lost(what, _PATIENCE_S)
                    self._gloo.cut()
                    text = f"a connection ended while this rank waited in {what}. Gloo says: {error}"
                    raise WorldError(explain(text, rank=self._rank, fix="look at the other ranks' errors")) from error
            self._raise_lost(what, 0.0)
            if time.monotonic() >= deadline and not work.is_completed():
                self._gloo.cut()
                text = f"the other ranks did not all come within {limit_s:.3g} s, while this one waited in {what}"
                fix = "look at what they are doing (py-spy dump --pid), or give the group a longer timeout"
                raise WorldError(explain(text, rank=self._rank, fix=fix))

    def _raise_lost(self, what: str, patience_s: float) -> None:
        """Raise if the process of a rank is gone; look again for a while."""
        deadline = time.monotonic() + patience_s
        while True:
            for peer, fd in self._pidfds.items():
                poller = select.poll()
                poller.register(fd, select.POLLIN)
                if poller.poll(0):
                    self._gloo.cut()  # what is under way ends, here and at the others
                    text = f"rank {peer} (pid {self._pids[peer]}) is gone, while this rank waited in {what}"
                    fix = "look at that rank's own error, or in the system's log if it was killed"
                    text = explain(text, rank=self._rank, fix=fix)
                    raise PeerLost(text, rank=peer, pid=self._pids[peer], waiting_in=what)
            if time.monotonic() >= deadline:
                return
            time.sleep(0.02)

    def shutdown(self) -> None:
        """End gloo's threads and connections."""
        self._gloo.close()
        self._close()

    def abort(self) -> None:
        """The same, at once: what is under way fails, here and at the other ranks."""
        self._gloo.cut()
        self.shutdown()


def _open_pidfd(pid: int) -> int:
    """A descriptor that is readable once the process is gone; -1 where the system has none, or the process."""
    with contextlib.suppress(OSError):
        return pidfd_open(pid)
    return -1


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class NoBackendError(UsageError, RuntimeError):
    """A tensor on a device that the group does not serve; a RuntimeError too, since torch.distributed catches that."""


def _no_backend(kind: str, rank: int) -> NoBackendError:
    fix = 'move the tensor to the CPU, or make another group for it: new_group(backend="nccl")'
    return NoBackendError(
        explain(f'the "shm" group carries CPU tensors; it has nothing for {kind}', rank=rank, fix=fix)
    )
