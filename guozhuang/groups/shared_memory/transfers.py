"""Sends and receives under way, and which receive gets what: no sockets, no threads of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from guozhuang.errors import MismatchError, PeerLost, WorldError, explain, rank_table


class Transfer:
    """A send or a receive under way. Made by ``PointToPoint``.

    Args:
        tensor: contiguous; kept until the transfer has ended.
        rank: this process in the group.
        peer: the other rank; None for a receive from any.
        tag: sends and receives with the same tag find each other.
        is_send: else it is a receive.
        deadline: when it fails, by ``time.monotonic()``.
        limit_s: how long that was from its call, in seconds.

    Attributes:
        source_rank: who sends; None for a receive from any rank as long as nothing came.
        what: it in words, e.g. ``"send of 1024 float32 to rank 1 (tag 0)"``.
    """

    def __init__(
        self,
        tensor: Tensor,
        rank: int,
        peer: int | None,
        tag: int,
        *,
        is_send: bool,
        deadline: float,
        limit_s: float = 0.0,
    ) -> None:
        self.rank, self.peer, self.tag, self.is_send, self.deadline = rank, peer, tag, is_send, deadline
        self.limit_s = limit_s
        self.dtype, self.num_elements = str(tensor.dtype).removeprefix("torch."), tensor.numel()
        self.address, self.num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self.source_rank: int | None = rank if is_send else peer
        self.number = 0  # of the send, as its rank counts them; 0 in a receive that nothing was matched with
        self.offset_bytes = 0  # how much was handed on or taken
        self.num_slots = 0  # of a send: slots that the receiver has not emptied
        self._tensor: Tensor | None = tensor
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

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the payload is where it belongs.

        Args:
            timeout_s: how long at most; None for as long as the transfer's own time-out. It goes on if this wait gives up.

        Raises:
            PeerLost: the other rank is gone, left, or did not come in time.
            MismatchError: the other rank asked for another size or dtype; raised on both.
            WorldError: a receive from any rank found none in time, or the group was destroyed.
        """
        if not self._ended.wait(timeout_s):
            raise self.too_late(None, timeout_s or 0.0)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """What went wrong; None while under way or when all went well."""
        return self._error

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it has ended, well or not: on the thread that ended it, or now if it has ended."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def end(self, error: BaseException | None = None) -> None:
        """Say that it has ended. Later calls do nothing."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error, self._tensor = error, None
            callbacks, self._callbacks = self._callbacks, []
            self._ended.set()
        for callback in callbacks:
            try:
                callback()
            except Exception:  # it must not take the other transfers with it
                logging.getLogger("guozhuang").exception("what was to follow a %s failed", self.what)

    def too_late(self, pid: int | None, limit_s: float | None = None) -> WorldError:
        """The error of a time-out: the transfer's own, or that of a wait for it of ``limit_s`` seconds."""
        limit_s = self.limit_s if limit_s is None else limit_s
        if self.source_rank is None:
            text = f"no rank sent anything within {limit_s:g} s to the {self.what}"
            return WorldError(explain(text, rank=self.rank, fix="look for the rank that should have sent"))
        lost = self._other()
        text = f"rank {lost} did not come within {limit_s:g} s to the {self.what}"
        fix = "see that the other rank makes the matching call, or give the group a longer timeout"
        return self.lost(lost, pid, explain(text, rank=self.rank, fix=fix))

    def lost(self, lost: int, pid: int | None, text: str) -> PeerLost:
        """The error of a rank that is gone."""
        return PeerLost(text, rank=lost, pid=pid, waiting_in=self.what)

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

    def _other(self) -> int:
        other = self.peer if self.peer is not None else self.source_rank
        assert other is not None
        return other


@dataclass
class Offer:
    """What a rank wants to send.

    Attributes:
        source: that rank.
        number: of the send, there.
        tag: of the send.
        dtype: name of the dtype.
        num_elements: of the tensor.
        payload: the bytes, if they came along; None if they are to be asked for.
        turn: counts offers of all ranks as they came.
    """

    source: int
    number: int
    tag: int
    dtype: str
    num_elements: int
    payload: bytes | None
    turn: int = 0


class Matcher:
    """Brings offers and receives together: per source and tag in order; a receive from any rank gets the oldest offer."""

    def __init__(self) -> None:
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

    def posted(self) -> Iterator[Transfer]:
        """The receives that are kept."""
        for queue in self._posted.values():
            yield from (receive for _, receive in queue)
