"""Allocates tensors of a rank in memory that its peers can map, for ``group.empty``.

A rank allocates alone. Peers receive a segment when one of its tensors is first used in a collective: the rank sends them the
segment's descriptor before it arrives at the barrier, and they map it after the barrier. When the last tensor in a segment is
gone, the rank drops the segment and sends the peers a note, which they read when they next drain their sockets; they unmap
the segment when they next begin an operation.

[Note: tensors die anywhere] The last reference to a tensor may go in any thread, also by garbage collection inside a method
of this class, under its lock. The finalizer therefore only queues the segment's number; the queue is processed by any caller
that gets the lock without waiting, and by the holder of the lock after releasing it. A forked process inherits tensors and
sockets: a tensor that dies there says nothing about the rank's own tensors, so there the finalizer does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from guozhuang.errors import UsageError, explain

from .rendezvous import Peers
from .segments import Segment

_TIMEOUT_S: Final = 60.0  # to send or receive a segment's descriptor: both ranks are in the same collective then
_ALIGNMENT_BYTES: Final = 64  # a cache line; more than any vector register
_SLAB_BYTES: Final = 1 << 20  # size of a segment that small tensors share
_SMALL_BYTES: Final = 64 << 10  # tensors up to this size are small
_LOCATED_PER_LOOK: Final = 64  # calls of ``locate`` between two reads of the peers' messages; ``empty`` reads them too


@dataclass
class _Shared:
    """A segment of this rank, and how much of it is in use.

    Attributes:
        number: the key by which peers request the segment.
        segment: the segment itself.
        num_tensors: how many storages in it are alive.
        num_bytes: how many bytes have been allocated from it.
        is_announced: whether it has been sent to the peers.
    """

    number: int
    segment: Segment
    num_tensors: int = 0
    num_bytes: int = 0
    is_announced: bool = False


class Arena:
    """The segments of shared memory in which one rank allocates tensors. Thread-safe.

    Args:
        peers: the ranks that map the segments.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards the attributes below, except reads of _by_address
        self._shared: dict[int, _Shared] = {}
        # Sorted addresses, and the segments there; replaced as a whole, so that readers need no lock.
        self._by_address: tuple[list[int], list[_Shared]] = ([], [])
        self._slab: _Shared | None = None  # the segment in which the next small tensor is allocated
        self._next = 1
        self._is_closed = False
        self._gone: deque[int] = deque()  # segment numbers, one per dead storage. See [Note: tensors die anywhere]
        self._announcing = threading.Lock()
        self._num_located = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized 1-d tensor in memory that peers can map, aligned to 64 bytes. Not collective.

        Its memory is committed at once. The tensor and views of it may outlive the arena and the group.

        Raises:
            UsageError: a negative size, or more memory than is available.
        """
        if num_elements < 0:
            raise UsageError(explain("num_elements must not be negative", value=num_elements, rank=self._peers.rank))
        num_bytes = num_elements * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        with self._changing():
            if self._is_closed:
                raise UsageError(explain("this group was destroyed", rank=self._peers.rank, fix="make a new group"))
            shared = self._with_room(num_bytes)
            gone = functools.partial(self._on_gone, shared.number)
            tensor = shared.segment.tensor(shared.num_bytes, num_elements, dtype, when_gone=gone)
            shared.num_tensors += 1
            shared.num_bytes += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._peers.drain()
        return tensor

    def locate(self, address: int, num_bytes: int) -> tuple[int, int] | None:
        """Return where so many bytes of a living tensor lie, in the form that is sent to peers.

        Returns:
            (number of the segment, offset in bytes); None if they are not entirely in a segment of this rank.
        """
        addresses, there = self._by_address
        self._num_located += 1
        if self._num_located % _LOCATED_PER_LOOK == 0:
            self._peers.drain()
        if not addresses:
            return None
        at = bisect_right(addresses, address) - 1
        if at < 0:
            return None
        segment = there[at].segment
        offset_bytes = address - segment.address
        return (there[at].number, offset_bytes) if offset_bytes + num_bytes <= segment.num_bytes else None

    def announce(self, number: int) -> None:
        """Send a segment to all peers, unless that was done before; call it before the operation that first uses the segment.

        Raises:
            PeerLost: a peer is gone, left the group, or did not receive it in time.
        """
        shared = self._shared[number]  # exists, since the caller holds a tensor in it
        if shared.is_announced:
            return
        with self._announcing:
            if not shared.is_announced:
                self._peers.send_segment(number, shared.segment, _TIMEOUT_S)
                shared.is_announced = True
                shared.segment.close_descriptor()

    def address_at(self, rank: int, number: int, offset_bytes: int) -> int:
        """Return the address in this process of an offset in a rank's announced segment; map the segment on first use.

        Raises:
            PeerLost: the rank is gone, left the group, or did not send the segment in time.
        """
        if rank == self._peers.rank:
            return self._shared[number].segment.address + offset_bytes
        return self._peers.receive_segment(rank, number, _TIMEOUT_S).address + offset_bytes

    def close(self) -> None:
        """Drop all segments. Tensors that still exist keep their memory, for this process only."""
        with self._changing():
            self._is_closed = True
            for shared in self._shared.values():
                shared.segment.close()
            self._shared.clear()
            self._by_address, self._slab = ([], []), None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            yield
        self._work_off()

    def _on_gone(self, number: int) -> None:
        """Record that a tensor in this segment has died; may run in any thread. See [Note: tensors die anywhere]."""
        if os.getpid() == self._process:
            self._gone.append(number)
            self._work_off()

    def _work_off(self) -> None:
        while self._gone and self._lock.acquire(blocking=False):
            try:
                while self._gone:
                    self._forget(self._gone.popleft())
            finally:
                self._lock.release()

    # The methods below run while ``_lock`` is held.

    def _with_room(self, num_bytes: int) -> _Shared:
        if num_bytes > _SMALL_BYTES:
            return self._make(num_bytes)
        if self._slab is None or self._slab.num_bytes + num_bytes > _SLAB_BYTES:
            full, self._slab = self._slab, self._make(_SLAB_BYTES)
            if full is not None:
                self._drop_if_unused(full)
        return self._slab

    def _make(self, num_bytes: int) -> _Shared:
        segment = Segment.create(num_bytes, f"guozhuang-arena-{self._peers.rank}", committed=True)
        shared = _Shared(self._next, segment)
        self._next += 1
        self._shared[shared.number] = shared
        self._sort()
        return shared

    def _sort(self) -> None:
        there = sorted(self._shared.values(), key=lambda shared: shared.segment.address)
        self._by_address = [shared.segment.address for shared in there], there

    def _forget(self, number: int) -> None:
        shared = self._shared.get(number)
        if shared is not None:  # None: the arena was closed
            shared.num_tensors -= 1
            self._drop_if_unused(shared)

    def _drop_if_unused(self, shared: _Shared) -> None:
        if shared.num_tensors:
            return
        if shared is self._slab:
            shared.num_bytes = 0  # keep the segment; the next small tensor begins at its start
            return
        del self._shared[shared.number]
        self._sort()
        shared.segment.close()
        if shared.is_announced:
            self._peers.tell_freed(shared.number)
