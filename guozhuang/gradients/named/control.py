"""The process groups of a channel, which carry the messages of its rounds and its data.

[Note: an idle peer is no error] A rank with a pending request waits in a round until all other ranks have one, too, which may
take an hour. So, once the group for the rounds is made, its time-out is set to a week, and the engine's watch (stalls.py) keeps
the limit instead: it knows which requests are pending and for how long. A lost peer breaks the group all the same: shared
memory checks the processes, gloo its connections. Only ``abort`` ends a wait from outside: it breaks the group here and for the
peers.

[Note: what a device has begun] A collective of NCCL has ended for the watch as soon as it lies in the device's queue; the
device may still wait there for a peer that is gone. Then NCCL's own watchdog ends the process after the time-out of the group,
unless this engine has failed before: its ``abort`` ends NCCL's communicators here, and with them that wait.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from ...groups.base import PythonGroup
from ...groups.gloo import Crossing, choose_address, end_waits
from ...groups.shared_memory import SharedMemoryGroup
from ...groups.subgroups import destroy, subgroup, timeout_s
from . import collectives

_OUT_OF_REACH_S: Final = 7 * 24 * 3600.0
# Size of the block that every message begins with, in bytes: a message that fits into it costs one all-gather.
_BLOCK: Final = 512
_LENGTH: Final = 8  # bytes at the beginning of a block that hold the length of the message


class ChannelGroups:
    """The groups of a channel. Every member of the channel must construct it, and no other rank.

    Where the engine's group is a shared-memory one, a second such group carries everything. Otherwise rounds, and CPU tensors
    under gloo, use gloo connections that can be cut; for other backends a second group like the engine's carries the data.

    Args:
        group: the group of the engine.
        members: the channel's ranks in ``group``, in rising order; this rank is one of them.
        store: a store that only this channel uses.

    Attributes:
        cpu: the group for tensors on the CPU.
        device: the group for all other tensors; the same as ``cpu`` where there are no accelerators.
        averages: types of device on which the groups average floating-point numbers by themselves.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], store: dist.Store) -> None:
        rank, size = list(members).index(group.rank()), len(members)
        self._aborts: list[Callable[[], object]] = []
        self._closes: list[Callable[[], object]] = []
        kinds = {each.rpartition(":")[2] for each in dist.get_backend_config(group).split(",")}
        control: Any
        if isinstance(group, SharedMemoryGroup):
            control = self._twin(group, members)
            control.set_timeout(datetime.timedelta(seconds=_OUT_OF_REACH_S))
        else:
            address = choose_address(dist.PrefixStore("address", store), rank, [r for r in range(size) if r != rank])
            crossing = Crossing(dist.PrefixStore("control", store), rank, size, timeout_s(group), address)
            gloo = crossing.group._get_backend(torch.device("cpu"))
            gloo._set_default_timeout(datetime.timedelta(seconds=_OUT_OF_REACH_S))
            self._aborts.append(crossing.cut)
            self._closes.append(crossing.close)
            control = crossing.group
        self._control, self._size, self.cpu, self.device = control, size, control, control
        if not isinstance(group, SharedMemoryGroup) and kinds != {"gloo"}:
            self.device = self._twin(group, members)
            if isinstance(self.device, PythonGroup):
                self.cpu = self.device
        cpu = {"cpu"} if isinstance(group, SharedMemoryGroup) else set()
        # Buffers for the first block of each rank's message; kept, because making them would take as long as a round.
        self._given = torch.zeros(_BLOCK, dtype=torch.uint8)
        self._taken = torch.zeros(size, _BLOCK, dtype=torch.uint8)
        self.averages = frozenset(cpu | ({"cuda"} if cpu or "nccl" in kinds else set()))

    def exchange(self, message: bytes) -> list[bytes]:
        """Send this rank's message to all ranks; return all messages, in rank order. Every rank calls it, from one thread."""
        if self._size == 1:
            return [message]
        data = len(message).to_bytes(_LENGTH, "little") + message
        found = self._gathered(data[:_BLOCK], self._given, self._taken)
        ends = [_LENGTH + int.from_bytes(each[:_LENGTH], "little") for each in found]
        if (longest := max(ends)) > _BLOCK:
            given = torch.zeros(longest - _BLOCK, dtype=torch.uint8)
            rest = self._gathered(data[_BLOCK:], given, given.new_empty(self._size, len(given)))
            found = [begin + end for begin, end in zip(found, rest, strict=True)]
        return [each[_LENGTH:end] for each, end in zip(found, ends, strict=True)]

    def abort(self) -> None:
        """Break the groups, here and for the peers. Any thread may call it."""
        for abort in self._aborts:
            with contextlib.suppress(Exception):  # a group that raises is broken already
                abort()

    def close(self) -> None:
        """Close the groups. No collective of this rank may be running."""
        for close in self._closes:
            close()
        self._closes, self._aborts = [], []
        self._control = self.cpu = self.device = None  # gloo's connections end with the last reference

    def _gathered(self, data: bytes, given: torch.Tensor, taken: torch.Tensor) -> list[bytes]:
        """Gather all ranks' data through these buffers; each result is as long as ``given``, padded with any bytes."""
        given.numpy().data[: len(data)] = data
        collectives.all_gather(taken.view(-1), given, self._control)
        return [each.tobytes() for each in taken.numpy()]

    def _twin(self, group: dist.ProcessGroup, members: Sequence[int]) -> Any:
        made: Any = subgroup(group, members)
        self._aborts.append(lambda: end_waits(made))
        self._closes.append(lambda: destroy(made))
        return made
