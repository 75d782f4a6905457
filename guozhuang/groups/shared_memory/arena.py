"""Tensors of a rank that its peers can see: ``group.empty``.

A rank allocates on its own. Peers learn of a segment when it takes part in a collective for the first time: the rank sends them
its descriptor before it arrives there, and they map it after the ranks have met. When the last tensor in a segment is gone the
rank forgets the segment and leaves the peers a note, which they take when they next look; they unmap it when they next begin
an operation.

[Note: tensors die anywhere] The last reference to a tensor may go in any thread, also by garbage collection in the middle of a
method of this class, under its lock. What is called then only notes the segment's number; the numbers are worked off by whoever
can take the lock without waiting, and by whoever holds it, after letting go. A process that was forked off inherits tensors and
sockets: a tensor that dies there says nothing about the rank's own, so there the call does nothing at all.
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

_TIMEOUT_S: Final = 60.0  # for handing over a descriptor; both ends are in the same collective by then
_ALIGNMENT_BYTES: Final = 64  # a cache line; more than any vector register
_SLAB_BYTES: Final = 1 << 20  # a segment that small tensors share
_SMALL_BYTES: Final = 64 << 10  # at most this long is small
_LOCATED_PER_LOOK: Final = 64  # a rank that allocates nothing itself must still take notes of what its peers freed


@dataclass
class _Shared:
    """A segment of this rank.

    Attributes:
        number: by which peers ask for it.
        segment: it.
        num_tensors: storages alive in it.
        num_bytes: taken from it so far.
        is_announced: whether the peers have been sent it.
    """

    number: int
    segment: Segment
    num_tensors: int = 0
    num_bytes: int = 0
    is_announced: bool = False


class Arena:
    """The segments of one rank. Its methods may be called from several threads.

    Args:
        peers: who gets to see them.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._process = os.getpid()
        self._lock = threading.Lock()  # over what follows, but for reading _by_address
        self._shared: dict[int, _Shared] = {}
        # Addresses in order, and what lies there; replaced as a whole, so that it can be read without the lock.
        self._by_address: tuple[list[int], list[_Shared]] = ([], [])
        self._slab: _Shared | None = None  # where the next small tensor goes
        self._next = 1
        self._is_closed = False
        self._gone: deque[int] = deque()  # a number for each storage that is gone. See [Note: tensors die anywhere]
        self._announcing = threading.Lock()
        self._num_located = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A 1-d tensor of undefined contents in memory that peers can see, aligned to 64 bytes. Not collective.

        Its memory is committed. It, and views of it, can outlive the arena and the group.

        Raises:
            UsageError: a size below zero, or more memory than there is.
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

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Where a tensor lies, as peers are told of it.

        Returns:
            (number of the segment, offset in bytes); None if it is not wholly in a segment of this rank, or not contiguous.
        """
        addresses, there = self._by_address
        self._num_located += 1
        if self._num_located % _LOCATED_PER_LOOK == 0:
            self._peers.drain()
        if not addresses:
            return None
        address = tensor.data_ptr()
        at = bisect_right(addresses, address) - 1
        if at < 0:
            return None
        segment = there[at].segment
        offset_bytes = address - segment.address
        if offset_bytes + tensor.numel() * tensor.element_size() > segment.num_bytes or not tensor.is_contiguous():
            return None
        return there[at].number, offset_bytes

    def announce(self, number: int) -> None:
        """Send a segment to all peers, if that was not done yet; before the operation that first uses it.

        Raises:
            PeerLost: a peer is gone, left, or took nothing in time.
        """
        shared = self._shared[number]  # alive, as the caller holds a tensor in it
        if shared.is_announced:
            return
        with self._announcing:
            if not shared.is_announced:
                self._peers.send_segment(number, shared.segment, _TIMEOUT_S)
                shared.is_announced = True
                shared.segment.close_descriptor()

    def address_at(self, rank: int, number: int, offset_bytes: int) -> int:
        """Where this process sees a place in a rank's segment, which that rank has announced; maps it on first use.

        Raises:
            PeerLost: the rank is gone, left, or did not send the segment in time.
        """
        if rank == self._peers.rank:
            return self._shared[number].segment.address + offset_bytes
        return self._peers.receive_segment(rank, number, _TIMEOUT_S).address + offset_bytes

    def close(self) -> None:
        """Forget all segments. Tensors that are still there keep their memory, for this process alone."""
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
        """See [Note: tensors die anywhere]."""
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

    # Below, everything runs under the lock.

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
        if shared is not None:  # else the arena was closed
            shared.num_tensors -= 1
            self._drop_if_unused(shared)

    def _drop_if_unused(self, shared: _Shared) -> None:
        if shared.num_tensors:
            return
        if shared is self._slab:
            shared.num_bytes = 0  # from the start again
            return
        del self._shared[shared.number]
        self._sort()
        shared.segment.close()
        if shared.is_announced:
            self._peers.tell_freed(shared.number)
