"""What the thread of sends and receives does: payloads over sockets, and through slots in the sender's main segment.

[Note: how a payload travels] The sender offers (size, dtype, tag); a small payload comes along. The receiver matches offers
with receives, and compares sizes and dtypes before anything is written. Then it copies the small payload, or asks for the
large one, which comes in chunks: the sender copies a chunk into a free slot and says so, the receiver copies it out and says
that the slot is free. Up to all slots are under way, so both copy at the same time. A send has ended well when the receiver
has all of it, as the receiver may still refuse it before; like gloo's, a send therefore waits for its receive.

Each message passes through the kernel, whose locks order the memory accesses before it and after it, on every processor.

[Note: one thread owns the state] All state but the queue of new transfers belongs to one thread, which starts with the first
transfer, does everything without blocking, and sleeps in poll(): on the sockets, on the pidfds of the peers, and on an eventfd
for new transfers. When a peer is gone, what it sent before counts; the rest of what waits for it fails. A receive from any rank
fails when a rank died (it may have been the one), not when a rank left properly: others may still send.

[Note: a rank that gave up] A rank whose group broke says so in its control page, which nothing wakes anybody for: while
transfers wait, the thread looks every 0.2 s. What waits for that rank fails, as does everything once this rank's own group
is broken. Such a rank lives and may still read slots that it was told of, so it keeps them until it says otherwise or ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from guozhuang.errors import explain

from . import messages
from .engine import DOING_BYTES, DOING_OFFSET, NUM_SLOTS, SLOT_BYTES, SLOTS_OFFSET, STATE_OFFSET, RankState
from .peers import ended_events
from .rendezvous import Peers
from .segments import Segment
from .slots import Slots
from .transfers import Matcher, Offer, Transfer

__all__ = ["Courier"]

_LONGEST_SLEEP_S: Final = 3600.0
_LOOK_S: Final = 0.2  # between two looks, while transfers wait, whether a rank gave up on the group
_FEW_DEADLINES: Final = 1024
_FAREWELL_S: Final = 1.0  # for messages that are still to go out when the group is destroyed


class Courier:
    """What the thread of one rank's sends and receives owns. See [Note: how a payload travels].

    Args:
        peers: the other ranks.
        segments: the main segment of every rank, mapped here.
        rank: this process in the group.
        size: number of ranks.
        broken: what transfers fail with once this rank's group is broken.

    Attributes:
        new: transfers to begin with, from any thread.
    """

    def __init__(
        self,
        peers: Peers,
        segments: Sequence[Segment],
        rank: int,
        size: int,
        broken: Callable[[], BaseException],
    ) -> None:
        self._peers, self._rank, self._size, self._broken = peers, rank, size, broken
        self._slot_addresses = [segment.address + SLOTS_OFFSET for segment in segments]
        self._doings = [segment.address + DOING_OFFSET for segment in segments]
        self._states = [ctypes.c_uint32.from_address(segment.address + STATE_OFFSET) for segment in segments]
        self.new: deque[Transfer] = deque()  # filled by any thread
        # What follows belongs to the thread. See [Note: one thread owns the state].
        self._wake_fd = -1
        self._matcher = Matcher()
        self._next = 1
        self._sends: dict[int, Transfer] = {}
        self._receives: dict[tuple[int, int], Transfer] = {}  # that asked for a payload
        self._streams: deque[Transfer] = deque()  # sends with something left to copy into slots
        self._slots = Slots()
        self._deadlines: list[tuple[float, int, Transfer]] = []
        self._most_deadlines = _FEW_DEADLINES
        self._out: list[deque[bytes]] = [deque() for _ in range(size)]
        self._lost: dict[int, tuple[str, bool]] = {}  # why, and whether it left properly
        self._gave_up: dict[int, str] = {}  # why. See [Note: a rank that gave up]
        self._poller = select.poll()

    def watch(self, wake_fd: int) -> None:
        """Begin; ``wake_fd`` is an eventfd that tells of new transfers."""
        self._wake_fd = wake_fd
        self._poller.register(wake_fd, select.POLLIN)
        for peer, channel in enumerate(self._peers.channels):
            if channel is not None:
                self._poller.register(channel, select.POLLIN)
                pidfd = self._peers.pidfds[peer]
                self._poller.register(pidfd, ended_events(pidfd))

    def turn(self) -> None:
        """Wait until there is something to do, and do it."""
        sleep_s = _LONGEST_SLEEP_S
        if self._deadlines:
            looks = self._sends or self._receives or any(self._matcher.posted())
            longest_s = _LOOK_S if looks else _LONGEST_SLEEP_S
            sleep_s = max(min(self._deadlines[0][0] - time.monotonic(), longest_s), 0.0)
        ready = [fd for fd, _ in self._poller.poll(sleep_s * 1e3 + 1)]
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        for peer, channel in enumerate(self._peers.channels):
            if channel is None or peer in self._lost:
                continue
            if channel.fileno() in ready:
                self._read(peer, channel)
            if self._peers.pidfds[peer] in ready and peer not in self._lost:
                self._read(peer, channel)
                self._lose(peer, f"rank {peer} (pid {self._peers.pids[peer]}) is gone")
        self._look_who_gave_up()
        while self.new:
            self._take(self.new[0])
            self.new.popleft()
        self._fill_slots()
        for peer in range(self._size):
            if self._out[peer]:
                self._flush(peer)
        self._expire()

    def _take(self, transfer: Transfer) -> None:
        """Begin with a new transfer."""
        self._next += 1
        heapq.heappush(self._deadlines, (transfer.deadline, self._next, transfer))
        if self._rank in self._gave_up:
            transfer.end(self._broken())
            return
        if transfer.is_send:
            transfer.number = self._next
            assert transfer.peer is not None
            if transfer.peer in self._lost or transfer.peer in self._gave_up:
                transfer.end(self._why(transfer, transfer.peer))
                return
            self._sends[transfer.number] = transfer
            comes_along = transfer.num_bytes <= messages.ALONG_BYTES
            payload = (
                ctypes.string_at(transfer.address, transfer.num_bytes) if comes_along and transfer.num_bytes else b""
            )
            numbers = (transfer.tag, transfer.num_elements, int(comes_along))
            self._say(transfer.peer, messages.OFFER, transfer.number, *numbers, dtype=transfer.dtype, payload=payload)
            return
        offer = self._matcher.post(transfer)
        if offer is not None:
            self._match(transfer, offer)
        elif (lost := self._hopeless(transfer)) is not None:
            self._matcher.withdraw(transfer)
            transfer.end(self._why(transfer, lost))

    def _match(self, receive: Transfer, offer: Offer) -> None:
        receive.source_rank = offer.source
        if (receive.dtype, receive.num_elements) != (offer.dtype, offer.num_elements):
            self._say(offer.source, messages.DIFFERS, offer.number, receive.num_elements, dtype=receive.dtype)
            receive.end(receive.differs(offer.source, offer.dtype, offer.num_elements))
        elif offer.payload is not None:
            if receive.num_bytes:
                ctypes.memmove(receive.address, offer.payload, receive.num_bytes)
            self._say(offer.source, messages.DONE, offer.number)
            receive.end()
        else:
            receive.number = offer.number
            self._receives[offer.source, offer.number] = receive
            self._say(offer.source, messages.ASK, offer.number)

    def _fill_slots(self) -> None:
        """Copy chunks of what was asked for into free slots, the streams in turn."""
        num_stuck = 0
        while num_stuck < len(self._streams):
            send = self._streams.popleft()
            if send.is_completed():
                continue
            assert send.peer is not None
            slot = self._slots.take(send.peer, send.number)
            if slot is None:
                self._streams.append(send)
                num_stuck += 1
                continue
            num_stuck = 0
            num_bytes = min(SLOT_BYTES, send.num_bytes - send.offset_bytes)
            where = self._slot_addresses[self._rank] + slot * SLOT_BYTES
            ctypes.memmove(where, send.address + send.offset_bytes, num_bytes)
            self._say(send.peer, messages.CHUNK, send.number, slot, send.offset_bytes, num_bytes)
            self._flush(send.peer)  # the receiver copies this one while this rank copies the next
            send.offset_bytes += num_bytes
            send.num_slots += 1
            if send.offset_bytes < send.num_bytes:
                self._streams.append(send)

    # Messages.

    def _say(self, peer: int, kind: bytes, *numbers: int, dtype: str = "", payload: bytes = b"") -> None:
        if peer not in self._lost:
            self._out[peer].append(messages.pack(kind, *numbers, dtype=dtype, payload=payload))

    def _flush(self, peer: int) -> None:
        channel, out = self._peers.channels[peer], self._out[peer]
        if peer in self._lost:
            return
        assert channel is not None
        try:
            while out:
                channel.send(out[0], socket.MSG_NOSIGNAL)
                out.popleft()
            self._poller.modify(channel, select.POLLIN)
        except BlockingIOError:
            self._poller.modify(channel, select.POLLIN | select.POLLOUT)
        except OSError as error:
            if error.errno not in messages.ENDED:
                raise
            out.clear()
            self._read(peer, channel)  # what it sent before it went, and then its end

    def _read(self, peer: int, channel: socket.socket) -> None:
        while peer not in self._lost:
            try:
                message = channel.recv(messages.LONGEST_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it went without reading everything; said once, before what it sent
            if not message:
                self._lose(peer, f"rank {peer} (pid {self._peers.pids[peer]}) closed its end")
                return
            self._hear(peer, message)

    def _hear(self, peer: int, message: bytes) -> None:
        kind, name, number, second, third, fourth = messages.MESSAGE.unpack_from(message)
        dtype = name.rstrip(b"\0").decode()
        if kind == messages.OFFER:
            offer = Offer(peer, number, second, dtype, third, message[messages.MESSAGE.size :] if fourth else None)
            receive = self._matcher.offer(offer)
            if receive is not None:
                self._match(receive, offer)
        elif kind == messages.CHUNK:
            self._take_chunk(peer, number, slot=second, offset_bytes=third, num_bytes=fourth)
        elif kind == messages.EMPTIED:
            self._emptied(number)
        elif kind == messages.GIVEN_UP and second:
            self._matcher.forget_offers(peer, unless=lambda offer: offer.number != number)
            if (receive := self._receives.pop((peer, number), None)) is not None:
                self._end_badly(receive, peer, f"rank {peer} gave up its side of the {receive.what}")
        elif (send := self._sends.get(number)) is not None:
            if kind == messages.ASK:
                self._streams.append(send)
                return
            del self._sends[number]
            if kind == messages.DONE:
                send.end()
            elif kind == messages.DIFFERS:
                send.end(send.differs(peer, dtype, second))
            else:
                self._end_badly(send, peer, f"rank {peer} gave up its side of the {send.what}")

    def _take_chunk(self, peer: int, number: int, *, slot: int, offset_bytes: int, num_bytes: int) -> None:
        receive = self._receives.get((peer, number))
        if receive is not None:
            assert offset_bytes >= 0 and offset_bytes + num_bytes <= receive.num_bytes and 0 <= slot < NUM_SLOTS
            ctypes.memmove(receive.address + offset_bytes, self._slot_addresses[peer] + slot * SLOT_BYTES, num_bytes)
            receive.offset_bytes += num_bytes
        self._say(peer, messages.EMPTIED, slot)
        self._flush(peer)
        if receive is not None and receive.offset_bytes == receive.num_bytes:
            del self._receives[peer, number]
            receive.end()

    def _emptied(self, slot: int) -> None:
        send = self._sends.get(self._slots.emptied(slot))
        if send is not None:
            send.num_slots -= 1
            if send.num_slots == 0 and send.offset_bytes == send.num_bytes:
                del self._sends[send.number]
                send.end()

    # Ends that are not good.

    def _lose(self, peer: int, text: str) -> None:
        """Mark a rank as gone, and fail what waits for it."""
        has_left = self._states[peer].value == RankState.LEFT
        self._lost[peer] = (text + (", it left the group" if has_left else ""), has_left)
        channel = self._peers.channels[peer]
        assert channel is not None
        self._poller.unregister(channel)
        if self._peers.pidfds[peer] != channel.fileno():
            self._poller.unregister(self._peers.pidfds[peer])
        self._out[peer].clear()
        self._slots.take_back_all(peer)
        self._fail_those_with(peer)

    def _look_who_gave_up(self) -> None:
        """See [Note: a rank that gave up]."""
        for peer, state in enumerate(self._states):
            if state.value != RankState.BROKEN or peer in self._gave_up or peer in self._lost:
                continue
            cause = ctypes.string_at(self._doings[peer], DOING_BYTES).split(b"\0")[0].decode(errors="replace")
            self._gave_up[peer] = f"rank {peer} (pid {self._peers.pids[peer]}) gave up on the group ({cause})"
            if peer == self._rank:
                for _, _, transfer in self._deadlines:
                    self._withdraw(transfer, self._broken())
            else:
                self._fail_those_with(peer)

    def _fail_those_with(self, peer: int) -> None:
        self._matcher.forget_offers(peer, unless=lambda offer: offer.payload is not None)
        failed = [send for send in self._sends.values() if send.peer == peer]
        failed += [receive for (source, _), receive in self._receives.items() if source == peer]
        self._sends = {number: send for number, send in self._sends.items() if send.peer != peer}
        self._receives = {key: receive for key, receive in self._receives.items() if key[0] != peer}
        for receive in [each for each in self._matcher.posted() if self._hopeless(each) is not None]:
            self._matcher.withdraw(receive)
            failed.append(receive)
        for transfer in failed:
            transfer.end(self._why(transfer, peer))

    def _hopeless(self, receive: Transfer) -> int | None:
        """A lost rank because of which a receive that nothing was offered to waits in vain."""
        if receive.peer is not None:
            return receive.peer if receive.peer in self._lost or receive.peer in self._gave_up else None
        died = [peer for peer, (_, has_left) in self._lost.items() if not has_left]
        gone = self._lost.keys() | self._gave_up.keys() - {self._rank}
        return next(iter(died or (gone if len(gone) == self._size - 1 else ())), None)

    def _why(self, transfer: Transfer, peer: int) -> BaseException:
        how = self._lost[peer][0] if peer in self._lost else self._gave_up[peer]
        text = f"{how}, while this rank waited in the {transfer.what}"
        return transfer.lost(peer, self._peers.pids[peer], explain(text, rank=self._rank, fix="look at its own error"))

    def _end_badly(self, transfer: Transfer, peer: int, text: str) -> None:
        fix = "look at that rank's own error"
        transfer.end(transfer.lost(peer, self._peers.pids[peer], explain(text, rank=self._rank, fix=fix)))

    def _expire(self) -> None:
        """Fail the transfers whose time has run out, and tell the other side."""
        now = time.monotonic()
        if len(self._deadlines) > self._most_deadlines:  # what ended long before its time is still in there
            self._deadlines = [each for each in self._deadlines if not each[2].is_completed()]
            heapq.heapify(self._deadlines)
            self._most_deadlines = 2 * len(self._deadlines) + _FEW_DEADLINES
        while self._deadlines and (self._deadlines[0][2].is_completed() or self._deadlines[0][0] <= now):
            transfer = self._deadlines[0][2]
            if not transfer.is_completed():
                named = transfer.peer if transfer.peer is not None else transfer.source_rank
                self._withdraw(transfer, transfer.too_late(None if named is None else self._peers.pids[named]))
            heapq.heappop(self._deadlines)

    def _withdraw(self, transfer: Transfer, error: BaseException) -> None:
        """Fail a transfer for a reason of this rank's own, and tell the other side."""
        if transfer.is_completed():
            return
        other = transfer.peer if transfer.peer is not None else transfer.source_rank
        if transfer.is_send:
            del self._sends[transfer.number]
        elif other is None or self._receives.pop((other, transfer.number), None) is None:
            self._matcher.withdraw(transfer)
            other = None
        if other is not None:
            self._say(other, messages.GIVEN_UP, transfer.number, int(transfer.is_send))
            self._flush(other)
        transfer.end(error)

    def end(self, error: BaseException) -> None:
        """Fail all transfers that have not ended."""
        for transfer in (*self.new, *(each for _, _, each in self._deadlines)):
            transfer.end(error)

    def say_farewell(self) -> None:
        """Send what is still to go out; peers wait for it."""
        deadline = time.monotonic() + _FAREWELL_S
        while any(self._out) and time.monotonic() < deadline:
            for peer in range(self._size):
                if self._out[peer]:
                    self._flush(peer)
            if any(self._out):
                time.sleep(0.01)
