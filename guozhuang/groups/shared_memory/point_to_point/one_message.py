"""Transfers that need one message and its answer: the sender's offer, and the receiver's word that it has all of it.

[Note: the one message] A rank that waits for a transfer mostly waits for one message: a send for the receiver's answer, a
receive for the sender's offer. So the beginning of a receive is put off until someone waits for it or asks for it, or a message
arrives. If nothing else is under way then that the next message could belong to, the wait for this one message, the copy of
its payload and the answer are one call into C. Whatever else arrives first is processed in the ordinary way.
Two ranks that take turns are with each other within some microseconds. So the thread that sends writes its offer and looks that
long for the answer, in one call into C, and one that receives looks that long for the offer. What has ended then needs no
``Transfer``, which costs more than the message. Where such looks are in vain, most sends and receives do without.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from ...attending import SpinLimit
from ..engine import Mail
from . import messages
from .matching import UnderWay
from .messages import Outbox, Streams
from .transfers import CODES, Ended, Memory, Transfer

# The first arguments of a ``Transfer``.
Terms: TypeAlias = tuple[Tensor, Tensor, Memory, int, int | None, int, bool, float]


class OneMessage:
    """Ends transfers whose message is the next one, and begins sends. All is called under the lock of the ``PointToPoint``.

    Args:
        mail: the messages.
        new: transfers that have not begun.
        streams: the sends whose payload was requested.
        under_way: unfinished transfers.
        outbox: sends messages, and queues those that there is no room for.
        at_once_s: how long a send looks for its answer, and a receive for its offer, before the call returns; in seconds.
        make: makes the transfer of a send with this number, which is under way from now on.
        fall_over: ends all transfers because of an error.
    """

    def __init__(
        self,
        mail: Mail,
        new: deque[Transfer],
        streams: Streams,
        under_way: UnderWay,
        outbox: Outbox,
        at_once_s: float,
        make: Callable[[Terms, int], Transfer],
        fall_over: Callable[[BaseException], None],
    ) -> None:
        self._mail, self._new, self._streams, self._under_way, self._outbox = mail, new, streams, under_way, outbox
        self._at_once_s, self._make, self._fall_over = at_once_s, make, fall_over
        self._numbers = itertools.count(1)
        self._spins_of_sends, self._spins_of_receives = SpinLimit(), SpinLimit()

    def next_number(self) -> int:
        """Return the number of the next send of this rank."""
        return next(self._numbers)

    def begin(self, terms: Terms) -> Transfer | Ended | None:
        """Begin a send if no other is to go before it, or end a receive whose message is there; else return None."""
        if self._under_way.is_closed:
            return None
        _, _, _, _, peer, _, is_send, _ = terms
        try:
            return self._send(terms) if is_send else self._receive_at_once(terms)
        except BaseException as unexpected:
            if is_send and peer is not None:  # the offer may have been sent, and nobody knows of it
                self._mail.retract(peer)
            self._fall_over(unexpected)
            raise

    def look(self, transfer: Transfer, spin_s: float) -> bool:
        """Look for the message that ends a transfer for at most so many seconds; if it comes end the transfer, return True."""
        try:
            return self._look(transfer, spin_s)
        except BaseException as unexpected:
            # Also what a signal's handler raises: the message may be gone, and the transfer not ended.
            self._fall_over(unexpected)
            raise

    def _send(self, terms: Terms) -> Transfer | Ended | None:
        tensor, plain, (address, num_elements, num_bytes), rank, peer, tag, _, _ = terms
        assert peer is not None
        under_way = self._under_way
        if peer in under_way.lost or under_way.gave_up or self._outbox.has(peer):
            return None
        if any(each.is_send for each in tuple(self._new)):  # other threads add to it meanwhile
            return None
        kind, address, num_bytes = self._outbox.goes_along(peer, address, num_bytes)
        number, dtype = next(self._numbers), CODES[plain.dtype]
        spin_s = self._spins_of_sends.next_of(self._at_once_s)
        has_ended = self._mail.offer(peer, kind, dtype, number, tag, num_elements, address, num_bytes, spin_s)
        if has_ended is None:
            return None
        if spin_s:
            self._spins_of_sends.count(has_ended)
        return Ended(tensor, rank) if has_ended else self._make(terms, number)

    def _receive_at_once(self, terms: Terms) -> Transfer | Ended | None:
        tensor, plain, (address, num_elements, num_bytes), _, peer, tag, _, _ = terms
        if peer is None or self._new or plain is not tensor or not self._is_next(peer):
            return None
        spin_s = self._spins_of_receives.next_of(self._at_once_s)
        has_ended = self._mail.receive(peer, tag, CODES[plain.dtype], num_elements, address, num_bytes, spin_s)
        if spin_s:
            self._spins_of_receives.count(has_ended)
        return Ended(tensor, peer) if has_ended else None

    def _is_next(self, peer: int) -> bool:
        """Return whether the next offer of a peer belongs to a receive from it that has not begun."""
        under_way = self._under_way
        is_gone = peer in under_way.lost or peer in under_way.gave_up
        return not is_gone and under_way.has_no_receives and not self._outbox.has(peer)

    def _look(self, transfer: Transfer, spin_s: float) -> bool:
        peer, new = transfer.peer, self._new
        if peer is None or transfer.has_ended():  # after it has ended the memory may be gone
            return False
        if transfer.is_send:
            number, sends = transfer.number, self._under_way.sends
            if new or number not in sends or self._streams.has(peer) or self._outbox.has(peer):
                return False
            if not self._mail.confirm(peer, messages.DONE, number, spin_s):
                return False
            del sends[number]
        else:
            if len(new) != 1 or new[0] is not transfer or not self._is_next(peer):
                return False
            memory = transfer.num_elements, transfer.address, transfer.num_bytes
            if not self._mail.receive(peer, transfer.tag, transfer.dtype, *memory, spin_s):
                return False
            transfer.sender = peer
            new.popleft()
        transfer.end()
        return True
