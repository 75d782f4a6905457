"""Memory that several processes map: anonymous files (memfd) that have no name in any file system.

A segment exists as long as a process maps it or has its descriptor, so no file remains however processes end, and the size of
/dev/shm does not matter.

[Note: who keeps a mapping] A tensor's Python object may die while C++ still uses its storage, so no lifetime here depends on
tensor objects. Each tensor's storage owns a small buffer object (torch.frombuffer), the buffer owns the mapping, and so does
the Segment until it is closed: the last of these owners to die unmaps. The mapping is made without Python's mmap module, which
would keep a second descriptor open. In a forked process this happens to its own copy of the mapping, independently.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import Tensor

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.watch.processes import has_sealed_size, memfd_create, path_of, seal_size
from guozhuang.world import machine

from .engine import PRIVATE_BYTES

if TYPE_CHECKING:
    from .process_group import SharedMemoryGroup

_CARD: Final = struct.Struct("<iq")  # the segment's descriptor in the rank that made it; its size in bytes
_WELL, _ILL = b"+", b"-"  # the first byte of a rank's message: success or failure
_MOST_WORDS: Final = PRIVATE_BYTES - 1
_SHMEM_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_PAGE_BYTES: Final = 2 << 20
# Pages are committed when they are first touched. A request beyond the machine's memory would end in the kernel's OOM
# killer, long after the call that made it; from this size on, the call checks the available memory first.
_LOOK_FIRST_BYTES: Final = 16 << 20
_MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; commits pages as if each were written to
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
LIBC: Final = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
LIBC.munmap.argtypes = LIBC.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Segment:
    """One mapping of an anonymous shared file. Made by ``create`` or ``adopt``.

    Attributes:
        fd: descriptor of the file, closed on exec; -1 after it was closed.
        num_bytes: size of the segment.
        address: the address of this process's mapping; page-aligned.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        assert num_bytes > 0
        self.num_bytes = num_bytes
        self._mapping: Mapping | None = Mapping(fd, num_bytes)
        self.address = self._mapping.address
        self.fd = fd

    @classmethod
    def create(cls, num_bytes: int, name: str, *, committed: bool = False) -> Segment:
        """Create a segment of zeros.

        Args:
            num_bytes: its size, fixed from then on; > 0.
            name: shown in the kernel's lists of mappings and descriptors; need not be unique.
            committed: commit the memory now, so that a shortage is an error here and does not kill the process later.

        Raises:
            UsageError: more memory than the machine has available.
            WorldError: the system refuses for another reason (limits of open files or of address space).
        """
        if num_bytes >= _LOOK_FIRST_BYTES and num_bytes > (available := machine.available_bytes()):
            _refuse_size(num_bytes, f"{available} bytes are left on this machine (or in its control group)")
        fd, segment = -1, None
        try:
            fd = memfd_create(name)
            os.ftruncate(fd, num_bytes)
            seal_size(fd)
            segment = cls(fd, num_bytes)
            if committed or not machine.overcommits():
                segment._commit()
            return segment
        except OSError as error:
            if segment is not None:
                segment.close()
            elif fd >= 0:
                os.close(fd)
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
                _refuse_size(num_bytes, os.strerror(errno.ENOMEM))
            what = f"the system refused a segment of {num_bytes} bytes of shared memory: {error.strerror}"
            fix = "look at the limits of open files (ulimit -n) and of address space (ulimit -v)"
            raise WorldError(explain(what, fix=fix)) from error

    @classmethod
    def adopt(cls, fd: int, num_bytes: int) -> Segment:
        """Map a segment that another process made. The segment owns the descriptor from then on; it is closed on failure.

        Raises:
            WorldError: the file is not a sealed segment of this size, or the system refuses.
        """
        try:
            actual_bytes = os.fstat(fd).st_size
            if actual_bytes < num_bytes or not has_sealed_size(fd):
                what = f"a shared segment is not the sealed file of {num_bytes} bytes it should be"
                raise WorldError(explain(what, value=actual_bytes))
            return cls(fd, num_bytes)
        except OSError as error:
            os.close(fd)
            what = f"the system refused to map {num_bytes} bytes of a peer's memory: {error.strerror}"
            raise WorldError(explain(what, fix="look at the limit of address space (ulimit -v)")) from error
        except BaseException:
            os.close(fd)
            raise

    def tensor(
        self, offset_bytes: int, num_elements: int, dtype: torch.dtype, when_gone: Callable[[], object] | None = None
    ) -> Tensor:
        """Return a 1-d tensor over part of the segment, which keeps the mapping alive. See [Note: who keeps a mapping].

        Its storage is only that part, so saving the tensor saves nothing else.

        Args:
            offset_bytes: the tensor's offset; a multiple of the element size.
            num_elements: the tensor's length; an empty tensor has memory of its own and does not keep the mapping.
            dtype: its dtype.
            when_gone: called when the storage is freed, on any thread and possibly in the middle of any other code (garbage
                collection), so it must not wait for a lock. Not called at the interpreter's exit.
        """
        assert self._mapping is not None, "the segment was closed"
        if num_elements == 0:
            return torch.empty(0, dtype=dtype)
        num_bytes = num_elements * dtype.itemsize
        assert offset_bytes >= 0 and offset_bytes + num_bytes <= self.num_bytes
        buffer: Any = (ctypes.c_ubyte * num_bytes).from_address(self.address + offset_bytes)
        buffer.mapping = self._mapping
        if when_gone is not None:
            weakref.finalize(buffer, when_gone).atexit = False
        return torch.frombuffer(buffer, dtype=dtype)

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays. Later calls do nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptor, and unmap once no tensor is in the segment. Nothing may use ``address`` any more."""
        self.close_descriptor()
        self._mapping = None

    def _commit(self) -> None:
        # Commits through the mapping, so that the kernel's choice of huge pages applies here too.
        if LIBC.madvise(self.address, self.num_bytes, _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            if number != errno.EINVAL:
                raise OSError(number, os.strerror(number))
            os.posix_fallocate(self.fd, 0, self.num_bytes)


class Mapping:
    """A mapping of a file, unmapped when the last reference to this object goes.

    Args:
        fd: descriptor of the file; may be closed afterwards.
        num_bytes: how much of the file is mapped.
        private: give this process its own copy of each page that it writes to.

    Raises:
        OSError: the system refuses.
    """

    def __init__(self, fd: int, num_bytes: int, private: bool = False) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = LIBC.mmap(None, num_bytes, access, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.address = int(address)
        weakref.finalize(self, LIBC.munmap, self.address, num_bytes).atexit = False
        if private:
            # Under mlockall(MCL_FUTURE) the kernel has already made this process's own copy of every page; drop these copies.
            LIBC.munlock(self.address, num_bytes)
            LIBC.madvise(self.address, num_bytes, mmap.MADV_DONTNEED)
        if not private and num_bytes >= _HUGE_PAGE_BYTES and huge_pages_offered():
            LIBC.madvise(self.address, num_bytes, mmap.MADV_HUGEPAGE)  # a hint; the result does not matter


def huge_pages_offered() -> bool:
    """Return whether the kernel gives shared memory huge pages on request."""
    try:
        text = _SHMEM_HUGE_PAGES.read_text()
    except OSError:  # a kernel without huge pages for shared memory
        return False
    return any(f"[{word}]" in text for word in ("advise", "within_size", "always", "force"))


def _refuse_size(num_bytes: int, why: str) -> NoReturn:
    what = f"shared memory of {num_bytes} bytes cannot be had: {why}"
    fix = "use a smaller model or fewer ranks on this node, or end what else uses memory"
    raise UsageError(explain(what, value=num_bytes, fix=fix))


class SharedSegments:
    """Makes further segments that all ranks of a group map, and barriers. Every rank must construct it and make the same calls.

    Args:
        group: the ranks.
    """

    def __init__(self, group: SharedMemoryGroup) -> None:
        self._group = group
        self._link = group._resources.link
        self._pids = group._resources._peers.pids
        self.rank: int = group.rank()
        self.size: int = group.size()

    def meet(self, what: bytes, private: bytes = b"") -> tuple[bytes, ...]:
        """Wait for all ranks, on the caller's thread, in order with the group's collectives.

        Shared memory written by a rank before its call is visible to all ranks afterwards.

        Args:
            what: a description of at most 256 bytes; all ranks raise if it is not the same on all.
            private: at most 128 bytes, which are sent to all ranks.

        Returns:
            Each rank's ``private``.

        Raises:
            PeerLost: a rank is gone, or did not join within the group's time-out.
            MismatchError: ranks passed different ``what``.
        """
        told: tuple[bytes, ...] = ()
        group, link = self._group, self._link

        def job() -> None:
            nonlocal told
            told = link.meet(what, (group._timeout_s, group._sync_spin_us), private)

        group._turns.now(job, (), "a meeting in shared memory")
        return told

    def make(self, num_bytes: int, name: str, only: int | None = None) -> list[Segment | None]:
        """Give each rank a segment of shared memory that all ranks map. Every rank must call it.

        Args:
            num_bytes: size of this rank's segment, which is zeros at first; 0: no segment.
            name: shown in the kernel's list of mappings.
            only: the one rank that gets a segment; None: every rank.

        Returns:
            The segment of every rank, None for ranks with 0 bytes. Descriptors are open: the caller closes them.

        Raises:
            UsageError: this machine has not enough memory; raised on this rank only, and reported to the peers.
            WorldError: a peer could not make its segment, or map another rank's; some systems do not let a process map
                memory of another process of the same user.
            PeerLost: a rank is gone.
            After the first two errors nothing is left open on any rank, and the group stays usable.
        """
        what = b"sharing memory: " + name.encode()[:64]
        num_bytes = num_bytes if only in (None, self.rank) else 0
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
        """Wait for all ranks, and raise on all if one passes an error as ``refused``; return every rank's ``private``."""
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
        # Opens another rank's anonymous file again, through /proc; that rank keeps its descriptor open until the next ``meet``.
        path = path_of(f"fd/{fd}", self._pids[rank])
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            what = f"the memory of rank {rank} (pid {self._pids[rank]}) cannot be opened at {path}: {error.strerror}"
            fix = "see that /proc is mounted, and that processes of one user may look at each other"
            raise WorldError(explain(what, rank=self.rank, fix=fix)) from error


