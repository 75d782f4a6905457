"""Processes of this node: their identity, state, parents and command lines; and system calls that Python may lack.

A process is identified by its number, its start time (numbers are reused) and its node. This file imports the standard
library alone, because the supervisor of a remote host and the guard of an agent run it without the package; see ``preload``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

GONE, STOPPED = "gone", "stopped"
#: The kernel namespaces that processes must share to connect to each other, to see each other, and to share memory.
REACH_EACH_OTHER, SEE_EACH_OTHER, SHARE_MEMORY = ("net",), ("net", "pid"), ("net", "pid", "user")
#: The folder in which the kernel shows its own state and that of processes.
PROC = "/proc"
ENDED_BY_SIGTERM = 128 + signal.SIGTERM  # the exit code of a process that ended by itself because of SIGTERM
_STATES = {
    "Z": GONE, "X": GONE, "T": STOPPED, "t": STOPPED, "R": "running", "S": "sleeping", "I": "idle",
    "D": "in a system call that cannot be interrupted",
}  # fmt: skip
# Numbers of system calls, for a Python that was built without a wrapper for them.
_PIDFD_OPEN = 434
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "ppc64le": 360, "s390x": 350}
# Constants of fcntl(2), for a Python that was built without them.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_MOST_ANCESTORS = 64
_TURN_S = 0.02  # between two looks at threads
#: Options of ``prctl``: the signal that a process gets when its parent ends, and whether it adopts orphaned descendants.
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36


class ProcessStatus(NamedTuple):
    """The status of a process as the kernel reports it.

    Attributes:
        state: the letter of proc(5): R, S, D, Z (ended, not yet waited for), T ...
        parent: process number of its parent.
        session: number of its session.
        start: start time, in the kernel's ticks since boot.
    """

    state: str
    parent: int
    session: int
    start: int


def status(pid: int) -> ProcessStatus | None:
    """Return the status of a process of this node; None if it does not exist, or the system has no /proc."""
    # Read as bytes from the last ")" on: the process name before it may hold any byte, and may be cut inside a character.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    return ProcessStatus(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def start_of(pid: int) -> int:
    """Return the start time of a process in the kernel's ticks since boot; 0 if it is gone or the system has no /proc."""
    found = status(pid)
    return found.start if found is not None else 0


def state_of(pid: int, start: int) -> str:
    """Return the state of a process: ``GONE``, ``STOPPED``, or another text such as "running".

    Args:
        pid: its number.
        start: its start time (``start_of``); if it differs, another process has reused the number. 0: not known.
    """
    found = status(pid)
    if found is None:
        return _state_without_proc(pid)
    if start not in (0, found.start):
        return GONE
    return _STATES.get(found.state, found.state)


class Process(NamedTuple):
    """A process, identified across nodes and reboots by its number, its start time and its node.

    Attributes:
        pid: its number on that node.
        start: its start time, in the kernel's ticks since boot; 0: not known.
        node: the ``node_identity`` of its node.
    """

    pid: int
    start: int
    node: str

    @classmethod
    def read(cls, card: str) -> Process:
        """Return the ``Process`` that ``str`` turned into the text ``card``."""
        pid, start, node = card.split(" ", 2)
        return cls(int(pid), int(start), node)

    def __str__(self) -> str:
        return f"{self.pid} {self.start} {self.node}"

    def has_ended(self, node: str) -> bool:
        """Return whether this process is known to have ended, as seen from ``node``; False if it is on another node."""
        return self.node == node and state_of(self.pid, self.start) == GONE


def this_process(node: str) -> Process:
    """Return the ``Process`` that runs this code; ``node`` is the identity of its node."""
    return Process(os.getpid(), start_of(os.getpid()), node)


def node_identity(shares: tuple[str, ...] = REACH_EACH_OTHER, *, strict: bool = False) -> str:
    """Return a text that is equal for processes of one node, and differs otherwise.

    Args:
        shares: the namespaces that processes of one node must share besides kernel and host name: ``REACH_EACH_OTHER``
            (network), ``SEE_EACH_OTHER`` (process numbers too), or ``SHARE_MEMORY`` (user too).
        strict: raise if the system lacks some of this information; if False, it is left out of the text.

    Raises:
        OSError: the system lacks some of this information, and ``strict`` is set.
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
    """Return whether this system has /proc."""
    return os.path.isdir("/proc/self")


def all_pids() -> list[int]:
    """Return the numbers of all processes of this node; empty if the system has no /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()] if has_proc() else []


