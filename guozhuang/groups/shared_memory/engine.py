"""The layout of the memory that ranks share, and the C engine that runs programs (program.py) over it.

Every rank of a group maps the main segments of all ranks: a control page, then areas for data. Only its own rank writes to a
control page. The engine is written in C; where it was not built, "shm" becomes gloo (groups/backend.py).
"""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from guozhuang.errors import WorldError, explain

from .program import Outcome, Program

try:
    from . import _engine, _sparse
except ImportError:  # the C part was not built
    _engine = _sparse = None  # type: ignore[assignment]

# Byte offsets in a control page. Words are little-endian u32, each on its own cache line so that ranks do not slow down.
MAGIC: Final = 0x475A0001  # first word of a control page: "GZ", layout version 1
MAGIC_OFFSET: Final = 0
ARRIVED_OFFSET: Final = 64  # counts the barriers that the rank has arrived at; peers wait on this word as a futex
ASLEEP_OFFSET: Final = 128  # 0 while awake; else 1 + the rank for whose arrival this rank sleeps
STATE_OFFSET: Final = 192  # the rank's RankState
LOST_OFFSET: Final = 196  # if the rank is BROKEN: 1 + the peer that it lost, or 0 if it broke for another reason
DOING_OFFSET: Final = 256  # the rank's current call in words, ended by NUL
DOING_BYTES: Final = 120  # most bytes of that text, without the NUL
# Two slots, used alternately, for descriptions of operations. See [Note: one barrier per operation] in _barrier.c.
DESCRIPTOR_OFFSETS: Final = (512, 1024)
DESCRIPTOR_BYTES: Final = 256  # a slot's first part, which the ranks compare byte by byte
PRIVATE_BYTES: Final = 128  # a slot's second part, the private one: peers can read it, but do not compare it
CONTROL_BYTES: Final = 4096

# The main segment has the control page, then two one-shot areas (small tensors), then the ring (large tensors), then the
# rank's messages of sends and receives.
NUM_ONE_SHOT_AREAS: Final = 2  # used alternately, like the descriptor slots
ONE_SHOT_BYTES: Final = 64 * 1024  # the size of one area
ONE_SHOT_OFFSET: Final = CONTROL_BYTES
RING_OFFSET: Final = ONE_SHOT_OFFSET + NUM_ONE_SHOT_AREAS * ONE_SHOT_BYTES
RING_BYTES: Final = 32 * 1024 * 1024  # default size of the ring, through which large tensors pass in chunks
MAIL_OFFSET: Final = RING_OFFSET + RING_BYTES
MAIL_BYTES: Final = 8 * 1024 * 1024  # a page, then two rings for each receiver; only what is written to is committed
_MESSAGES_BYTES: Final = 1024 * 1024  # most for messages from one rank to another, with small payloads
_PAYLOADS_BYTES: Final = 256 * 1024  # most for large payloads; more would leave the cache
MAIN_BYTES: Final = MAIL_OFFSET + MAIL_BYTES
_PAGE_BYTES: Final = 4096
_BUSY_US: Final = 10.0  # of a spin, before each look also offers the core to others; 0 where ranks outnumber cores


class RankState(enum.IntEnum):
    """The state that a rank writes to its control page."""

    ALIVE = 0
    LEFT = 1  # the rank left the group; it will arrive at no further barrier
    BROKEN = 2  # a collective failed on the rank; it will arrive at no further barrier


