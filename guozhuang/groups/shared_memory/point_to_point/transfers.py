"""A send or a receive between two ranks, as the work that ``torch.distributed`` returns for it, and its errors."""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from guozhuang.errors import MismatchError, PeerLost, UsageError, WorldError, explain, rank_table
from guozhuang.groups.serial import NO_LIMIT, CallWork, PendingWork

TAGS: Final = range(-(1 << 63), 1 << 63)  # a tag must fit into a message

DTYPE_NAMES: Final = tuple(
    sorted({str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)})
)
CODES: Final = {getattr(torch, name): code for code, name in enumerate(DTYPE_NAMES)}


def check(peer: int | None, tag: object, rank: int, size: int) -> None:
    """Raise UsageError unless ``peer`` is None or another rank of the group, and ``tag`` fits into a message."""
    if peer is not None and (not 0 <= peer < size or peer == rank):
        what = "a rank sends to, and receives from, another rank of the group"
        raise UsageError(explain(what, value=peer, rank=rank, fix=f"name one of 0 to {size - 1}"))
    if not isinstance(tag, int) or tag not in TAGS:
        fix = "use a whole number from -2**63 to 2**63 - 1"
        raise UsageError(explain("a tag is a 64-bit number", value=tag, rank=rank, fix=fix))


Memory: TypeAlias = tuple[int, int, int]  # address, number of elements, bytes


class Ended(CallWork):
    """The work of a send or a receive that ended before the call returned.

    Args:
        tensor: the tensor of the call.
        sender: the rank that sent; also an attribute.
    """

    def __init__(self, tensor: Tensor, sender: int) -> None:
        super().__init__((tensor,))
        self.sender = sender

    def source_rank(self) -> int:
        """Return the rank that sent."""
        return self.sender

    _source_rank = source_rank


class Transfer(PendingWork):
    """A send or a receive, and the work that ``torch.distributed`` returns for it. Made by ``PointToPoint``.

    Args:
        tensor: the tensor of the call.
        plain: a contiguous CPU tensor to send from or receive into; kept until the transfer has ended.
        memory: its address, number of elements and bytes.
        rank: this process in the group.
        peer: the other rank; None for a receive from any rank.
        tag: only a send and a receive with the same tag match.
        is_send: True for a send, False for a receive.
        limit_s: the time-out from now on, in seconds.
        attend: lets a waiting thread process what arrives for this transfer, for at most so many seconds.
        begin: begins the transfer, if that was put off; later calls do nothing.

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
        memory: Memory,
        rank: int,
        peer: int | None,
        tag: int,
        is_send: bool,
        limit_s: float,
        attend: Callable[[Transfer, float], None] = lambda transfer, limit_s: None,
        begin: Callable[[Transfer], None] = lambda transfer: None,
    ) -> None:
        super().__init__([tensor])
        self.rank, self.peer, self.tag, self.is_send = rank, peer, tag, is_send
        self.deadline, self.limit_s = time.monotonic() + limit_s, limit_s
        self.dtype = CODES[plain.dtype]
        self.address, self.num_elements, self.num_bytes = memory
        self.sender: int | None = rank if is_send else peer
        self.number = 0  # the send's number on its rank; 0 in a receive that is not matched yet
        self._tensor, self._plain, self._attend, self._begin = tensor, plain, attend, begin

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
            self._attend(self, limit_s)
            timeout = datetime.timedelta(seconds=max(limit_s - (time.monotonic() - begin), 1e-3))
        elif not self._completed:
            self._attend(self, math.inf)
        return super().wait(timeout)

    def has_ended(self) -> bool:
        """Return whether the transfer has ended, as ``is_completed`` does, without beginning it."""
        return self._completed

    @override
    def is_completed(self) -> bool:
        if not self._completed:
            self._begin(self)
        return self._completed

    @override
    def before_end(self, last: Callable[[], None]) -> None:
        self._begin(self)
        super().before_end(last)

    @override
    def when_done(self, callback: Callable[[], None]) -> None:
        def call() -> None:
            try:
                callback()
            except Exception:  # an error in one callback must not end other transfers
                logging.getLogger("guozhuang").exception("what was to follow a %s failed", self.what)

        self._begin(self)
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
