"""Unfinished sends and receives, their messages, and the matching of sends with receives: no sockets, no threads."""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from guozhuang.errors import MismatchError, PeerLost, UsageError, WorldError, explain, rank_table
from guozhuang.groups.serial import NO_LIMIT, PendingWork

# The kinds of messages, and the meaning of their three numbers.
OFFER: Final = 0  # sender -> receiver: number of the send, tag, elements; a small payload follows
ASK: Final = 1  # receiver -> sender: number of the send; requests its payload
STREAM: Final = 2  # sender -> receiver: number of the send, whose payload comes from now on, and its position
DONE: Final = 3  # receiver -> sender: number of a send whose whole payload has arrived
DIFFERS: Final = 4  # receiver -> sender: number of the send, number of elements that the receive expects
GIVEN_UP: Final = 5  # number of a send that one side aborted; 1 if the sender did, 0 if the receiver did
PULLED: Final = 128  # on the receiver: number of the send whose payload has arrived
MOST_ALONG_BYTES: Final = 256 << 10  # a payload up to this size is sent with its offer: it waits for nobody
TAGS: Final = range(-(1 << 63), 1 << 63)  # a tag must fit into a message

DTYPE_NAMES: Final = tuple(
    sorted({str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)})
)
_CODES: Final = {getattr(torch, name): code for code, name in enumerate(DTYPE_NAMES)}


def check(peer: int | None, tag: object, rank: int, size: int) -> None:
    """Raise UsageError unless ``peer`` is None or another rank of the group, and ``tag`` fits into a message."""
    if peer is not None and (not 0 <= peer < size or peer == rank):
        what = "a rank sends to, and receives from, another rank of the group"
        raise UsageError(explain(what, value=peer, rank=rank, fix=f"name one of 0 to {size - 1}"))
    if not isinstance(tag, int) or tag not in TAGS:
        fix = "use a whole number from -2**63 to 2**63 - 1"
        raise UsageError(explain("a tag is a 64-bit number", value=tag, rank=rank, fix=fix))


