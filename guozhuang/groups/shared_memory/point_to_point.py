"""Sends and receives between two ranks, as the rest of a process asks for them; ``courier.py`` carries them out."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from guozhuang.errors import UsageError, WorldError, explain

from . import messages
from .courier import Courier
from .engine import STATE_OFFSET, RankState
from .rendezvous import Peers
from .segments import Segment
from .transfers import Transfer

__all__ = ["PointToPoint", "Transfer", "TransferWork"]

_JOIN_S: Final = 5.0


class PointToPoint:
    """Sends and receives of one rank; from several threads.

    Args:
        peers: the other ranks; outlive this object.
        segments: the main segment of every rank, mapped here.
        rank: this process in the group.
        size: number of ranks.
        timeout_s: limit of each transfer, from its call, in seconds.
        failure: what broke the group for this rank, once its control page says that something did.
    """

    def __init__(
        self,
        peers: Peers,
        segments: Sequence[Segment],
        rank: int,
        size: int,
        timeout_s: float,
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._peers, self._rank, self._size, self._timeout_s = peers, rank, size, timeout_s
        self._process = os.getpid()
        self._why_broken = failure
        self._state = ctypes.c_uint32.from_address(segments[rank].address + STATE_OFFSET)
        self._courier = Courier(peers, segments, rank, size, self._broken)
        self._starting = threading.Lock()  # over the next four
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._is_closed = False
        self._failure: BaseException | None = None  # of the thread

    def send(self, tensor: Tensor, dst: int, tag: int, timeout_s: float | None = None) -> Transfer:
        """Begin to send a contiguous CPU tensor; it must not change until the transfer has ended.

        Its limit is ``timeout_s`` seconds, if not that of all.

        Raises:
            UsageError: no such rank, or this one; a tag that is no 64-bit number.
            WorldError: the group was destroyed, or broke; then what broke it.
        """
        return self._begin(tensor, dst, tag, timeout_s, is_send=True)

    def recv(self, tensor: Tensor, src: int | None, tag: int, timeout_s: float | None = None) -> Transfer:
        """Begin to receive into a contiguous CPU tensor, from a rank or (None) from whichever sends with this tag first.

        Its limit is ``timeout_s`` seconds, if not that of all.

        Raises:
            UsageError: no such rank, or this one; a tag that is no 64-bit number.
            WorldError: the group was destroyed, or broke; then what broke it.
        """
        return self._begin(tensor, src, tag, timeout_s, is_send=False)

    def close(self) -> bool:
        """End the thread; transfers under way fail. Again does nothing.

        Returns:
            Whether it has ended: if not, it may still look at the memory and the sockets of the peers.
        """
        with self._starting:
            self._is_closed = True
            thread = self._thread
        if thread is None or os.getpid() != self._process:
            return True
        self._wake()
        if thread is not threading.current_thread():
            thread.join(_JOIN_S)
        return not thread.is_alive()

    def _begin(self, tensor: Tensor, peer: int | None, tag: int, timeout_s: float | None, *, is_send: bool) -> Transfer:
        if peer is not None and (not 0 <= peer < self._size or peer == self._rank):
            what = "a rank sends to another rank of the group" if is_send else "a rank receives from another rank"
            raise UsageError(explain(what, value=peer, rank=self._rank, fix=f"name one of 0 to {self._size - 1}"))
        if not isinstance(tag, int) or tag not in messages.TAGS:
            fix = "use a whole number from -2**63 to 2**63 - 1"
            raise UsageError(explain("a tag is a 64-bit number", value=tag, rank=self._rank, fix=fix))
        assert tensor.is_contiguous() and tensor.is_cpu
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        transfer = Transfer(
            tensor, self._rank, peer, tag, is_send=is_send, deadline=time.monotonic() + limit_s, limit_s=limit_s
        )
        with self._starting:
            if self._is_closed or os.getpid() != self._process:
                raise copy.copy(self._failure) or self._destroyed()
            if self._state.value == RankState.BROKEN:
                raise self._broken()
            if self._thread is None:
                wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                thread = threading.Thread(target=self._serve, name=f"guozhuang-p2p-{self._rank}", daemon=True)
                self._wake_fd = wake_fd
                try:
                    thread.start()
                except BaseException:
                    self._wake_fd = -1
                    os.close(wake_fd)
                    raise
                self._thread = thread
            self._courier.new.append(transfer)
            os.eventfd_write(self._wake_fd, 1)
        return transfer

    def _wake(self) -> None:
        with self._starting:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _destroyed(self) -> WorldError:
        text = explain(
            "this group was destroyed; it sends and receives no more", rank=self._rank, fix="make a new group"
        )
        return WorldError(text)

    def _broken(self) -> BaseException:
        """What to raise once this rank's group is broken: afresh each time, as tracebacks keep tensors alive."""
        text = explain("this group is broken", rank=self._rank, fix="look at its first error, and make a new group")
        return copy.copy(self._why_broken()) or WorldError(text)

    # The thread.

    def _serve(self) -> None:
        torch.set_grad_enabled(False)  # the mode is per thread; callbacks run here
        error: BaseException = self._destroyed()
        try:
            self._courier.watch(self._wake_fd)
            while not self._is_closed:
                self._courier.turn()
            self._courier.say_farewell()
        except BaseException as unexpected:
            what = f"sends and receives ended after {type(unexpected).__name__}: {unexpected}"
            error = WorldError(explain(what, rank=self._rank, fix="mend the cause and make a new group"))
            error.__cause__ = unexpected
            self._failure = error
            for channel in self._peers.channels:  # peers that wait for this rank learn of it
                if channel is not None:
                    with contextlib.suppress(OSError):
                        channel.shutdown(socket.SHUT_RDWR)
        with self._starting:
            self._is_closed = True
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._courier.end(error)


class TransferWork(dist._Work):
    """The work of a send or a receive.

    Args:
        transfer: what is under way.
        tensor: what the user gave.
        plain: contiguous memory that is sent, or received into.
        is_receive: copy ``plain`` to ``tensor`` at the end, if it is another.
    """

    def __init__(self, transfer: Transfer, tensor: Tensor, plain: Tensor, is_receive: bool) -> None:
        super().__init__()
        self._transfer, self._tensor, self._plain = transfer, tensor, plain
        self._copies_back = is_receive and plain is not tensor

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait until the tensor was sent or received; ``timeout`` 0 leaves the limit to the group.

        Raises:
            PeerLost: the other rank is gone or did not come in time.
            MismatchError: the other rank asked for another size or dtype.
        """
        limit_s = timeout.total_seconds()
        self._transfer.wait(limit_s if limit_s > 0 else None)
        if self._copies_back:
            self._copies_back = False
            self._tensor.detach().copy_(self._plain)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._transfer.is_completed()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._transfer.exception()

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def source_rank(self) -> int:
        """Who sent; -1 as long as nobody has."""
        source = self._transfer.source_rank
        return -1 if source is None else source

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        """The tensor; waits for it."""
        self.wait()
        return [self._tensor]

    def get_future(self) -> Future[list[Tensor]]:
        """A future of the tensor; it raises what went wrong."""
        source: Future[None] = Future()
        self._transfer.when_done(lambda: source.set_result(None))
        return source.then(lambda _: self.result())
