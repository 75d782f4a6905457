"""Waits for the one message that ends a transfer.

[Note: the one message] A rank that waits for a transfer mostly waits for one message: a send for the receiver's answer, a
receive for the sender's offer. So the beginning of a receive is put off until someone waits for it or asks for it, or a message
arrives. If nothing else is under way then that the next message could belong to, the wait for this one message, the copy of
its payload and the answer are one call into C. Whatever else arrives first is processed in the ordinary way.
"""

from __future__ import annotations

from collections import deque

from ..engine import Mail
from . import messages
from .matching import UnderWay
from .messages import Outbox, Streams
from .transfers import Transfer


class OneMessage:
    """Ends transfers whose message is the next one. The arguments are the parts of a ``PointToPoint``.

    Args:
        mail: the messages.
        new: transfers that have not begun.
        streams: the sends whose payload was requested.
        under_way: unfinished transfers.
        outbox: sends messages, and queues those that there is no room for.
    """

    def __init__(
        self,
        mail: Mail,
        new: deque[Transfer],
        streams: Streams,
        under_way: UnderWay,
        outbox: Outbox,
    ) -> None:
        self._mail, self._new, self._streams, self._under_way, self._outbox = mail, new, streams, under_way, outbox

    def look(self, transfer: Transfer, spin_s: float) -> bool:
        """Look for the message that ends a transfer for at most so many seconds; if it comes end the transfer, return True."""
        peer, under_way, new = transfer.peer, self._under_way, self._new
        if peer is None or transfer.has_ended() or self._outbox.has(peer):  # after it has ended the memory may be gone
            return False
        if transfer.is_send:
            number = transfer.number
            if new or number not in under_way.sends or self._streams.has(peer):
                return False
            if not self._mail.confirm(peer, messages.DONE, number, spin_s):
                return False
            del under_way.sends[number]
        else:
            if len(new) != 1 or new[0] is not transfer or not under_way.has_no_receives:
                return False
            if peer in under_way.lost or peer in under_way.gave_up:
                return False
            values = transfer.tag, transfer.dtype, transfer.num_elements, transfer.address, transfer.num_bytes
            if not self._mail.receive(peer, *values, spin_s):
                return False
            transfer.sender = peer
            new.popleft()
        transfer.end()
        return True
