"""Processes of this node: who they are, whether they have ended, who started them, and which of them share what.

A process is named by its number, its start time (numbers are used again) and its node. This file imports the standard
library alone, because the supervisor of a remote host and the guard of an agent run it without the package; see ``preload``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import socket
from collections.abc import Iterator
from typing import NamedTuple

GONE, STOPPED = "gone", "stopped"
#: What processes with the same ``node_identity`` can do with each other.
REACH_EACH_OTHER, SEE_EACH_OTHER, SHARE_MEMORY = ("net",), ("net", "pid"), ("net", "pid", "user")
#: Where the kernel tells of itself and of processes.
PROC = "/proc"
_STATES = {
    "Z": GONE, "X": GONE, "T": STOPPED, "t": STOPPED, "R": "running", "S": "sleeping", "I": "idle",
    "D": "in a system call that cannot be interrupted",
}  # fmt: skip
# Numbers of system calls, for an interpreter or a C library that was built without them.
_PIDFD_OPEN = 434
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "ppc64le": 360, "s390x": 350}
# Of fcntl(2), which such an interpreter does not name either.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_MOST_ANCESTORS = 64


class ProcessStatus(NamedTuple):
    """What the kernel says of a process.

    Attributes:
        state: the letter of proc(5): R, S, D, Z (ended, not yet waited for), T ...
        parent: process number of its parent.
        session: number of its session.
        start: when it began, in the kernel's ticks since boot.
    """

    state: str
    parent: int
    session: int
    start: int


def status(pid: int) -> ProcessStatus | None:
    """The status of a process of this node; None if there is none, or the system has no /proc."""
    # Bytes, from the last parenthesis on: the name before it may hold anything, and may be cut inside a character.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    return ProcessStatus(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def start_of(pid: int) -> int:
    """When a process began, in the kernel's ticks since boot; 0 if it is gone, or the system does not tell."""
    found = status(pid)
    return found.start if found is not None else 0


def state_of(pid: int, start: int) -> str:
    """What the system says of a process: ``GONE``, ``STOPPED``, or in words what it does.

    Args:
        pid: its number.
        start: when it began (``start_of``); a process that began at another time has taken over its number. 0: not known.
    """
    found = status(pid)
    if found is None:
        return _state_without_proc(pid)
    if start not in (0, found.start):
        return GONE
    return _STATES.get(found.state, found.state)


class Process(NamedTuple):
    """A process of some node.

    Attributes:
        pid: its number on that node.
        start: when it began, in the kernel's ticks since boot; 0: the system did not tell.
        node: ``node_identity`` there.
    """

    pid: int
    start: int
    node: str

    @classmethod
    def read(cls, card: str) -> Process:
        """The process that ``str`` of it names."""
        pid, start, node = card.split(" ", 2)
        return cls(int(pid), int(start), node)

    def __str__(self) -> str:
        return f"{self.pid} {self.start} {self.node}"

    def has_ended(self, node: str) -> bool:
        """Whether a process on ``node`` can tell that it has ended; False where it is of another node."""
        return self.node == node and state_of(self.pid, self.start) == GONE


def this_process(node: str) -> Process:
    """This process, on the node of that identity."""
    return Process(os.getpid(), start_of(os.getpid()), node)


def node_identity(shares: tuple[str, ...] = REACH_EACH_OTHER, *, strict: bool = False) -> str:
    """A text that is equal for processes of one node, and differs otherwise.

    Args:
        shares: what processes of one node are to share besides kernel and host name: ``REACH_EACH_OTHER`` (the network),
            ``SEE_EACH_OTHER`` (process numbers too), or ``SHARE_MEMORY`` (the user too).
        strict: raise where the system does not tell; else the text is made of what it tells.

    Raises:
        OSError: the system does not tell, and ``strict`` asks it to.
    """
    parts = [socket.gethostname()]
    with contextlib.nullcontext() if strict else contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as boot:
            parts.append(boot.read().strip())
        parts += [os.readlink(f"/proc/self/ns/{space}") for space in shares]
        if "user" in shares:
            parts.append(f"uid:{os.getuid()}")
    return "/".join(parts)


def has_proc() -> bool:
    """Whether this system tells of processes in /proc."""
    return os.path.isdir("/proc/self")


def all_pids() -> list[int]:
    """The numbers of all processes of this node; empty where the system has no /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()] if has_proc() else []


def descendants(pid: int) -> list[int]:
    """The living processes below a process: its children, theirs, and so on."""
    found = {each: known.parent for each in all_pids() if (known := status(each)) is not None and known.state != "Z"}
    below: set[int] = set()
    more = {pid}
    while more:
        more = {each for each, parent in found.items() if parent in more} - below
        below |= more
    return sorted(below)


def ancestors(pid: int) -> Iterator[int]:
    """The processes above a process, the nearest first, as far as the system tells."""
    for _ in range(_MOST_ANCESTORS):
        found = status(pid)
        if found is None or found.parent == 0:
            return
        pid = found.parent
        yield pid


def command_line(pid: int) -> list[bytes]:
    """The words that a process was started with; empty if it is gone, or belongs to another user who hides them."""
    return _read(pid, "cmdline").split(b"\0")[:-1]


def environment(pid: int) -> list[bytes]:
    """The variables (``b"NAME=value"``) that a process was started with; empty if it is gone or of another user."""
    return _read(pid, "environ").split(b"\0")[:-1]


def open_descriptors() -> dict[int, str]:
    """The open descriptors of this process, and what each leads to ("socket:[12]", a path); empty without /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists them
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def path_of(name: str, pid: int | str = "self") -> str:
    """The path of a file that the kernel keeps for a process, such as "fd/3" or "pagemap"."""
    return f"/proc/{pid}/{name}"


def pidfd_open(pid: int) -> int:
    """A descriptor that polls readable once the process has ended.

    Raises:
        OSError: there is no such process (ESRCH), or the system has no such descriptors (ENOSYS; EPERM in some containers).
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    fd = _system_call(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))
    os.set_inheritable(fd, False)
    return fd


def memfd_create(name: str) -> int:
    """A descriptor of anonymous memory, empty, that can be sealed and is not inherited by other programs.

    Args:
        name: shown in /proc; need not be unique.

    Raises:
        OSError: the system refuses.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    number = _MEMFD_CREATE.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"memfd_create is not known for the processor {platform.machine()}")
    return _system_call(number, ctypes.c_char_p(name.encode()), ctypes.c_uint(3))  # MFD_CLOEXEC | MFD_ALLOW_SEALING


def seal_size(fd: int) -> None:
    """Fix the size of the memory of ``memfd_create`` for good: a file that shrinks under a mapping ends its readers (SIGBUS).

    Raises:
        OSError: the system refuses.
    """
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)


def has_sealed_size(fd: int) -> bool:
    """Whether the memory behind a descriptor can never shrink.

    Raises:
        OSError: the descriptor is of another kind.
    """
    return bool(fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK)


def preload(source: bytes, program: bytes) -> bytes:
    """A program for a host that may lack the package: ``program`` finds there what it imports from this module.

    Args:
        source: the text of this file.
        program: the text of a program that imports the standard library and ``guozhuang.watch.processes``.
    """
    # An import of names from a module that is loaded already does not load the packages around it.
    return b"import sys, types\nsys.modules['%b'] = found = types.ModuleType('%b')\nexec(%r, found.__dict__)\nexec(%r)\n" % (
        __name__.encode(), __name__.encode(), source, program,
    )  # fmt: skip


def _system_call(number: int, *arguments: object) -> int:
    found = int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _state_without_proc(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return GONE
    except PermissionError:
        pass
    return "running"


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
