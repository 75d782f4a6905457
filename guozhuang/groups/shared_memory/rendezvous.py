"""The rendezvous of a group's processes on one node, and the exchange of descriptors of shared memory.

[Note: who may join] The sockets have abstract (no file) random names, which go through the group's store together with a
secret of each rank, as its card. The first message on a connection proves that the sender knows the secrets of both ends. Any
process that reaches the store's port can read the store, so the secrets alone prove little: the kernel's credentials of the
other end (SO_PEERCRED) must also be this user and the process that the store lists for that rank. Any other connection is
closed as soon as it is checked, and never delays the others: only connections with data are read, and a full queue is emptied.

[Note: why nobody waits in a circle] A rank connects to all lower ranks, in order, then accepts all higher ones. Connecting
waits only for room in a lower rank's queue, which that rank empties as soon as it has connected to the ranks below it;
rank 0 waits for nobody. Segments are sent without waiting (a new socket has room for one message), then received.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, NoReturn

import torch.distributed as dist

from guozhuang.errors import PeerLost, WorldError, explain
from guozhuang.watch import processes

from .. import roll_call
from .engine import STATE_OFFSET, RankState
from .peers import Peers, ended_events
from .segments import Segment

__all__ = ["Card", "Listener", "Peers", "connect", "identity", "meet"]

_HELLO: Final = struct.Struct("<4sii16s16s")  # magic, sender's rank, _NOTES or _CHANNELS, receiver's secret, sender's
_MAGIC: Final = b"gz01"
_MAIN: Final = struct.Struct("<q")  # size of the main segment; its descriptor is sent along with this message
_CREDENTIALS: Final = struct.Struct("3i")
_NOTES, _CHANNELS = 0, 1
_SLICE_S: Final = 0.1  # seconds between two checks whether a rank has ended
_MOST_STRANGERS: Final = 64  # most accepted connections that have not sent their first message
_FIX: Final = "look at that rank's own error"


def identity() -> str:
    """Return an identity of this process's node (Linux): equal for processes that can share memory and see each other end.

    It combines the boot id, the user, and the namespaces of network (abstract sockets), processes (pids) and users.

    Raises:
        WorldError: /proc cannot be read.
    """
    try:
        return processes.node_identity(processes.SHARE_MEMORY, strict=True)
    except OSError as error:
        what = f"shared memory needs Linux with /proc: {error}"
        raise WorldError(explain(what, fix="use the gloo backend")) from error


class Card(NamedTuple):
    """What a rank tells the others before they connect; ``str`` and ``read`` turn it into a text and back.

    Attributes:
        process: the rank's process, with the identity of its node.
        name: the name of its listening socket.
        secret: 16 random bytes in hexadecimal digits.
        note: a text for the other ranks.
    """

    process: processes.Process
    name: str
    secret: str
    note: str

    def __str__(self) -> str:
        return json.dumps([str(self.process), *self[1:]])

    @classmethod
    def read(cls, text: str) -> Card:
        """Return the card that ``str`` turned into this text; raise ValueError for another text."""
        process, name, secret, note = json.loads(text)
        return cls(processes.Process.read(process), name, secret, note)


class Listener:
    """The socket on which this rank accepts the other ranks of one group. Its owner closes it.

    Args:
        rank: this process in the group, for errors.
        note: a text for the other ranks, part of the card.
        backlog: the most connections that wait to be accepted.

    Attributes:
        card: what the other ranks need to connect.

    Raises:
        WorldError: the system refused a socket.
    """

    def __init__(self, rank: int, note: str, backlog: int) -> None:
        name = f"guozhuang-{secrets.token_hex(16)}"
        self.card = Card(processes.this_process(identity()), name, secrets.token_bytes(16).hex(), note)
        try:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            self.socket.bind(f"\0{name}")
            self.socket.listen(backlog)
            self.socket.setblocking(False)
        except OSError as error:
            _refused(error, rank)

    def close(self) -> None:
        """Close the socket: ranks that try to connect learn that this rank gave up. Later calls do nothing."""
        self.socket.close()


def meet(
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    note: str = "",
    earlier: Sequence[processes.Process] = (),
) -> tuple[Listener, list[Card]]:
    """Exchange cards through the store; return this rank's listener and all cards. Every rank must call it.

    Args:
        store: a PrefixStore that only this group uses.
        rank: this process in the group.
        size: number of ranks.
        timeout_s: limit for the whole call, in seconds.
        note: a text for the other ranks.
        earlier: the process of each rank, if known before the call, so that a rank that ended is named at once.

    Raises: see ``roll_call.call``, and ``Listener``.
    """
    listener = Listener(rank, note, 4 * size + 16)

    def ended(peer: int) -> int | None:
        return earlier[peer].pid if earlier and earlier[peer].has_ended(listener.card.process.node) else None

    try:
        texts = roll_call.call(store, "card", rank, size, str(listener.card), timeout_s, ended)
    except BaseException:
        listener.close()
        raise
    return listener, [Card.read(text) for text in texts]


def connect(rank: int, cards: Sequence[Card], listener: Listener, timeout_s: float, main: Segment) -> Peers:
    """Connect the ranks of a group on one node, and map each other's main segments. Every rank must call it.

    Args:
        rank: this process in the group.
        cards: of all ranks, by rank.
        listener: this rank's, whose card is among them; it is closed.
        timeout_s: limit for the whole call, in seconds.
        main: this rank's main segment, of the same size on all ranks. The returned Peers own it; it is closed on failure.

    Raises:
        WorldError: ranks did not join in time (the text names them), or run on another node.
        PeerLost: a rank ended, or failed, during the call.
        After an error no socket, descriptor or mapping is left open.
    """
    meeting = _MeshSetup(rank, cards, listener, timeout_s, main)
    try:
        peers = meeting.hold()
    except BaseException:
        # Peers that have mapped this rank's segment already read there that it is broken.
        ctypes.c_uint32.from_address(main.address + STATE_OFFSET).value = RankState.BROKEN
        meeting.close()
        main.close()
        raise
    listener.close()
    main.close_descriptor()
    return peers


def _refused(error: OSError, rank: int) -> NoReturn:
    what = f"the system refused a socket or a descriptor while the group was made: {error.strerror}"
    raise WorldError(explain(what, rank=rank, fix="raise the limit of open files (ulimit -n)")) from error


class _MeshSetup:
    """The state of one rank during ``connect``."""

    def __init__(self, rank: int, cards: Sequence[Card], listener: Listener, timeout_s: float, main: Segment) -> None:
        self._rank, self._size, self._timeout_s, self._main = rank, len(cards), timeout_s, main
        self._cards, self._listener = cards, listener
        self._deadline = time.monotonic() + timeout_s
        self._pidfds = [-1] * self._size
        self._segments: list[Segment | None] = [None] * self._size
        self._meshes: tuple[list[socket.socket | None], ...] = ([None] * self._size, [None] * self._size)
        self._strangers: dict[int, socket.socket] = {}  # accepted connections without a first message; the oldest first

    def hold(self) -> Peers:
        """Connect the sockets, exchange main segments; return the connected ``Peers``."""
        try:
            self._refuse_other_nodes()
            for peer in self._others():
                self._pidfds[peer] = self._open_pidfd(peer)
            for peer in range(self._rank):
                for mesh in (_NOTES, _CHANNELS):
                    self._connect(peer, mesh)
            self._accept()
            self._drop_strangers(0)
            self._share()
        except PeerLost:
            raise
        except OSError as error:
            _refused(error, self._rank)
        notes, channels = self._meshes
        for peer in self._others():
            if self._pidfds[peer] < 0:
                connection = notes[peer]
                assert connection is not None
                self._pidfds[peer] = connection.fileno()
        segments = [segment for segment in self._segments if segment is not None]
        assert len(segments) == self._size
        pids = [card.process.pid for card in self._cards]
        return Peers(self._rank, pids, self._pidfds, segments, notes, channels)

    def close(self) -> None:
        """Close all sockets, descriptors and segments after a failure."""
        self._listener.close()
        self._drop_strangers(0)
        for each in (*self._meshes[0], *self._meshes[1]):
            if each is not None:
                each.close()
        for fd in self._pidfds:
            if fd >= 0:
                os.close(fd)
        for segment in self._segments:
            if segment is not None:
                segment.close()

    def _others(self) -> list[int]:
        return [peer for peer in range(self._size) if peer != self._rank]

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _refuse_other_nodes(self) -> None:
        here = self._cards[self._rank].process.node
        elsewhere = [peer for peer in self._others() if self._cards[peer].process.node != here]
        if elsewhere:
            what = f"ranks {elsewhere} cannot share memory with this one: another node, user or namespace"
            fix = 'use the "gloo" backend, or "shm" by its name, which finds out itself'
            raise WorldError(explain(what, value=self._cards[elsewhere[0]].process.node, rank=self._rank, fix=fix))

    def _open_pidfd(self, peer: int) -> int:
        """Return a pidfd of a peer, or -1 if the system has none. See [Note: what tells that a peer is gone] in peers.py."""
        try:
            return processes.pidfd_open(self._cards[peer].process.pid)
        except OSError as error:
            if error.errno == errno.ESRCH:
                self._lost(peer, "ended while the group was made")
            if error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL):
                return -1
            raise

    # The methods below connect the sockets. See [Note: who may join].

    def _connect(self, peer: int, mesh: int) -> None:
        card = self._cards[peer]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._meshes[mesh][peer] = connection
        connection.setblocking(False)
        while True:
            try:
                connection.connect(f"\0{card.name}")
                break
            except BlockingIOError:  # the peer's queue of new connections is full: try again
                self._look_after([peer])
                if not self._left_s():
                    self._missing([peer], "to connect")
                time.sleep(0.002)
            except ConnectionRefusedError:
                self._lost(peer, "gave up while the group was made")
        if not self._is(connection, peer):
            self._lost(peer, "is not the process that listens in its place")
        try:
            hello = _HELLO.pack(
                _MAGIC, self._rank, mesh, *map(bytes.fromhex, (card.secret, self._cards[self._rank].secret))
            )
            connection.send(hello, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            self._lost(peer, "gave up while the group was made")

    def _accept(self) -> None:
        higher = range(self._rank + 1, self._size)
        poller = select.poll()
        poller.register(self._listener.socket, select.POLLIN)
        while missing := [peer for peer in higher if not all(mesh[peer] for mesh in self._meshes)]:
            if not self._left_s():
                self._missing(missing, "to connect")
            for fd, _ in poller.poll(min(self._left_s(), _SLICE_S) * 1e3):
                if fd == self._listener.socket.fileno():
                    with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                        stranger, _ = self._listener.socket.accept()
                        if not any(self._is(stranger, peer) for peer in missing):
                            stranger.close()
                            continue
                        stranger.setblocking(False)
                        self._strangers[stranger.fileno()] = stranger
                        poller.register(stranger, select.POLLIN)
                elif fd in self._strangers:
                    poller.unregister(fd)
                    connection = self._strangers.pop(fd)
                    if not self._admit(connection):
                        connection.close()
            for fd in self._drop_strangers(_MOST_STRANGERS + 2 * self._size):
                poller.unregister(fd)
            self._look_after(missing)

    def _admit(self, connection: socket.socket) -> bool:
        """Read a connection's first message; keep the connection if the rank named there made it; return whether it did."""
        try:
            message = connection.recv(_HELLO.size + 1)  # plain ``recv``: the kernel drops any descriptors sent along
        except OSError:
            return False
        if len(message) != _HELLO.size:
            return False
        magic, peer, mesh, mine, its = _HELLO.unpack(message)
        if magic != _MAGIC or not self._rank < peer < self._size or mesh not in (_NOTES, _CHANNELS):
            return False
        knows = hmac.compare_digest(mine.hex(), self._cards[self._rank].secret)
        knows &= hmac.compare_digest(its.hex(), self._cards[peer].secret)
        if not knows or not self._is(connection, peer) or self._meshes[mesh][peer] is not None:
            return False
        self._meshes[mesh][peer] = connection
        return True

    def _is(self, connection: socket.socket, peer: int) -> bool:
        """Return whether the kernel's credentials show that this peer is at the other end of a connection."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return (pid, uid) == (self._cards[peer].process.pid, os.getuid())

    def _drop_strangers(self, num_kept: int) -> list[int]:
        """Close the oldest connections without a first message; return their former descriptors, which a poller still has."""
        dropped = []
        while len(self._strangers) > num_kept:
            fd = next(iter(self._strangers))
            self._strangers.pop(fd).close()
            dropped.append(fd)
        return dropped

    # The methods below exchange the main segments.

    def _share(self) -> None:
        self._segments[self._rank] = self._main
        for peer in self._others():
            connection = self._meshes[_NOTES][peer]
            assert connection is not None
            try:
                message = _MAIN.pack(self._main.num_bytes)
                socket.send_fds(connection, [message], [self._main.fd], socket.MSG_NOSIGNAL)
            except (BrokenPipeError, ConnectionResetError):
                self._lost(peer, "gave up while the group was made")
        for peer in self._others():
            self._segments[peer] = self._take_main(peer)

    def _take_main(self, peer: int) -> Segment:
        connection = self._meshes[_NOTES][peer]
        assert connection is not None
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(connection, _MAIN.size, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                self._look_after([peer])
                if not self._left_s():
                    self._missing([peer], "to share its memory")
                ready = select.poll()
                ready.register(connection, select.POLLIN)
                ready.poll(min(self._left_s(), _SLICE_S) * 1e3)
                continue
            except ConnectionResetError:
                continue  # the peer ended; the error comes once, before the last messages that it sent
            if not message:
                self._lost(peer, "gave up while the group was made")
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            segment = Segment.adopt(fds[0], *_MAIN.unpack(message))
            segment.close_descriptor()
            assert segment.num_bytes == self._main.num_bytes, "ranks made main segments of different sizes"
            return segment

    # The methods below raise errors.

    def _look_after(self, peers: list[int]) -> None:
        """Raise if one of these ranks has ended."""
        poller = select.poll()
        for peer in peers:
            if self._pidfds[peer] >= 0:
                poller.register(self._pidfds[peer], ended_events(self._pidfds[peer]))
        for fd, _ in poller.poll(0):
            self._lost(self._pidfds.index(fd), "ended while the group was made")

    def _missing(self, ranks: list[int], purpose: str) -> NoReturn:
        what = f"timed out: ranks {ranks} did not come within {self._timeout_s:g} s {purpose}"
        fix = "look at their own errors; every rank must reach this point"
        raise WorldError(explain(what, rank=self._rank, fix=fix))

    def _lost(self, peer: int, how: str) -> NoReturn:
        pid = self._cards[peer].process.pid
        text = explain(f"rank {peer} (pid {pid}) {how}", rank=self._rank, fix=_FIX)
        raise PeerLost(text, rank=peer, pid=pid, waiting_in="making the group")