class Transfer(PendingWork):
    """A send or a receive, and the work that ``torch.distributed`` returns for it. Made by ``PointToPoint``.

    Args:
        tensor: the tensor of the call.
        plain: contiguous CPU memory to send from or receive into; kept until the transfer has ended.
        rank: this process in the group.
        peer: the other rank; None for a receive from any rank.
        tag: only a send and a receive with the same tag match.
        is_send: True for a send, False for a receive.
        limit_s: the time-out from now on, in seconds.
        attend: lets a waiting thread process what arrives, as ``Attendant.attend`` does.

    Attributes:
        address: where the values lie in memory; valid until the transfer has ended.
        dtype: the place of the dtype's name in ``DTYPE_NAMES``.
        sender: the rank that sends; None for a receive from any rank that is not matched yet.
        what: the transfer in words, e.g. ``"send of 1024 float32 to rank 1 (tag 0)"``.
    """

    def __init__(
        self,
        tensor: Tensor,
        plain: Tensor,
        rank: int,
        peer: int | None,
        tag: int,
        is_send: bool,
        limit_s: float,
        attend: Callable[[Callable[[], bool], float], None] = lambda is_done, limit_s: None,
    ) -> None:
        super().__init__([tensor])
        self.rank, self.peer, self.tag, self.is_send = rank, peer, tag, is_send
        self.deadline, self.limit_s = time.monotonic() + limit_s, limit_s
        self.dtype, self.num_elements = _CODES[plain.dtype], plain.numel()
        self.sender: int | None = rank if is_send else peer
        self.number = 0  # the send's number on its rank; 0 in a receive that is not matched yet
        self.num_bytes = self.num_elements * plain.itemsize
        self.address = plain.data_ptr()
        self._tensor, self._plain, self._attend = tensor, plain, attend

    @property
    def what(self) -> str:
        """Return a description of this transfer in words, for errors."""
        where = "any rank" if self.peer is None else f"rank {self.peer}"
        kind, way = ("send", "to") if self.is_send else ("recv", "from")
        return f"{kind} of {self.num_elements} {DTYPE_NAMES[self.dtype]} {way} {where} (tag {self.tag})"

    @property
    def other(self) -> int | None:
        """Return the rank at the other end of this transfer; None while it is unknown."""
        return self.peer if self.peer is not None else self.sender

    def source_rank(self) -> int:
        """Return the rank that sent; -1 while the transfer is not matched."""
        return -1 if self.sender is None else self.sender

    _source_rank = source_rank

    @override
    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        if not self._completed and timeout is not NO_LIMIT and (limit_s := timeout.total_seconds()) > 0:
            begin = time.monotonic()
            self._attend(self.is_completed, limit_s)
            timeout = datetime.timedelta(seconds=max(limit_s - (time.monotonic() - begin), 1e-3))
        elif not self._completed:
            self._attend(self.is_completed, math.inf)
        return super().wait(timeout)

    @override
    def when_done(self, callback: Callable[[], None]) -> None:
        def call() -> None:
            try:
                callback()
            except Exception:  # an error in one callback must not end other transfers
                logging.getLogger("guozhuang").exception("what was to follow a %s failed", self.what)

        super().when_done(call)

    def end(self, error: BaseException | None = None) -> None:
        """Copy the received values to the call's tensor if needed, and mark the transfer as ended. Later calls do nothing."""
        if self._completed:
            return
        if error is None and not self.is_send and self._plain is not self._tensor:
            try:
                self._tensor.detach().copy_(self._plain)
            except Exception as refused:
                error = refused
        self._plain = self._tensor
        super().end(error)

    @override
    def _late(self, limit_s: float) -> WorldError:
        return self.too_late(None, limit_s)

    def too_late(self, pid: int | None, limit_s: float | None = None) -> WorldError:
        """Return the error of a transfer, or of one wait for it, that timed out; ``pid`` is the other rank's process."""
        limit_s, other = self.limit_s if limit_s is None else limit_s, self.other
        if other is None:
            text = f"timed out: no rank sent anything within {limit_s:g} s to the {self.what}"
            return WorldError(explain(text, rank=self.rank, fix="see that a rank makes the matching send"))
        fix = "see that the other rank makes the matching call, or give the group a longer timeout"
        return self.lost(
            other, pid, f"timed out: rank {other} did not come within {limit_s:g} s to the {self.what}", fix
        )

    def lost(self, lost: int, pid: int | None, text: str, fix: str = "look at that rank's own error") -> PeerLost:
        """Return the error of a transfer whose other rank is gone."""
        return PeerLost(explain(text, rank=self.rank, fix=fix), rank=lost, pid=pid, waiting_in=self.what)

    def given_up(self, peer: int, pid: int) -> PeerLost:
        """Return the error of a transfer that the other rank aborted."""
        return self.lost(peer, pid, f"rank {peer} gave up its side of the {self.what}")

    def differs(self, peer: int, dtype: int, num_elements: int) -> MismatchError:
        """Return the error for a send and a receive of different dtype or size; the arguments are those of the other rank."""
        mine, other = (self.rank, "sends"), (peer, "receives")
        if not self.is_send:
            mine, other = (self.rank, "receives"), (peer, "sends")
        rows = [
            (*mine, self.num_elements, DTYPE_NAMES[self.dtype]),
            (*other, num_elements, DTYPE_NAMES[dtype]),
        ]
        table = rank_table(("rank", "", "elements", "dtype"), rows)
        text = f"a send and its receive differ (tag {self.tag})"
        fix = "let both ranks use one size and dtype, or different tags"
        return MismatchError(f"{explain(text, rank=self.rank, fix=fix)}\n{table}")


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
    """

    source: int
    number: int
    tag: int
    dtype: int
    num_elements: int
    payload: bytes
    turn: int = 0

    @property
    def is_here(self) -> bool:
        """Return whether the whole payload came with the offer."""
        return bool(self.payload) or self.num_elements == 0


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
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.sends: dict[int, Transfer] = {}
        self.receives: dict[tuple[int, int], Transfer] = {}
        self.lost: dict[int, tuple[str, bool]] = {}
        self.gave_up: dict[int, str] = {}
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
