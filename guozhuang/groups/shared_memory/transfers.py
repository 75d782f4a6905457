"""Sends and receives under way, the messages about them, and which receive gets what: no sockets, no threads."""

from __future__ import annotations

import ctypes
import datetime
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from guozhuang.errors import MismatchError, PeerLost, WorldError, explain, rank_table

# Each message begins with its kind, the name of the dtype, and three numbers, whose meanings depend on the kind.
MESSAGE: Final = struct.Struct("<4s20sqqq")
OFFER: Final = b"OFFR"  # sender -> receiver: number of the send, tag, elements; a small payload follows
ASK: Final = b"ASK "  # receiver -> sender: number; the sender is to send the payload
CHUNK: Final = b"CHNK"  # sender -> receiver: number, offset in bytes; a part of the payload follows
DONE: Final = b"DONE"  # receiver -> sender: number; the receiver has the whole payload
DIFFERS: Final = b"DIFF"  # receiver -> sender: number, elements that the receive wants
GIVEN_UP: Final = b"GONE"  # sender -> receiver: number, 1; receiver -> sender: number, 0
ALONG_BYTES: Final = 16 << 10  # a payload up to this size comes along with its offer
TAGS: Final = range(-(1 << 63), 1 << 63)  # a tag has to fit into a message


def pack(kind: bytes, number: int, *numbers: int, dtype: str = "", payload: bytes = b"") -> bytes:
    """Put a message together; numbers that a kind does not use are 0."""
    return MESSAGE.pack(kind, dtype.encode(), number, *(*numbers, 0, 0)[:2]) + payload


class Transfer(dist._Work):
    """A send or a receive, and the work that ``torch.distributed`` returns for it. Made by ``PointToPoint``.

    Args:
        tensor: the tensor of the call.
        plain: contiguous CPU memory with its values, or that receives them; kept until the transfer has ended.
        rank: this process in the group.
        peer: the other rank; None for a receive from any.
        tag: sends and receives with the same tag find each other.
        is_send: else it is a receive.
        limit_s: how long it may take from now on, in seconds.

    Attributes:
        sender: the rank that sends; None for a receive from any rank as long as nothing came.
        what: the transfer in words, e.g. ``"send of 1024 float32 to rank 1 (tag 0)"``.
    """

    def __init__(
        self,
        tensor: Tensor,
        plain: Tensor,
        rank: int,
        peer: int | None,
        tag: int,
        *,
        is_send: bool,
        limit_s: float,
    ) -> None:
        super().__init__()
        assert plain.is_contiguous() and plain.is_cpu
        self.rank, self.peer, self.tag, self.is_send = rank, peer, tag, is_send
        self.deadline, self.limit_s = time.monotonic() + limit_s, limit_s
        self.dtype, self.num_elements = str(plain.dtype).removeprefix("torch."), plain.numel()
        self.sender: int | None = rank if is_send else peer
        self.number = 0  # of the send, as its rank counts them; 0 in a receive that nothing was matched with
        self.offset_bytes = 0  # how much of the payload was sent or received
        self.num_bytes = plain.numel() * plain.element_size()
        self.payload = memoryview(b"")
        if self.num_bytes:
            self.payload = memoryview((ctypes.c_ubyte * self.num_bytes).from_address(plain.data_ptr())).cast("B")
        self._tensor, self._plain = tensor, plain
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def what(self) -> str:
        """The transfer in words."""
        where = "any rank" if self.peer is None else f"rank {self.peer}"
        kind, way = ("send", "to") if self.is_send else ("recv", "from")
        return f"{kind} of {self.num_elements} {self.dtype} {way} {where} (tag {self.tag})"

    @property
    def other(self) -> int | None:
        """The rank at the other end, as far as it is known."""
        return self.peer if self.peer is not None else self.sender

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait until the tensor was sent or received.

        Args:
            timeout: how long at most; 0 for as long as the transfer's own time-out. It goes on if this wait gives up.

        Raises:
            PeerLost: the other rank is gone, left, or did not come in time.
            MismatchError: the other rank asked for another size or dtype; raised on both.
            WorldError: a receive from any rank found none in time, or the group was destroyed.
        """
        limit_s = timeout.total_seconds()
        if not self._ended.wait(limit_s if limit_s > 0 else None):
            raise self.too_late(None, limit_s)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong; None while under way or when all went well."""
        return self._error

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def source_rank(self) -> int:
        """Who sent; -1 as long as nobody has."""
        return -1 if self.sender is None else self.sender

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        """The tensor; waits for it."""
        self.wait()
        return [self._tensor]

    def get_future(self) -> Future[list[Tensor]]:
        """A future of the tensor; it raises what went wrong."""
        source: Future[None] = Future()
        self.when_done(lambda: source.set_result(None))
        return source.then(lambda _: self.result())

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it has ended, well or not: on the thread that ended it, or now if it has ended."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def end(self, error: BaseException | None = None) -> None:
        """Mark it as ended, after what was received is where the call wants it. Later calls do nothing."""
        if error is None and not self.is_send and self._plain is not self._tensor and not self._ended.is_set():
            try:
                self._tensor.detach().copy_(self._plain)
            except Exception as refused:
                error = refused
        with self._lock:
            if self._ended.is_set():
                return
            self._error, self._plain, self.payload = error, self._tensor, memoryview(b"")
            callbacks, self._callbacks = self._callbacks, []
            self._ended.set()
        for callback in callbacks:
            try:
                callback()
            except Exception:  # it must not take the other transfers with it
                logging.getLogger("guozhuang").exception("what was to follow a %s failed", self.what)

    def too_late(self, pid: int | None, limit_s: float | None = None) -> WorldError:
        """The error of a transfer, or of one wait for it, whose time ran out; ``pid`` is that of the other rank."""
        limit_s, other = self.limit_s if limit_s is None else limit_s, self.other
        if other is None:
            text = f"no rank sent anything within {limit_s:g} s to the {self.what}"
            return WorldError(explain(text, rank=self.rank, fix="see that a rank makes the matching send"))
        fix = "see that the other rank makes the matching call, or give the group a longer timeout"
        return self.lost(other, pid, f"rank {other} did not come within {limit_s:g} s to the {self.what}", fix)

    def lost(self, lost: int, pid: int | None, text: str, fix: str = "look at that rank's own error") -> PeerLost:
        """The error of a rank that is gone."""
        return PeerLost(explain(text, rank=self.rank, fix=fix), rank=lost, pid=pid, waiting_in=self.what)

    def given_up(self, peer: int, pid: int) -> PeerLost:
        """The error of a transfer that the other rank gave up."""
        return self.lost(peer, pid, f"rank {peer} gave up its side of the {self.what}")

    def differs(self, peer: int, dtype: str, num_elements: int) -> MismatchError:
        """The error of two ranks that mean different payloads; ``dtype`` and ``num_elements`` are the other's."""
        mine, other = (self.rank, "sends"), (peer, "receives")
        if not self.is_send:
            mine, other = (self.rank, "receives"), (peer, "sends")
        rows = [(*mine, self.num_elements, self.dtype), (*other, num_elements, dtype)]
        table = rank_table(("rank", "", "elements", "dtype"), rows)
        text = f"a send and its receive differ (tag {self.tag})"
        fix = "let both ranks use one size and dtype, or different tags"
        return MismatchError(f"{explain(text, rank=self.rank, fix=fix)}\n{table}")


