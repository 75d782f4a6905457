"""This process's record of the other ranks of a group: their processes, sockets and shared memory.

[Note: what tells that a peer is gone] A pidfd becomes readable once the process has ended, in all cases. The end of a socket
is less reliable: a DataLoader worker forked by a rank inherits the rank's sockets and keeps them open after the rank's death.
Where the system has no pidfd (Linux before 5.3, some container policies) the socket is used, and the death of a rank with
such workers is noticed only when they end; PyTorch's workers check every few seconds whether their parent lives.

[Note: when a peer's memory is unmapped] A peer frees a segment when its own part of the last operation on it is done. This
rank may still run that operation, with C code reading the segment on another thread. So a note about a freed segment, which
any thread may receive at any time, only marks the segment; it is unmapped when this rank begins its next operation.

[Note: reading another process] The kernel lets a user's processes read each other's memory (``process_vm_readv``), unless a
container or a security module forbids the system calls of debuggers. A large tensor is copied once then, not into shared memory
and out of it. Whether it works is tried: each rank puts a mark into its memory and tells the others where it lies, and each
reads the marks of all others.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NoReturn

from guozhuang.errors import PeerLost, WorldError, explain

from .engine import read_process
from .segments import Segment

# The errors of a socket whose other end is closed. All other errors (memory, descriptors) say nothing about the peer.
ENDED: Final = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN))
_NOTE: Final = struct.Struct("<cqq")  # a message: kind; number of the segment, or how many were freed; its size
_SEGMENT, _FREED = b"S", b"F"
_FREED_PER_NOTE: Final = 64
_NUMBERS: Final = struct.Struct(f"<{_FREED_PER_NOTE}q")
_NOTE_BYTES: Final = _NOTE.size + _NUMBERS.size
_MARK_BYTES: Final = 16
_marks: dict[int, ctypes.Array[ctypes.c_char]] = {}  # by pid: a forked process has a mark of its own
_SLICE_S: Final = 0.05  # one wait for a socket; short, as another thread may receive the awaited message


class Peers:
    """The connected ranks of a group. Made by ``rendezvous.connect``; thread-safe.

    Args:
        rank: this process in the group.
        pids: the process of every rank.
        pidfds: per rank a descriptor that polls readable (or hung up) once the rank's process has ended; -1 for this rank.
            See [Note: what tells that a peer is gone].
        segments: the main segment of every rank, mapped here.
        notes: per rank a connected non-blocking SOCK_SEQPACKET socket for this class's messages; None for this rank.
        channels: the same, for the messages of sends and receives.

    This object owns all of these and closes them.
    """

    def __init__(
        self,
        rank: int,
        pids: list[int],
        pidfds: list[int],
        segments: list[Segment],
        notes: Sequence[socket.socket | None],
        channels: Sequence[socket.socket | None],
    ) -> None:
        self.rank, self.size = rank, len(pids)
        self.pids, self.pidfds, self.segments, self.channels = pids, pidfds, segments, channels
        self._others = [peer for peer in range(self.size) if peer != rank]
        self._notes = notes
        self._received: list[dict[int, Segment]] = [{} for _ in pids]
        self._freed_by_peers: deque[Segment] = deque()  # still mapped: see [Note: when a peer's memory is unmapped]
        self._freed: deque[int] = deque()  # numbers of this rank's freed segments, not reported to the peers yet
        self._unsent: list[list[bytes]] = [[] for _ in pids]  # by peer: messages that wait for room in its socket
        self._gone = [False] * self.size  # by rank: whether its end of the socket was closed
        self._lock = threading.Lock()
        self._closed = False

    def send_segment(self, number: int, segment: Segment, timeout_s: float) -> None:
        """Send a segment of this rank to all peers; each receives it when it needs the segment.

        Args:
            number: the key for the peers, new for every segment. ``Arena`` uses the positive numbers.
            segment: a segment whose descriptor is still open.
            timeout_s: the longest wait for peers that do not receive, in seconds.

        Raises:
            PeerLost: a peer is gone, left the group, or did not receive in time.
        """
        deadline = time.monotonic() + timeout_s
        note = _NOTE.pack(_SEGMENT, number, segment.num_bytes)
        for peer in self._others:
            while not self._try_send(peer, note, segment.fd):
                if time.monotonic() > deadline:
                    self._lost(peer, f"took no memory that this rank shares within {timeout_s:g} s")
                self.drain()  # reads messages: the peer may wait for room in this rank's socket
                self._await(peer, select.POLLOUT, _SLICE_S)

    def receive_segment(self, rank: int, number: int, timeout_s: float) -> Segment:
        """Return a segment that a peer has sent, or sends within ``timeout_s`` seconds; the same object on every call.

        Raises:
            PeerLost: the peer is gone, left the group, or sent nothing in time.
        """
        deadline = time.monotonic() + timeout_s
        while (segment := self._received[rank].get(number)) is None:
            with self._lock:
                self._take_all(rank)
                ended = self._gone[rank]
            if number in self._received[rank]:
                continue
            if ended:
                self._lost(rank, "closed its end")
            if time.monotonic() > deadline:
                self._lost(rank, f"shared no memory within {timeout_s:g} s")
            self._await(rank, select.POLLIN, _SLICE_S)
        return segment

    def tell_freed(self, number: int) -> None:
        """Make all peers unmap a segment when they next begin an operation.

        Never waits, since it may be called wherever a tensor can die.
        """
        self._freed.append(number)
        self.drain()

    def drain(self) -> None:
        """Receive the peers' messages about segments, and send those about freed ones, as far as possible without waiting."""
        if not self._lock.acquire(blocking=False):
            return  # another thread holds the lock: that one, or the next caller, does the work
        try:
            if self._closed:
                return
            for peer in self._others:
                self._take_all(peer)
            while self._freed:
                numbers = [self._freed.popleft() for _ in range(min(len(self._freed), _FREED_PER_NOTE))]
                body = _NUMBERS.pack(*numbers, *(0,) * (_FREED_PER_NOTE - len(numbers)))
                for peer in self._others:
                    self._unsent[peer].append(_NOTE.pack(_FREED, len(numbers), 0) + body)
            for peer in self._others:
                self._flush(peer)
        finally:
            self._lock.release()

    @property
    def has_freed(self) -> bool:
        """Return whether peers have freed segments that this rank still maps."""
        return bool(self._freed_by_peers)

    def release_freed(self) -> None:
        """Unmap segments that peers have freed. Call it only while no operation of this rank runs, as when one begins."""
        while self._freed_by_peers:
            self._freed_by_peers.popleft().close()

    def close(self) -> None:
        """Close sockets, descriptors and segments; a mapping with tensors in it is unmapped with the last of them.

        No other method may be running. Later calls do nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sockets = [each.fileno() for each in self._notes if each is not None]
            for fd in self.pidfds:
                if fd >= 0 and fd not in sockets:
                    os.close(fd)
            self.pidfds = [-1] * self.size
            for each in (*self._notes, *self.channels):
                if each is not None:
                    each.close()
            self.release_freed()
            for segment in (*self.segments, *(s for received in self._received for s in received.values())):
                segment.close()
            self._received = [{} for _ in self.pids]

    def _try_send(self, peer: int, note: bytes, fd: int) -> bool:
        connection = self._notes[peer]
        assert connection is not None
        with self._lock:
            self._check_open()
            try:
                socket.send_fds(connection, [note], [fd], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in ENDED:
                    self._lost(peer, f"closed its end ({error.strerror})")
                what = f"the system refused to hand memory to rank {peer} (pid {self.pids[peer]}): {error.strerror}"
                fix = "raise the limit of open files (ulimit -n); look whether that rank is stopped"
                raise WorldError(explain(what, rank=self.rank, fix=fix)) from error
            return True

    def _await(self, peer: int, event: int, timeout_s: float) -> None:
        """Wait, without holding the lock, until a peer's socket is ready; raise if the peer's process has ended."""
        connection = self._notes[peer]
        assert connection is not None
        poller = select.poll()
        poller.register(connection, event)
        self._check_open()
        if self.pidfds[peer] != connection.fileno():
            poller.register(self.pidfds[peer], select.POLLIN)
        for fd, _ in poller.poll(timeout_s * 1e3):
            if fd == self.pidfds[peer] and fd != connection.fileno():
                with self._lock:
                    if self._take_all(peer):
                        return  # the peer sent messages before it ended: the caller looks at them first
                self._lost(peer, "is gone")

    # The methods below run while ``_lock`` is held.

    def _check_open(self) -> None:
        if self._closed:
            raise WorldError(explain("this group was destroyed", rank=self.rank, fix="make a new group"))

    def _flush(self, peer: int) -> None:
        connection, unsent = self._notes[peer], self._unsent[peer]
        assert connection is not None
        while unsent:
            try:
                connection.send(unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in ENDED:  # the peer is gone, and with it its mappings
                    unsent.clear()
                return  # any other error means too little memory: the next drain() tries again
            del unsent[0]

    def _take_all(self, peer: int) -> int:
        """Receive all messages that a peer has sent about its segments; return how many there were."""
        connection = self._notes[peer]
        num = 0
        while connection is not None and not self._gone[peer] and not self._closed:
            try:
                note, fds, flags, _ = socket.recv_fds(connection, _NOTE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # the peer ended; the error comes once, before the last messages that it sent
            if not note:
                self._gone[peer] = True
                break
            num += 1
            kind, number, num_bytes = _NOTE.unpack_from(note)
            if kind == _SEGMENT:
                if not fds or flags & socket.MSG_CTRUNC:
                    what = f"a descriptor that rank {peer} sent could not be taken over"
                    raise WorldError(explain(what, rank=self.rank, fix="raise the limit of open files (ulimit -n)"))
                segment = Segment.adopt(fds[0], num_bytes)
                segment.close_descriptor()
                self._received[peer][number] = segment
            else:
                for freed in _NUMBERS.unpack_from(note, _NOTE.size)[:number]:
                    received = self._received[peer].pop(freed, None)
                    if received is not None:
                        self._freed_by_peers.append(received)
        return num

    def _lost(self, peer: int, how: str) -> NoReturn:
        text = f"rank {peer} (pid {self.pids[peer]}) {how}"
        text = explain(text, rank=self.rank, fix="look at that rank's own error")
        raise PeerLost(text, rank=peer, pid=self.pids[peer], waiting_in="sharing memory")


def ended_events(fd: int) -> int:
    """Return the poll event by which a descriptor in ``pidfds`` shows the process's end: POLLHUP of a socket, else POLLIN."""
    return select.POLLHUP if stat.S_ISSOCK(os.fstat(fd).st_mode) else select.POLLIN


def own_mark() -> tuple[int, str]:
    """Return the address of this process's mark, which stays there, and its bytes in hexadecimal digits."""
    mark = _marks.get(os.getpid())
    if mark is None:
        mark = _marks[os.getpid()] = ctypes.create_string_buffer(secrets.token_bytes(_MARK_BYTES), _MARK_BYTES)
    return ctypes.addressof(mark), mark.raw.hex()


def can_read(pids: Sequence[int], marks: Sequence[tuple[int, str]]) -> bool:
    """Return whether this process can read the memory of all these processes, whose marks are these.

    See [Note: reading another process].
    """
    into = ctypes.create_string_buffer(_MARK_BYTES)
    return all(
        read_process(pid, ctypes.addressof(into), address, _MARK_BYTES) and into.raw.hex() == digits
        for pid, (address, digits) in zip(pids, marks, strict=True)
    )


def is_closed(channel: socket.socket) -> bool:
    """Read what came through a socket whose messages only wake; return whether the other end closed it."""
    try:
        while channel.recv(1):
            continue
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True