def descendants(pid: int) -> list[int]:
    """Return the living descendants of a process: its children, their children, and so on."""
    found = {each: known.parent for each in all_pids() if (known := status(each)) is not None and known.state != "Z"}
    below: set[int] = set()
    more = {pid}
    while more:
        more = {each for each, parent in found.items() if parent in more} - below
        below |= more
    return sorted(below)


def ancestors(pid: int) -> Iterator[int]:
    """Yield the ancestors of a process, its parent first, as far as the system shows them."""
    for _ in range(_MOST_ANCESTORS):
        found = status(pid)
        if found is None or found.parent == 0:
            return
        pid = found.parent
        yield pid


def command_line(pid: int) -> list[bytes]:
    """Return the command-line arguments of a process; empty if it is gone, or another user's and hidden."""
    return _read(pid, "cmdline").split(b"\0")[:-1]


def environment(pid: int) -> list[bytes]:
    """Return the variables (``b"NAME=value"``) that a process was started with; empty if it is gone or another user's."""
    return _read(pid, "environ").split(b"\0")[:-1]


def open_descriptors() -> dict[int, str]:
    """Return the open descriptors of this process with their targets ("socket:[12]", a path); empty without /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of listdir itself is closed by now
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def path_of(name: str, pid: int | str = "self") -> str:
    """Return the path of a file in the /proc folder of a process, such as "fd/3" or "pagemap"."""
    return f"/proc/{pid}/{name}"


def pidfd_open(pid: int) -> int:
    """Return a descriptor that polls readable once the process has ended.

    Raises:
        OSError: there is no such process (ESRCH), or the system has no such descriptors (ENOSYS; EPERM in some containers).
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    fd = _system_call(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))
    os.set_inheritable(fd, False)
    return fd


def memfd_create(name: str) -> int:
    """Return a descriptor of anonymous memory, of size 0, that can be sealed and is closed on exec.

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


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, such as ``SET_PDEATHSIG``; does nothing on a system other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def seal_size(fd: int) -> None:
    """Fix the size of a ``memfd_create`` file for good: a file that shrinks while it is mapped ends its readers by SIGBUS.

    Raises:
        OSError: the system refuses.
    """
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)


def has_sealed_size(fd: int) -> bool:
    """Return whether the memory behind a descriptor can never shrink.

    Raises:
        OSError: the descriptor is not of a file that can be sealed.
    """
    return bool(fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK)


def preload(source: bytes, program: bytes) -> bytes:
    """Return a program that a host without the package can run: ``program``, with this module's source built in.

    Args:
        source: the text of this file.
        program: the text of a program that imports the standard library and ``guozhuang.watch.processes``.
    """
    # `from a.b import name` does not import package `a` if module "a.b" is in sys.modules already.
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


def wait_for_threads(name: str, limit_s: float = 2.0) -> None:
    """Wait until no thread of this name runs, or would if there was a processor for it; not where there is none.

    Args:
        name: of a thread that is not Python's, as the kernel knows it: at most 15 characters.
        limit_s: how long to wait at most, in seconds.
    """
    ends_s = time.monotonic() + limit_s
    states = _states_of_threads(name)
    while states:
        time.sleep(_TURN_S)
        states = _states_of_threads(name)
        if "R" not in states or time.monotonic() > ends_s:
            return


def _states_of_threads(name: str) -> str:
    """Return a letter for the state of each of these threads (R: it runs, or would); "?" where nobody tells."""
    if not has_proc():
        return "?"
    threads = [int(each) for each in os.listdir(f"{PROC}/self/task")]
    named = [status(each) for each in threads if _read(each, "comm").rstrip(b"\n") == name.encode()]
    return "".join(each.state for each in named if each is not None)
