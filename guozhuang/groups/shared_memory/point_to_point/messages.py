"""The messages of sends and receives between two ranks, and the queue of those that there is no room for.

[Note: reading payloads] Where ranks can read each other's memory, a payload of 16 KiB to 4 MiB is not sent: the offer says
where it lies, and the receiver copies it from there. A sender that gives a send up counts that, in memory that both map, before
the tensor is handed back; the receiver looks at this count after it has copied, and if it is not that of the offer it requests
the payload. Larger payloads go through the ring, where both ranks copy at the same time.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections import deque
from collections.abc import Container
from typing import Final

import torch
from torch import Tensor

from ..engine import Mail, mail_ring_bytes
from .transfers import Transfer

# The kinds of messages, and the meaning of their three numbers.
OFFER: Final = 0  # sender -> receiver: number of the send, tag, elements; a small payload follows
ASK: Final = 1  # receiver -> sender: number of the send; requests its payload
STREAM: Final = 2  # sender -> receiver: number of the send, whose payload comes from now on, and its position
DONE: Final = 3  # receiver -> sender: number of a send whose whole payload has arrived
DIFFERS: Final = 4  # receiver -> sender: number of the send, number of elements that the receive expects
GIVEN_UP: Final = 5  # number of a send that one side aborted; 1 if the sender did, 0 if the receiver did
# As OFFER; its payload is the address of the values in the sender's memory, and how many sends it had given up by then.
APART: Final = 6
PULLED: Final = 128  # on the receiver: number of the send whose payload has arrived
MOST_ALONG_BYTES: Final = 256 << 10  # a payload up to this size is sent with its offer: it waits for nobody
MOST_ALONG_OF_READERS_BYTES: Final = 16 << 10  # the same where ranks read larger payloads from each other's memory
MOST_READ_BYTES: Final = 4 << 20  # larger payloads go through the ring: there both ranks copy at the same time
PLACE: Final = struct.Struct("=QQ")  # the payload of an APART
_PAUSE_S: Final = 0.01


class Outbox:
    """Sends a rank's messages in order, and queues those that there is no room for.

    Args:
        mail: takes the messages.
        size: number of ranks.
        lost: the ranks that are gone, to which nothing is sent.
        reads: whether ranks read each other's memory.

    Attributes:
        along_bytes: the most bytes of a payload that is sent with its offer.
    """

    def __init__(self, mail: Mail, size: int, lost: Container[int], reads: bool) -> None:
        self._mail, self._lost = mail, lost
        most = MOST_ALONG_OF_READERS_BYTES if reads else MOST_ALONG_BYTES
        self.along_bytes = min(most, mail_ring_bytes(size)[0] // 4)
        self._read_bytes = MOST_READ_BYTES if reads else 0
        self._place = (ctypes.c_char * PLACE.size)()  # the payload of an APART, while it is sent
        # By receiver: messages as arguments of ``Mail.put``, and copies of their payloads.
        self._waiting: list[deque[tuple[tuple[int, int, int, int, int, int, int], Tensor | None]]] = [
            deque() for _ in range(size)
        ]
        self._peers: set[int] = set()  # those for which messages wait

    def say(
        self,
        peer: int,
        kind: int,
        number: int,
        second: int = 0,
        third: int = 0,
        dtype: int = 0,
        address: int = 0,
        num_bytes: int = 0,
    ) -> None:
        """Send a message with the payload at ``address``; queue it, with a copy of the payload, if there is no room."""
        waiting = self._waiting[peer]
        if peer in self._lost:
            return
        if not waiting and self._mail.put(peer, kind, dtype, number, second, third, address, num_bytes):
            return
        kept = torch.empty(num_bytes, dtype=torch.uint8) if num_bytes else None
        if kept is not None:
            ctypes.memmove(kept.data_ptr(), address, num_bytes)
            address = kept.data_ptr()
        waiting.append(((kind, dtype, number, second, third, address, num_bytes), kept))
        self._peers.add(peer)

    def offer(self, send: Transfer) -> None:
        """Send the offer of a send."""
        assert send.peer is not None
        kind, address, num_bytes = self.goes_along(send.peer, send.address, send.num_bytes)
        self.say(send.peer, kind, send.number, send.tag, send.num_elements, send.dtype, address, num_bytes)

    def goes_along(self, peer: int, address: int, num_bytes: int) -> tuple[int, int, int]:
        """Return the kind of the offer of a payload, and where what is sent with the offer lies, and its bytes.

        That is the payload itself, its place in memory (until the next call), or nothing.
        """
        if num_bytes <= self.along_bytes:
            return OFFER, address, num_bytes
        if num_bytes > self._read_bytes:
            return OFFER, address, 0
        PLACE.pack_into(self._place, 0, address, self._mail.retracted(peer))
        return APART, ctypes.addressof(self._place), len(self._place)

    def flush(self, limit_s: float = 0.0) -> None:
        """Send what is queued as far as there is room, waiting ``limit_s`` for it; peers wake this rank when there is more."""
        begin = time.monotonic() if self._peers else 0.0
        while self._peers:
            for peer in tuple(self._peers):
                waiting = self._waiting[peer]
                while waiting and self._mail.put(peer, *waiting[0][0]):
                    waiting.popleft()
                if not waiting:
                    self._peers.discard(peer)
            if not self._peers or time.monotonic() - begin >= limit_s:
                return
            time.sleep(_PAUSE_S)

    def has(self, peer: int) -> bool:
        """Return whether messages for a peer wait."""
        return peer in self._peers

    @property
    def is_empty(self) -> bool:
        """Whether no messages wait."""
        return not self._peers

    def forget(self, peer: int) -> None:
        """Drop what is queued for a peer."""
        self._waiting[peer].clear()
        self._peers.discard(peer)


class Streams:
    """The sends whose payload their receivers requested. One payload at a time goes to each receiver.

    Args:
        mail: moves the payloads.
        outbox: tells the receivers when one begins.
        size: number of ranks.
    """

    def __init__(self, mail: Mail, outbox: Outbox, size: int) -> None:
        self._mail, self._outbox = mail, outbox
        self._sends: list[deque[Transfer]] = [deque() for _ in range(size)]  # by receiver; the first one is on its way

    def has(self, peer: int) -> bool:
        """Return whether a receiver has requested payloads that are not there yet."""
        return bool(self._sends[peer])

    def request(self, peer: int, send: Transfer) -> None:
        """Send a payload after those that the receiver requested before."""
        self._sends[peer].append(send)
        if len(self._sends[peer]) == 1:
            self._push_next(peer)

    def ended(self, peer: int, send: Transfer) -> None:
        """Go on to the next payload if it was this send's."""
        if self._sends[peer] and self._sends[peer][0] is send:
            self._push_next(peer)

    def forget(self, peer: int) -> None:
        """Send nothing more to a receiver."""
        while self._sends[peer]:
            self._mail.stop(peer, 1, self._sends[peer].popleft().number)

    def _push_next(self, peer: int) -> None:
        sends = self._sends[peer]
        while sends and sends[0].has_ended():
            self._mail.stop(peer, 1, sends.popleft().number)
        if sends:
            send = sends[0]
            position = self._mail.push(peer, send.number, send.address, send.num_bytes)
            self._outbox.say(peer, STREAM, send.number, position)
