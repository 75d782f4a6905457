"""The unfinished sends and receives of a rank, and the matching of sends with receives: no sockets, no threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .transfers import Transfer


@dataclass(slots=True)
class Offer:
    """A rank's message that it wants to send a tensor.

    Attributes:
        source: the rank that sends.
        number: the send's number on that rank.
        tag: the send's tag.
        dtype: the place of the dtype's name in ``DTYPE_NAMES``.
        num_elements: the tensor's number of elements.
        payload: the bytes of a small payload; empty if the receiver must request them.
        turn: a counter over the offers of all ranks, in order of arrival.
        is_apart: whether ``payload`` says where the values lie in the sender's memory.
    """

    source: int
    number: int
    tag: int
    dtype: int
    num_elements: int
    payload: bytes
    turn: int = 0
    is_apart: bool = False

    @property
    def is_here(self) -> bool:
        """Return whether the whole payload came with the offer."""
        return not self.is_apart and (bool(self.payload) or self.num_elements == 0)


class UnderWay:
    """The unfinished transfers of a rank, and the ranks from which no more messages can arrive.

    Matches offers with receives: per source and tag in order; a receive from any rank matches the oldest offer.

    Args:
        rank: this process in the group.
        size: number of ranks.

    Attributes:
        sends: the sends by number.
        receives: receives that have requested a payload, by source and number of the send.
        lost: for each rank that is gone: the reason, and whether it left the group properly.
        gave_up: for each rank whose group broke: the reason.
        is_closed: whether transfers neither begin nor go on any more.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.sends: dict[int, Transfer] = {}
        self.receives: dict[tuple[int, int], Transfer] = {}
        self.lost: dict[int, tuple[str, bool]] = {}
        self.gave_up: dict[int, str] = {}
        self.is_closed = False
        self._turn = 0
        self._posted: dict[tuple[int | None, int], deque[tuple[int, Transfer]]] = {}
        self._offers: dict[tuple[int, int], deque[Offer]] = {}

    def post(self, receive: Transfer) -> Offer | None:
        """Match a receive with an offer and return the offer; if there is none, store the receive and return None."""
        if keys := self.offered(receive):
            key = min(keys, key=lambda k: self._offers[k][0].turn)
            offer = self._offers[key].popleft()
            if not self._offers[key]:
                del self._offers[key]
            return offer
        self._turn += 1
        self._posted.setdefault((receive.peer, receive.tag), deque()).append((self._turn, receive))
        return None

    def offered(self, receive: Transfer) -> list[tuple[int, int]]:
        """Return source and tag of the stored offers that a receive may match."""
        return [key for key in self._offers if key[1] == receive.tag and receive.peer in (None, key[0])]

    def offer(self, offer: Offer) -> Transfer | None:
        """Match an offer with a receive and return the receive; if there is none, store the offer and return None."""
        posted, anyone = self._posted, (None, offer.tag)
        key: tuple[int | None, int] = offer.source, offer.tag
        queue = posted.get(key)
        if anyone in posted and (queue is None or posted[anyone][0][0] < queue[0][0]):
            key, queue = anyone, posted[anyone]
        if queue is not None:
            _, receive = queue.popleft()
            if not queue:
                del posted[key]
            return receive
        self._turn += 1
        offer.turn = self._turn
        self._offers.setdefault((offer.source, offer.tag), deque()).append(offer)
        return None

    def withdraw(self, receive: Transfer) -> None:
        """Remove a receive that is stored unmatched."""
        key = (receive.peer, receive.tag)
        kept = deque(each for each in self._posted.pop(key, ()) if each[1] is not receive)
        if kept:
            self._posted[key] = kept

    def forget_offers(self, source: int, unless: Callable[[Offer], bool]) -> None:
        """Remove the offers of a rank, except those for which ``unless`` is true."""
        for key in [key for key in self._offers if key[0] == source]:
            kept = deque(offer for offer in self._offers.pop(key) if unless(offer))
            if kept:
                self._offers[key] = kept

    @property
    def has_no_receives(self) -> bool:
        """Whether neither receives nor offers are stored unmatched, so that the next offer and the next receive may match."""
        return not (self._posted or self._offers)

    @property
    def has_offers(self) -> bool:
        """Whether offers are stored. Any thread may ask."""
        return bool(self._offers)

    @property
    def is_empty(self) -> bool:
        """Whether no transfer is unfinished."""
        return not (self.sends or self.receives or self._posted)

    def all(self) -> list[Transfer]:
        """Return all unfinished transfers."""
        return [*self.sends.values(), *self.receives.values(), *self._all_posted()]

    def take_failed(self, peer: int) -> list[Transfer]:
        """Remove and return the transfers that cannot succeed now that a rank is lost or has broken its group."""
        self.forget_offers(peer, unless=lambda offer: offer.is_here)
        failed = [send for send in self.sends.values() if send.peer == peer]
        failed += [receive for (source, _), receive in self.receives.items() if source == peer]
        self.sends = {number: send for number, send in self.sends.items() if send.peer != peer}
        self.receives = {key: receive for key, receive in self.receives.items() if key[0] != peer}
        for receive in [each for each in self._all_posted() if self.hopeless(each) is not None]:
            self.withdraw(receive)
            failed.append(receive)
        return failed

    def hopeless(self, receive: Transfer) -> int | None:
        """Return a rank whose loss or broken group makes an unmatched receive fail; None if the receive may still succeed."""
        if receive.peer is not None:
            return receive.peer if receive.peer in self.lost or receive.peer in self.gave_up else None
        died = [peer for peer, (_, has_left) in self.lost.items() if not has_left]
        gone = self.lost.keys() | self.gave_up.keys() - {self._rank}
        return next(iter(died or (gone if len(gone) == self._size - 1 else ())), None)

    def _all_posted(self) -> list[Transfer]:
        return [receive for queue in self._posted.values() for _, receive in queue]
