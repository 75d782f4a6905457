"""Memory that all ranks of a group map for as long as they like, and barriers around what they do with it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from typing import Any, Final

import torch
from torch import Tensor

from guozhuang.errors import WorldError, explain

from .control import PRIVATE_BYTES
from .link import Link
from .process_group import SharedMemoryGroup
from .segments import LIBC, Mapping, Segment

_CARD: Final = struct.Struct("<iq")  # descriptor in the rank that made the segment, bytes
_WELL, _ILL = b"+", b"-"  # what a rank says first
_MOST_WORDS: Final = PRIVATE_BYTES - 1


class SharedSegments:
    """Segments beside the group's own, and its barriers. Every rank must make one and call its methods alike.

    Args:
        group: the ranks.
    """

    def __init__(self, group: SharedMemoryGroup) -> None:
        self._group = group
        self._link: Link = group._resources.link
        self._pids = group._resources._peers.pids
        self.rank, self.size = group.rank(), group.size()

    def meet(self, what: bytes, private: bytes = b"") -> tuple[bytes, ...]:
        """Wait for all ranks, in turn with the group's collectives, on the caller's thread.

        What a rank wrote to shared memory before it came is seen by all afterwards.

        Args:
            what: compared; ranks that come for different things raise. At most 256 bytes.
            private: told to all ranks, at most 128 bytes.

        Returns:
            What each rank told.

        Raises:
            PeerLost: a rank is gone, or did not come within the group's time-out.
            MismatchError: ranks came for different things.
        """
        told: tuple[bytes, ...] = ()
        group, link = self._group, self._link

        def job() -> None:
            nonlocal told
            told = link.meet(what, (group._timeout_s, group._sync_spin_us), private)

        group._turns.now(job, (), "a meeting in shared memory")
        return told

    def make(self, num_bytes: int, name: str) -> list[Segment | None]:
        """Give each rank a segment that all ranks map. Every rank must call it.

        Args:
            num_bytes: of this rank's segment, zeros at first; 0 for none.
            name: shown in /proc/PID/maps.

        Returns:
            The segment of every rank, None for those that made none. Descriptors are open: the caller closes them.

        Raises:
            UsageError: the machine has not that much memory; it is raised here alone, and the peers learn of it.
            WorldError: a peer could not make its segment, or map another's; this system may not let a process map what
                another one of the same user made.
            PeerLost: a rank is gone.
            After the first two nothing is left open on any rank, and the group goes on.
        """
        what = b"sharing memory: " + name.encode()[:64]
        found: list[Segment | None] = [None] * self.size
        refused: Exception | None = None
        with contextlib.ExitStack() as on_failure:
            own_fd = -1
            try:
                if num_bytes:
                    found[self.rank] = own = Segment.create(num_bytes, name)
                    on_failure.callback(own.close)
                    own_fd = own.fd
            except Exception as error:
                refused = error
            cards = self._meet_if_well(what, refused, _CARD.pack(own_fd, num_bytes))
            try:
                for rank, card in enumerate(cards):
                    fd, size = _CARD.unpack_from(card)
                    if rank != self.rank and fd >= 0:
                        found[rank] = other = Segment.adopt(self._open(rank, fd), size)
                        on_failure.callback(other.close)
            except Exception as error:
                refused = error
            self._meet_if_well(what + b", done", refused)
            on_failure.pop_all()
        return found

    def _meet_if_well(self, what: bytes, refused: Exception | None, private: bytes = b"") -> list[bytes]:
        """Meet, and raise on all ranks if ``refused`` tells of a failure on one, so that nobody waits for it in vain."""
        told = self.meet(what, _ILL + str(refused).encode()[:_MOST_WORDS] if refused else _WELL + private)
        if refused is not None:
            raise refused
        for rank, words in enumerate(told):
            if words[:1] == _ILL:
                text = words[1:].rstrip(b"\0").decode(errors="ignore")
                failed = f"rank {rank} (pid {self._pids[rank]}) could not share memory: {text}"
                raise WorldError(explain(failed, rank=self.rank, fix="look at that rank's own error"))
        return [words[1:] for words in told]

    def _open(self, rank: int, fd: int) -> int:
        # A second descriptor of the same anonymous file. It stays open there until the ranks have met again.
        path = f"/proc/{self._pids[rank]}/fd/{fd}"
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            what = f"the memory of rank {rank} (pid {self._pids[rank]}) cannot be opened at {path}: {error.strerror}"
            fix = "see that /proc is mounted, and that processes of one user may look at each other"
            raise WorldError(explain(what, rank=self.rank, fix=fix)) from error


class PrivateView:
    """A segment as a process sees it that may write into its own copy of a page only.

    Pages that were not written here show what is in the segment at any time, also what others write into it later; a
    page that was written here is this process's own until :meth:`forget`. (That reads of untouched private pages
    follow the file is what Linux does; :meth:`follows` finds out.)

    Attributes:
        address: where it is mapped.
        num_bytes: size.
    """

    def __init__(self, segment: Segment) -> None:
        self.num_bytes = segment.num_bytes
        try:
            self._mapping = Mapping(segment.fd, segment.num_bytes, private=True)
        except OSError as error:
            what = f"the system refused to map {segment.num_bytes} bytes: {error.strerror}"
            raise WorldError(explain(what)) from error
        self.address = self._mapping.address

    def tensor(self, offset_bytes: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-dimensional tensor over part of it, with a storage of just that part, which keeps the mapping alive."""
        if num_elements == 0:
            return torch.empty(0, dtype=dtype)
        buffer: Any = (ctypes.c_ubyte * (num_elements * dtype.itemsize)).from_address(self.address + offset_bytes)
        buffer.mapping = self._mapping
        return torch.frombuffer(buffer, dtype=dtype)

    def forget(self, start: int, end: int) -> None:
        """Drop this process's own copies of the pages that touch bytes [start, end): they show the segment again."""
        start -= start % mmap.PAGESIZE
        end = min(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, self.num_bytes)
        if start < end:
            LIBC.madvise(self.address + start, end - start, mmap.MADV_DONTNEED)

    def own_pages(self, start: int, end: int) -> list[int]:
        """Byte offsets of the pages touching [start, end) that this process has written to since they were forgotten."""
        first = (self.address + start) // mmap.PAGESIZE
        last = -(-(self.address + end) // mmap.PAGESIZE)
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = os.pread(pagemap, (last - first) * 8, first * 8)
        finally:
            os.close(pagemap)
        words = torch.frombuffer(bytearray(entries), dtype=torch.int64)
        # Bit 63: in memory; 62: swapped out, which a page of the file would not be here; 61: a page of the file.
        is_own = ((words < 0) & ((words >> 61) & 1 == 0)) | ((words >> 62) & 1 == 1)
        return [(first + int(i)) * mmap.PAGESIZE - self.address for i in is_own.nonzero().flatten()]

    def follows(self, segment: Segment, offset_bytes: int) -> bool:
        """Tell whether a change of one byte of the segment is seen here, and the other way round is not."""
        shared = ctypes.c_uint8.from_address(segment.address + offset_bytes)
        mine = ctypes.c_uint8.from_address(self.address + offset_bytes)
        before = mine.value
        shared.value = before ^ 0xFF
        seen = mine.value == before ^ 0xFF
        mine.value = before
        kept = shared.value == before ^ 0xFF
        page = offset_bytes - offset_bytes % mmap.PAGESIZE
        is_own = self.own_pages(offset_bytes, offset_bytes + 1) == [page]
        self.forget(offset_bytes, offset_bytes + 1)
        back = mine.value == before ^ 0xFF
        return seen and kept and is_own and back