@dataclass
class Offer:
    """What a rank wants to send.

    Attributes:
        source: that rank.
        number: of the send, there.
        tag: of the send.
        dtype: name of the dtype.
        num_elements: of the tensor.
        payload: the bytes of a small payload, which came along; empty if they are to be asked for.
        turn: counts offers of all ranks as they came.
    """

    source: int
    number: int
    tag: int
    dtype: str
    num_elements: int
    payload: bytes
    turn: int = 0

    @property
    def is_here(self) -> bool:
        """Whether the whole payload came along."""
        return bool(self.payload) or self.num_elements == 0


class UnderWay:
    """The transfers of a rank that have not ended, and the ranks from which nothing can come any more.

    It brings offers and receives together: per source and tag in order; a receive from any rank gets the oldest offer.

    Args:
        rank: this process in the group.
        size: number of ranks.

    Attributes:
        sends: by number.
        receives: those that asked for a payload, by source and number of the send.
        lost: for each rank that is gone, why, and whether it left properly.
        gave_up: for each rank whose group broke, why.
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
        """Take a receive; return the offer it gets, or None: it is kept then."""
        sources = [receive.peer] if receive.peer is not None else [s for s, tag in self._offers if tag == receive.tag]
        keys = [(source, receive.tag) for source in sources if (source, receive.tag) in self._offers]
        if keys:
            key = min(keys, key=lambda k: self._offers[k][0].turn)
            offer = self._offers[key].popleft()
            if not self._offers[key]:
                del self._offers[key]
            return offer
        self._turn += 1
        self._posted.setdefault((receive.peer, receive.tag), deque()).append((self._turn, receive))
        return None

    def offer(self, offer: Offer) -> Transfer | None:
        """Take an offer; return the receive that gets it, or None: it is kept then."""
        keys = [key for key in ((offer.source, offer.tag), (None, offer.tag)) if key in self._posted]
        if keys:
            key = min(keys, key=lambda k: self._posted[k][0][0])
            _, receive = self._posted[key].popleft()
            if not self._posted[key]:
                del self._posted[key]
            return receive
        self._turn += 1
        offer.turn = self._turn
        self._offers.setdefault((offer.source, offer.tag), deque()).append(offer)
        return None

    def withdraw(self, receive: Transfer) -> None:
        """Forget a receive, if it is kept."""
        key = (receive.peer, receive.tag)
        kept = deque(each for each in self._posted.pop(key, ()) if each[1] is not receive)
        if kept:
            self._posted[key] = kept

    def forget_offers(self, source: int, unless: Callable[[Offer], bool]) -> None:
        """Forget the offers of a rank, but for those of which ``unless`` is true."""
        for key in [key for key in self._offers if key[0] == source]:
            kept = deque(offer for offer in self._offers.pop(key) if unless(offer))
            if kept:
                self._offers[key] = kept

    def all(self) -> list[Transfer]:
        """All transfers that have begun and not ended."""
        return [*self.sends.values(), *self.receives.values(), *self._all_posted()]

    def take_failed(self, peer: int) -> list[Transfer]:
        """Forget, and return, the transfers that can have no good end now that a rank is lost or gave up."""
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
        """A lost rank because of which a receive that nothing was offered to waits in vain."""
        if receive.peer is not None:
            return receive.peer if receive.peer in self.lost or receive.peer in self.gave_up else None
        died = [peer for peer, (_, has_left) in self.lost.items() if not has_left]
        gone = self.lost.keys() | self.gave_up.keys() - {self._rank}
        return next(iter(died or (gone if len(gone) == self._size - 1 else ())), None)

    def _all_posted(self) -> list[Transfer]:
        return [receive for queue in self._posted.values() for _, receive in queue]
