"""What shared memory does not carry: tensors on accelerators, and sparse ones. Groups of PyTorch's own do, made when needed.

``torch.distributed`` forgets the backends of other devices when a group written in Python comes along, as in
"cpu:shm,cuda:nccl"; so such a group has to bring them itself.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import PeerLost, UsageError, WorldError, explain
from guozhuang.groups.base import PythonGroup

from .works import Done, take_timeout

_LOOPBACK = "127.0.0.1"
_SLICE = datetime.timedelta(seconds=0.2)  # between two looks at the other processes
_PATIENCE_S = 0.3  # a process's connections end before the process does


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
        # Not above: that package is made of this one.
        from guozhuang.groups.hierarchical.crossing import Crossing

        super().__init__(rank, size, "gloo")
        self._timeout_s = timeout.total_seconds()
        store.set(f"process/{rank}", str(os.getpid()))
        # All ranks are on this node: nothing needs to be heard outside of it.
        self._gloo = Crossing(store, rank, size, self._timeout_s, _LOOPBACK)
        self._pids = [int(store.get(f"process/{peer}")) for peer in range(size)]
        self._pidfds = {peer: fd for peer, pid in enumerate(self._pids) if peer != rank and (fd := _open(pid)) >= 0}
        self._close = weakref.finalize(self, _close, list(self._pidfds.values()))

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
                return Done(tensors)
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


def _open(pid: int) -> int:
    """A descriptor that is readable once the process is gone; -1 where the system has none, or the process."""
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return -1


def _close(fds: list[int]) -> None:
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