class PrivateView:
    """A mapping of a segment in which writes change only this process's own copy of a page.

    Pages not written here always show the segment, including later writes by others; a page written here is this process's
    own until :meth:`forget`. (Linux lets untouched private pages follow the file; :meth:`follows` checks that the system does
    this.)

    Attributes:
        address: the address of the mapping.
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
        """Return a 1-d tensor over part of the view; its storage is only that part, and it keeps the mapping alive."""
        if num_elements == 0:
            return torch.empty(0, dtype=dtype)
        buffer: Any = (ctypes.c_ubyte * (num_elements * dtype.itemsize)).from_address(self.address + offset_bytes)
        buffer.mapping = self._mapping
        return torch.frombuffer(buffer, dtype=dtype)

    def forget(self, start: int, end: int) -> None:
        """Drop this process's own copies of the pages that touch bytes [start, end); they show the segment again."""
        start -= start % mmap.PAGESIZE
        end = min(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, self.num_bytes)
        if start < end:
            LIBC.madvise(self.address + start, end - start, mmap.MADV_DONTNEED)

    def own_pages(self, start: int, end: int) -> list[int]:
        """Return byte offsets of the pages touching [start, end) that this process has written since their last ``forget``."""
        first = (self.address + start) // mmap.PAGESIZE
        last = -(-(self.address + end) // mmap.PAGESIZE)
        pagemap = os.open(path_of("pagemap"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = os.pread(pagemap, (last - first) * 8, first * 8)
        finally:
            os.close(pagemap)
        words = torch.frombuffer(bytearray(entries), dtype=torch.int64)
        # Bits of a page's entry: 63 it is in memory; 62 it is swapped out (only an own copy can be); 61 it is the file's.
        is_own = ((words < 0) & ((words >> 61) & 1 == 0)) | ((words >> 62) & 1 == 1)
        return [(first + int(i)) * mmap.PAGESIZE - self.address for i in is_own.nonzero().flatten()]

    def follows(self, segment: Segment, offset_bytes: int) -> bool:
        """Return whether a change of a byte in the segment shows in this view, but a change in this view not in the segment."""
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