class Engine(Protocol):
    """Runs the programs of one rank, one at a time; ranks synchronize in barriers through their control pages.

    Made by ``make_engine``. The engine keeps only addresses and descriptors: during a run the caller must keep mappings and
    pidfds open.
    """

    def run(
        self,
        program: Program,
        descriptor: bytes | None,
        private: bytes,
        deadline_s: float,
        spin_us: int,
        expected: tuple[bytes, ...] | None = None,
        then: Program | None = None,
        /,
    ) -> Outcome:
        """Run a program. Every rank must run one with the same number of rounds. Arguments are passed by position.

        Args:
            program: the program to run.
            descriptor: starts a new operation: at most 256 bytes that must be equal on all ranks, compared after the first
                barrier (the program must have one); also published as what this rank is doing. None: the run continues the
                current operation.
            private: at most 128 bytes that the peers can read with ``privates``; ignored if ``descriptor`` is None.
            deadline_s: the limit of the whole run, in seconds from now.
            spin_us: how long each wait spins before it sleeps, in microseconds; 0 to sleep at once.
            expected: the ``private`` of every rank (128 bytes each) for which ``then`` was made. None: ``then`` is not run.
            then: a further program of the operation, run at once if the ranks' private bytes are the expected ones.

        Returns:
            ``(status, ranks)``: 0 and no ranks after success; else see ``Status``.

        Raises:
            ValueError: the program or an argument is invalid; nothing was done.
            RuntimeError: another thread is running a program.
            KeyboardInterrupt: (or what a signal handler raises) during a wait in the main thread; the rank is then BROKEN.
        """

    def descriptors(self) -> list[bytes]:
        """Return every rank's descriptor (256 bytes) of the current operation; valid until the next operation."""

    def privates(self) -> list[bytes]:
        """Return every rank's ``private`` (128 bytes) of the current operation; valid until the next operation."""

    def doing(self, rank: int, /) -> str:
        """Return the text that a rank has published about its current call."""

    def set_doing(self, text: bytes, /) -> None:
        """Publish this rank's current call in words; cut after 120 bytes."""

    def set_state(self, state: int, /) -> None:
        """Set this rank's RankState, and wake the peers that wait for this rank."""

    def state_of(self, rank: int, /) -> int:
        """Return the RankState of a rank."""

    def arrived_of(self, rank: int, /) -> int:
        """Return the number of barriers that a rank has arrived at, modulo 2**32."""


class Mail(Protocol):
    """The messages of one rank's sends and receives, which travel through shared memory. Made by ``make_mail``.

    Calls other than ``arm`` come from one thread at a time. A message has a kind and the code of a dtype (0 to 255), three
    64-bit numbers and a small payload. Messages of one rank to another arrive in order. Large payloads move beside them, one
    at a time in each direction of a pair, while calls look for messages; their memory must live until they have ended.
    """

    def put(
        self, peer: int, kind: int, dtype: int, number: int, second: int, third: int, address: int, num_bytes: int, /
    ) -> bool:
        """Write a message with the payload at ``address``, and wake the peer if it sleeps.

        Returns:
            False: there is no room now. Nothing was written; this rank's ``poll`` on the peer's socket wakes when there is.
        """

    def offer(
        self,
        peer: int,
        kind: int,
        dtype: int,
        number: int,
        tag: int,
        num_elements: int,
        address: int,
        num_bytes: int,
        limit_s: float,
        /,
    ) -> bool | None:
        """Write the offer of a send as ``put`` does, and look for at most so many seconds for the answer that it is done.

        Args:
            kind: OFFER: the payload is at ``address``, if it goes along; APART: there is the place where it lies.

        Returns:
            Whether the answer came, which is then removed; None: there is no room, and nothing was written.
        """

    def take(self, peer: int, /) -> tuple[int, int, int, int, int, int, bytes] | None:
        """Return and remove a message of a peer, or of any peer in turn if ``peer`` is -1; None if there is none.

        Returns:
            ``(peer, kind, dtype, number, second, third, payload)``. A kind of 128 tells that ``pull`` of this number ended.
        """

    def push(self, peer: int, number: int, address: int, num_bytes: int, /) -> int:
        """Begin to send a peer a large payload, and return its position, which the peer needs to ``pull`` it."""

    def pull(self, peer: int, number: int, address: int, num_bytes: int, position: int, /) -> int:
        """Begin to receive a large payload."""

    def confirm(self, peer: int, kind: int, number: int, limit_s: float, /) -> bool:
        """Look for a message for at most so many seconds; remove it and return True if it is this one of this peer."""

    def receive(
        self,
        peer: int,
        tag: int,
        dtype: int,
        num_elements: int,
        address: int,
        num_bytes: int,
        limit_s: float,
        /,
    ) -> bool:
        """Look for a message for at most so many seconds. If it is a peer's offer that fits, and its payload is here or can be
        read, copy that to ``address``, remove the message, answer that it is done, and return True."""

    def fetch(self, peer: int, address: int, num_bytes: int, source: int, retracted: int, /) -> bool:
        """Copy a payload from a peer's memory; return False if that cannot be read, or the peer has given up sends since."""

    def retracted(self, peer: int, /) -> int:
        """Return how many sends to a peer this rank has given up."""

    def retract(self, peer: int, /) -> None:
        """Count a send to a peer as given up. See [Note: reading payloads] in messages.py."""

    def stop(self, peer: int, is_push: int, number: int, /) -> None:
        """End a push (1) or pull (0) of this number, if it is under way; what it has left in between is skipped later."""

    def spin(self, limit_s: float, /) -> bool:
        """Look for a message for at most so many seconds without the GIL; return whether there is one."""

    def arm(self) -> bool:
        """Have the next message also make the sender's socket readable; return whether a message is there already.

        Call it before a ``poll`` of the sockets, and do not sleep if it returns True.
        """


