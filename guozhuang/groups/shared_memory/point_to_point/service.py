"""Sends and receives between two ranks, by messages in memory that both map.

[Note: how a payload travels] The sender offers size, dtype and tag; a small payload is sent with the offer. The receiver
matches offers with receives, and compares sizes and dtypes before anything is written. Then it reads the small payload, one of
middle size as [Note: reading payloads] in messages.py tells, or requests the large one, which moves through a ring of the
pair's own: see ``_mail.c``, also for the messages. So a rank that reads nothing blocks only its own pair; large payloads of
one pair move one after the other. The socket of a pair only wakes a rank that sleeps, and tells that the other end is closed.
A send ends when the receiver has all of it, which may refuse it until then; so, as with gloo, it waits for its receive.

[Note: one thread at a time] All state but the queue of new transfers is used under one lock, without blocking; see
[Note: who waits attends] in groups/attending.py. When a peer is gone, the messages that it had sent are processed first; then
all other transfers with it fail. A receive from any rank fails when a rank died (that may have been its sender), not when
one left properly: others may send. Only `_read` and the end of a process mark a rank as lost; a failed send waits for these.

[Note: a rank that gave up] A rank whose group broke sets its state in its control page, which wakes nobody: so while
transfers are unfinished, these states are checked every 0.2 s. Transfers with that rank fail, and all transfers fail
once this rank's own group is broken.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Set
from functools import partial
from typing import Final

import torch
from torch import Tensor

from guozhuang.errors import WorldError, explain

from ...attending import Attendant
from ..arguments import Bytes
from ..engine import DOING_BYTES, DOING_OFFSET, STATE_OFFSET, RankState, make_mail
from ..peers import ended_events, is_closed
from ..rendezvous import Peers
from . import messages, transfers
from .matching import Offer, UnderWay
from .messages import Outbox, Streams
from .one_message import OneMessage, Terms
from .transfers import Ended, Memory, Transfer

_MESSAGES_PER_TURN: Final = 64  # most messages that are processed before new transfers begin
_LOOK_S: Final = 0.2  # seconds between two checks whether a rank's group broke, while transfers are unfinished
_LONGEST_SLEEP_S: Final = 3600.0
_SPIN_S: Final = 200e-6
_CROWDED_SPIN_S: Final = 100e-6
_AT_ONCE_S: Final = 20e-6  # how long a call that begins a transfer looks for its end
_FAREWELL_S: Final = 1.0  # longest time to send queued messages when the group is destroyed
_JOIN_S: Final = 5.0
_DESTROYED: Final = ("this group was destroyed; it sends and receives no more", "make a new group")


class PointToPoint:
    """The sends and receives of one rank; thread-safe. See the notes at the top of the module.

    Args:
        peers: the other ranks; must outlive this object.
        timeout_s: limit of each transfer, from its call, in seconds.
        failure: returns the error that broke the group for this rank, once its control page is marked as broken.
        crowded: whether ranks outnumber cores; then waits offer the core before each look.
        reads: whether ranks read large payloads from each other's memory, where that works.
    """

    def __init__(
        self,
        peers: Peers,
        timeout_s: float,
        failure: Callable[[], BaseException | None] = lambda: None,
        crowded: bool = True,
        reads: bool = False,
    ) -> None:
        self._peers, self._rank, self._size, self._timeout_s = peers, peers.rank, peers.size, timeout_s
        self._why_broken = failure
        pages = [segment.address for segment in peers.segments]
        sockets = [-1 if channel is None else channel.fileno() for channel in peers.channels]
        self._mail = make_mail(self._rank, pages, sockets, peers.pids, crowded)
        self._states = [ctypes.c_uint32.from_address(page + STATE_OFFSET) for page in pages]
        self._under_way = UnderWay(self._rank, self._size)
        # Guards the next two attributes and ``is_closed`` of the transfers under way; these are read without it too.
        self._closing = threading.Lock()
        self._new: deque[Transfer] = deque()
        self._failure: BaseException | None = None  # the error that ended it
        self._channels = [(peer, channel) for peer, channel in enumerate(peers.channels) if channel is not None]
        # The next attributes are used under the attendant's lock. See [Note: one thread at a time].
        self._look_s = _CROWDED_SPIN_S if crowded else _SPIN_S
        self._attendant = Attendant(
            self._turn, lambda: self._under_way.is_closed, 0.0 if crowded else _SPIN_S, self._mail
        )
        for peer, channel in self._channels:
            self._attendant.register(channel.fileno(), select.POLLIN)
            self._attendant.register(peers.pidfds[peer], ended_events(peers.pidfds[peer]))
        self._outbox = Outbox(self._mail, self._size, self._under_way.lost, reads)
        self._streams = Streams(self._mail, self._outbox, self._size)
        parts = self._mail, self._new, self._streams, self._under_way, self._outbox
        self._one_message = OneMessage(*parts, 0.0 if crowded else _AT_ONCE_S, self._begun, self._fall_over)
        self._next_look = 0.0  # when to look whether a rank's group broke
        self._earliest_deadline = math.inf  # no transfer expires before this time; its transfer may have ended
        self._thread = threading.Thread(target=self._serve, name=f"guozhuang-p2p-{self._rank}", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._attendant.close()
            raise

    def send(
        self, tensor: Tensor, dst: int, tag: int, timeout_s: float | None = None, memory: Memory | None = None
    ) -> Transfer | Ended:
        """Start sending a CPU tensor, which must not change until the transfer has ended.

        ``timeout_s`` is its limit in seconds; None: the limit of all transfers. ``memory``: if the tensor is known to be plain.

        Raises:
            UsageError: no such rank, or this rank itself; or a tag that is not a 64-bit number.
            WorldError: the group was destroyed; if it broke, the error that broke it.
        """
        return self._begin(True, tensor, dst, tag, timeout_s, memory)

    def recv(
        self, tensor: Tensor, src: int | None, tag: int, timeout_s: float | None = None, memory: Memory | None = None
    ) -> Transfer | Ended:
        """Start receiving into a CPU tensor from ``src``; None: from the first rank to send with this tag. Else as ``send``."""
        return self._begin(False, tensor, src, tag, timeout_s, memory)

    def close(self) -> bool:
        """End the thread; unfinished transfers fail. Later calls do nothing.

        Returns:
            Whether the thread has ended: if not, it may still use the memory and the sockets of the peers.
        """
        with self._closing:
            self._under_way.is_closed = True
            self._attendant.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _begin(
        self, is_send: bool, tensor: Tensor, peer: int | None, tag: int, timeout_s: float | None, memory: Memory | None
    ) -> Transfer | Ended:
        transfers.check(peer, tag, self._rank, self._size)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        plain = tensor
        if memory is None:
            plain = Bytes().plain(tensor)
            memory = plain.data_ptr(), plain.numel(), plain.numel() * plain.itemsize
        if self._states[self._rank].value == RankState.BROKEN and not self._under_way.is_closed:
            raise self._broken()
        terms = tensor, plain, memory, self._rank, peer, tag, is_send, limit_s
        if (work := self._attendant.at_once(self._one_message.begin, terms)) is not None:
            if self._under_way.is_empty and self._outbox.is_empty:
                self._attendant.stay_away()
            else:
                self._attendant.attend_now()
            return work
        transfer = self._transfer(terms)
        with self._closing:
            if self._under_way.is_closed:
                raise copy.copy(self._failure) or self._world_error(*_DESTROYED)
            self._new.append(transfer)
        if is_send or self._under_way.has_offers:
            self._attendant.attend_now()
        return transfer

    def _transfer(self, terms: Terms) -> Transfer:
        return Transfer(*terms, attend=self._attend, begin=self._begin_now)

    def _begin_now(self, transfer: Transfer) -> None:
        if transfer in self._new:
            self._attendant.attend_now()

    def _attend(self, transfer: Transfer, limit_s: float) -> None:
        """Process what arrives in this thread until a transfer has ended. See [Note: the one message] in one_message.py."""
        if not self._attendant.look(partial(self._one_message.look, transfer), self._look_s):
            self._begin_now(transfer)
            self._attendant.attend(transfer.has_ended, limit_s)
        elif not self._under_way.is_empty:  # others may have timed out meanwhile
            self._attendant.attend_now()

    def _broken(self) -> BaseException:
        """Return a fresh copy of the error of this rank's broken group; a shared one's traceback would keep tensors alive."""
        fix = "look at its first error, and make a new group"
        return copy.copy(self._why_broken() or self._world_error("this group is broken", fix))

    def _world_error(self, what: str, fix: str) -> WorldError:
        return WorldError(explain(what, rank=self._rank, fix=fix))

    # The methods below are called under the attendant's lock, but for ``_serve``, which the thread runs.

    def _serve(self) -> None:
        torch.set_grad_enabled(False)  # the mode is per thread; callbacks run on this thread
        self._attendant.serve()
        with self._attendant.lock:
            if self._failure is None:
                self._outbox.flush(_FAREWELL_S)
            with self._closing:
                self._attendant.close()
            for transfer in (*self._new, *self._under_way.all()):
                self._retract(transfer)
                transfer.end(self._failure or self._world_error(*_DESTROYED))
            self._new.clear()

    def _begun(self, terms: Terms, number: int) -> Transfer:
        """Make the transfer of a send whose offer has been sent."""
        self._register(send := self._transfer(terms), number)
        return send

    def _register(self, send: Transfer, number: int) -> None:
        send.number = number
        self._under_way.sends[number] = send
        self._earliest_deadline = min(self._earliest_deadline, send.deadline)

    def _turn(self, ready: Set[int] | None) -> float:
        """Process everything that is ready; return for how many seconds nothing else needs to be looked at."""
        if self._under_way.is_closed:
            return 0.0
        try:
            return self._process(ready)
        except BaseException as unexpected:
            self._fall_over(unexpected)
            if not isinstance(unexpected, Exception):
                raise  # a signal's handler raised it in the waiting thread
            return 0.0

    def _fall_over(self, unexpected: BaseException) -> None:
        """End all sends and receives because of an error."""
        what = f"sends and receives ended after {type(unexpected).__name__}: {unexpected}"
        error = self._world_error(what, "mend the cause and make a new group")
        error.__cause__ = unexpected
        for _, channel in self._channels:  # peers that wait for this rank then fail too
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        with self._closing:
            self._failure, self._under_way.is_closed = error, True
            self._attendant.wake()

    def _process(self, ready: Set[int] | None) -> float:
        now = time.monotonic()
        if ready is not None:
            self._receive(ready, now)
        while self._new:
            self._take(self._new[0])
            self._new.popleft()
        self._outbox.flush()
        if now >= self._earliest_deadline:
            self._expire()
        return _LONGEST_SLEEP_S if self._under_way.is_empty else min(self._earliest_deadline - now, _LOOK_S)

    def _receive(self, ready: Set[int], now: float) -> None:
        self._hear_messages(_MESSAGES_PER_TURN)
        for peer, channel in self._channels if ready else ():
            if channel.fileno() in ready and peer not in self._under_way.lost:
                self._read(peer)
            if self._peers.pidfds[peer] in ready and peer not in self._under_way.lost:
                self._lose(peer, f"rank {peer} (pid {self._peers.pids[peer]}) is gone")
        if now >= self._next_look:
            self._look_who_gave_up()
            self._next_look = now + _LOOK_S / 2

    def _hear_messages(self, most: int) -> None:
        while most and (message := self._mail.take(-1)) is not None:
            most -= 1
            if message[0] not in self._under_way.lost:
                self._hear(*message)

    def _take(self, transfer: Transfer) -> None:
        """Start a new transfer."""
        self._earliest_deadline = min(self._earliest_deadline, transfer.deadline)
        if self._rank in self._under_way.gave_up:
            transfer.end(self._broken())
            return
        if transfer.is_send:
            assert transfer.peer is not None
            if transfer.peer in self._under_way.lost or transfer.peer in self._under_way.gave_up:
                transfer.end(self._why(transfer, transfer.peer))
                return
            self._register(transfer, self._one_message.next_number())
            self._outbox.offer(transfer)
            return
        if self._under_way.offered(transfer):
            self._hear_messages(-1)  # one of them may say that the offer was given up
        if (offer := self._under_way.post(transfer)) is not None:
            self._match(transfer, offer)
        elif (lost := self._under_way.hopeless(transfer)) is not None:
            self._under_way.withdraw(transfer)
            transfer.end(self._why(transfer, lost))

    def _match(self, receive: Transfer, offer: Offer) -> None:
        receive.sender = offer.source
        if (receive.dtype, receive.num_elements) != (offer.dtype, offer.num_elements):
            self._outbox.say(offer.source, messages.DIFFERS, offer.number, receive.num_elements, 0, receive.dtype)
            receive.end(receive.differs(offer.source, offer.dtype, offer.num_elements))
        elif offer.is_here:
            ctypes.memmove(receive.address, offer.payload, len(offer.payload))
            self._outbox.say(offer.source, messages.DONE, offer.number)
            receive.end()
        elif offer.is_apart and self._mail.fetch(
            offer.source, receive.address, receive.num_bytes, *messages.PLACE.unpack(offer.payload)
        ):
            self._outbox.say(offer.source, messages.DONE, offer.number)
            receive.end()
        else:
            receive.number = offer.number
            self._under_way.receives[offer.source, offer.number] = receive
            self._outbox.say(offer.source, messages.ASK, offer.number)

    # The methods below send and process messages.

    def _read(self, peer: int) -> None:
        """Read what came through a peer's socket."""
        channel = self._peers.channels[peer]
        assert channel is not None
        if is_closed(channel):
            self._lose(peer, f"rank {peer} (pid {self._peers.pids[peer]}) closed its end")

    def _hear(self, peer: int, kind: int, dtype: int, number: int, second: int, third: int, payload: bytes) -> None:
        under_way = self._under_way
        if kind in (messages.OFFER, messages.APART):
            offer = Offer(peer, number, second, dtype, third, payload, is_apart=kind == messages.APART)
            receive = under_way.offer(offer)
            if receive is not None:
                self._new.appendleft(receive)  # while it is nowhere else, for the case of an error
                self._match(receive, offer)
                self._new.popleft()
        elif kind == messages.STREAM:
            if (receive := under_way.receives.get((peer, number))) is not None:
                self._mail.pull(peer, number, receive.address, receive.num_bytes, second)
        elif kind == messages.PULLED:
            receive = under_way.receives.pop((peer, number))
            self._outbox.say(peer, messages.DONE, number)
            receive.end()
        elif kind == messages.GIVEN_UP and second:
            under_way.forget_offers(peer, unless=lambda offer: offer.number != number)
            if (receive := under_way.receives.pop((peer, number), None)) is not None:
                self._mail.stop(peer, 0, number)
                receive.end(receive.given_up(peer, self._peers.pids[peer]))
        elif kind == messages.ASK and number in under_way.sends:
            self._streams.request(peer, under_way.sends[number])
        elif (send := under_way.sends.pop(number, None)) is not None:
            if kind == messages.DONE:
                send.end()
            elif kind == messages.DIFFERS:
                send.end(send.differs(peer, dtype, second))
            else:
                send.end(send.given_up(peer, self._peers.pids[peer]))
            self._streams.ended(peer, send)

    # The methods below handle failures.

    def _lose(self, peer: int, text: str) -> None:
        """Process a rank's last messages, mark it as lost, and fail the transfers that wait for it."""
        while (message := self._mail.take(peer)) is not None:
            self._hear(*message)
        has_left = self._states[peer].value == RankState.LEFT
        self._under_way.lost[peer] = (text + (", it left the group" if has_left else ""), has_left)
        channel = self._peers.channels[peer]
        assert channel is not None
        self._attendant.unregister(channel.fileno())
        if self._peers.pidfds[peer] != channel.fileno():
            self._attendant.unregister(self._peers.pidfds[peer])
        self._fail_those_with(peer)

    def _look_who_gave_up(self) -> None:
        """Fail transfers with ranks whose group broke. See [Note: a rank that gave up]."""
        for peer, state in enumerate(self._states):
            if state.value != RankState.BROKEN or peer in self._under_way.gave_up or peer in self._under_way.lost:
                continue
            words = ctypes.string_at(self._peers.segments[peer].address + DOING_OFFSET, DOING_BYTES)
            cause = words.split(b"\0")[0].decode(errors="replace")
            self._under_way.gave_up[peer] = f"rank {peer} (pid {self._peers.pids[peer]}) gave up on the group ({cause})"
            if peer == self._rank:
                for transfer in self._under_way.all():
                    self._withdraw(transfer, self._broken())
            else:
                self._fail_those_with(peer)

    def _fail_those_with(self, peer: int) -> None:
        self._outbox.forget(peer)
        self._streams.forget(peer)
        for transfer in self._under_way.take_failed(peer):
            if not transfer.is_send:
                self._mail.stop(peer, 0, transfer.number)
            self._retract(transfer)
            transfer.end(self._why(transfer, peer))

    def _why(self, transfer: Transfer, peer: int) -> BaseException:
        how = self._under_way.lost[peer][0] if peer in self._under_way.lost else self._under_way.gave_up[peer]
        text = f"{how}, while this rank waited in the {transfer.what}"
        return transfer.lost(peer, self._peers.pids[peer], text, "look at its own error")

    def _expire(self) -> None:
        """Fail the transfers that have timed out, and notify the other ranks."""
        now = time.monotonic()
        for transfer in [each for each in self._under_way.all() if each.deadline <= now]:
            pid = None if transfer.other is None else self._peers.pids[transfer.other]
            self._withdraw(transfer, transfer.too_late(pid))
        self._earliest_deadline = min((each.deadline for each in self._under_way.all()), default=math.inf)

    def _withdraw(self, transfer: Transfer, error: BaseException) -> None:
        """Fail a transfer for a reason on this rank, such as its time-out, and notify the rank at the other end."""
        other = transfer.other
        if transfer.is_send:
            del self._under_way.sends[transfer.number]
        elif other is None or self._under_way.receives.pop((other, transfer.number), None) is None:
            self._under_way.withdraw(transfer)
            other = None
        if other is not None:
            self._mail.stop(other, int(transfer.is_send), transfer.number)
            self._outbox.say(other, messages.GIVEN_UP, transfer.number, int(transfer.is_send))
        self._retract(transfer)
        transfer.end(error)
        if transfer.is_send and other is not None:
            self._streams.ended(other, transfer)

    def _retract(self, transfer: Transfer) -> None:
        """Before a send ends without its receiver having agreed: what that reads from now on is no longer the payload."""
        if transfer.is_send and transfer.peer is not None:
            self._mail.retract(transfer.peer)
