"""Memory that several processes map: anonymous files (memfd) without a name in any file system.

A segment lives as long as a process maps it or holds its descriptor, so nothing is left behind however processes end, and
the size of /dev/shm does not matter.

[Note: who keeps a mapping] Python objects of tensors may die while C++ still holds their storage, so nothing here hangs on
tensors. Each tensor's storage owns a small buffer object (torch.frombuffer), the buffer owns the mapping, and so does the
Segment until it is closed: the last of them to go unmaps. The mapping is made past Python's mmap module, which would keep a
second descriptor open for as long. In a process forked off the same happens to its own copy, which nobody else sees.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from guozhuang.errors import UsageError, WorldError, explain

_SHMEM_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_PAGE_BYTES: Final = 2 << 20
# Pages are committed when they are first touched. Asking for more than the machine has would end in the kernel's OOM
# killer, long after the call that asked; from this size on the call looks first.
_LOOK_FIRST_BYTES: Final = 16 << 20
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
LIBC: Final = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Segment:
    """One mapping of an anonymous shared file. Made by ``create`` or ``adopt``.

    Attributes:
        fd: descriptor of the file, closed on exec; -1 once it was given up.
        num_bytes: size of the segment.
        address: where this process maps it; page-aligned.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        assert num_bytes > 0
        self.num_bytes = num_bytes
        self._mapping: Mapping | None = Mapping(fd, num_bytes)
        self.address = self._mapping.address
        self.fd = fd

    @classmethod
    def create(cls, num_bytes: int, name: str, *, committed: bool = False) -> Segment:
        """Make a segment of zeros.

        Args:
            num_bytes: its size, fixed from then on; > 0.
            name: shown in /proc/PID/maps and /proc/PID/fd; need not be unique.
            committed: take the memory now, so that running out of it is an error here and not the end of a process later.

        Raises:
            UsageError: more memory than the machine has left.
            WorldError: the system refuses for another reason (limits of open files or of address space).
        """
        if num_bytes >= _LOOK_FIRST_BYTES and num_bytes > (available := _available_bytes()):
            _refuse_size(num_bytes, f"{available} bytes are left on this machine (or in its control group)")
        fd, segment = -1, None
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, num_bytes)
            # A file that shrinks under a mapping ends the process that reads there (SIGBUS).
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            segment = cls(fd, num_bytes)
            if committed or _counts_strictly():
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
        """Map a segment that another process made. The descriptor belongs to the segment from then on, also if this fails.

        Raises:
            WorldError: it is not the sealed segment it should be, or the system refuses.
        """
        try:
            actual_bytes = os.fstat(fd).st_size
            if actual_bytes < num_bytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
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
        """A 1-d tensor over part of the segment, which keeps the mapping alive. See [Note: who keeps a mapping].

        Its storage is that part alone, so saving it saves nothing else.

        Args:
            offset_bytes: where it begins; a multiple of the element size.
            num_elements: its length; an empty tensor has memory of its own and does not keep the mapping.
            dtype: its dtype.
            when_gone: called when the storage is gone, on whichever thread that happens and possibly in the middle of any
                other code (garbage collection): it must not wait for a lock. Not called at the interpreter's exit.
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
        """Give up the descriptor; the mapping stays. Again does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Give up the descriptor, and the mapping as soon as no tensor lies in it. Nothing may use ``address`` any more."""
        self.close_descriptor()
        self._mapping = None

    def _commit(self) -> None:
        # Through the mapping, so that the kernel's decision about huge pages holds here too.
        if LIBC.madvise(self.address, self.num_bytes, _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            if number != errno.EINVAL:
                raise OSError(number, os.strerror(number))
            os.posix_fallocate(self.fd, 0, self.num_bytes)


class Mapping:
    """Maps a file, and unmaps it when the last reference to this object goes.

    Args:
        fd: descriptor of the file; may be closed afterwards.
        num_bytes: how much of it.
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
        if not private and num_bytes >= _HUGE_PAGE_BYTES and huge_pages_offered():
            LIBC.madvise(self.address, num_bytes, mmap.MADV_HUGEPAGE)  # a wish; what comes of it does not matter


def huge_pages_offered() -> bool:
    """Whether the kernel gives shared memory huge pages where they are asked for."""
    try:
        text = _SHMEM_HUGE_PAGES.read_text()
    except OSError:  # a kernel without them
        return False
    return any(f"[{word}]" in text for word in ("advise", "within_size", "always", "force"))


def _counts_strictly() -> bool:
    """Whether the kernel refuses memory that it could not back: a touch of an uncommitted page may then be SIGBUS."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def _available_bytes() -> int:
    """What the machine, and this process's control group where it has a limit, can still give."""
    available = 1 << 62  # a kernel that does not tell
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    group = Path("/sys/fs/cgroup")  # version 2, as it looks from inside a container
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
        reclaimable = [
            line.split()[1] for line in (group / "memory.stat").read_text().splitlines() if "inactive_file" in line
        ]
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used) + sum(map(int, reclaimable)))


def _refuse_size(num_bytes: int, why: str) -> NoReturn:
    what = f"shared memory of {num_bytes} bytes cannot be had: {why}"
    fix = "use a smaller model or fewer ranks on this node, or end what else uses memory"
    raise UsageError(explain(what, value=num_bytes, fix=fix))