class Repeats(Protocol):
    """A table of collectives that were called before, by what a call depends on. Made by ``make_repeats``.

    See [Note: calls that repeat] in _repeats.c. The arguments ``args`` are those of the group's method, the options last.
    """

    def find(self, kind: int, turn: int, args: tuple[Any, ...], /) -> Callable[[], bool] | None:
        """Return the job that is stored for a call like this one; None: there is none."""

    def memory_of(self, tensor: torch.Tensor, /) -> tuple[int, int, int] | None:
        """Return the address, the number of elements and the bytes of a plain tensor with memory; None of any other one."""

    def put(self, kind: int, turn: int, args: tuple[Any, ...], job: Callable[[], bool], /) -> bool:
        """Store a job if a call like this one has come before, and if it may be repeated; return whether it was stored."""


def native_built() -> bool:
    """Return whether the C part of the group was built."""
    return _engine is not None and _sparse is not None


def read_process(pid: int, target: int, source: int, num_bytes: int) -> bool:
    """Copy from an address in a process's memory to one in this process's; return whether that could be read."""
    return _engine.read_process(pid, target, source, num_bytes)


def is_readable(address: int, num_bytes: int) -> bool:
    """Return whether the kernel lets other processes read a tensor of this one, as far as its first and last byte tell."""
    byte = ctypes.c_char()
    target, own, last = ctypes.addressof(byte), os.getpid(), address + num_bytes - 1
    return num_bytes == 0 or (
        read_process(own, target, address, 1)
        and (last // _PAGE_BYTES == address // _PAGE_BYTES or read_process(own, target, last, 1))
    )


def make_engine(
    rank: int,
    size: int,
    controls: Sequence[int],
    pidfds: Sequence[int],
    pids: Sequence[int],
    crowded: bool = False,
) -> Engine:
    """Make the engine of this rank; the control pages must be new.

    Args:
        rank: this process in the group.
        size: number of ranks.
        controls: address of each rank's control page.
        pidfds: per rank a descriptor that reports the end of its process: a pidfd (becomes readable) or a connected socket
            (hang-up; messages are ignored); -1 for this rank, and where none exists.
        pids: the process of each rank, whose memory READ streams read.
        crowded: whether ranks outnumber cores; a wait that spins then offers the core to others before each look.

    Raises:
        ValueError: the arguments are inconsistent.
        WorldError: the C part was not built.
    """
    if not native_built():
        fix = "install a C compiler and reinstall guozhuang, or use the gloo backend"
        raise WorldError(explain("the C part of the shared-memory group was not built", rank=rank, fix=fix))
    return _engine.Engine(rank, size, list(controls), list(pidfds), list(pids), 0.0 if crowded else _BUSY_US)


def make_repeats(rank: int, size: int) -> Repeats:
    """Make an empty table for the calls of a rank in a group of ``size`` ranks."""
    return _engine.Repeats(torch.Tensor, torch.strided, rank, size)


def mail_ring_bytes(size: int) -> tuple[int, int]:
    """Return the sizes of the rings from one rank to another in a group of ``size`` ranks: for messages, for payloads."""
    share = (MAIL_BYTES - CONTROL_BYTES) // size
    payloads = min(_PAYLOADS_BYTES, share * 4 // 5 // 64 * 64)
    return min(_MESSAGES_BYTES, (share - payloads) // 64 * 64), payloads


def make_mail(
    rank: int, mains: Sequence[int], sockets: Sequence[int], pids: Sequence[int], crowded: bool = False
) -> Mail:
    """Make the mail of this rank.

    Args:
        rank: this process in the group.
        mains: address of each rank's main segment.
        sockets: per rank the descriptor of a connected socket, through which one byte is sent to a rank that sleeps.
        pids: the process of each rank, whose memory ``fetch`` and ``receive`` read.
        crowded: as in ``make_engine``.
    """
    areas = [main + MAIL_OFFSET for main in mains]
    busy_us = 0.0 if crowded else _BUSY_US
    return _engine.Mail(rank, areas, list(sockets), *mail_ring_bytes(len(areas)), list(pids), busy_us)
