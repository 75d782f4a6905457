"""Submissions of collectives by a rank, the handles that it gets for them, and their errors."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .requests import NamedRequest

JOIN_NAME: Final = "join"  # name of every submission of kind JOIN
DTYPES: Final = frozenset(
    {
        *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)


class Kind(enum.Enum):
    """The kind of a collective; the value is the word for it in names and errors."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"


class Reduction(enum.IntEnum):
    """The operation by which a reduction combines the tensors of all ranks."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class NegotiationError(RuntimeError):
    """A collective failed: ranks asked for different collectives, or a rank was lost, left or joined. The text says which.

    Attributes:
        is_of_kinds: whether the ranks asked for different kinds of collectives under one name.
    """

    def __init__(self, text: str, is_of_kinds: bool = False) -> None:
        super().__init__(text)
        self.is_of_kinds = is_of_kinds

    def again(self) -> NegotiationError:
        """Return a copy of this error: each waiting thread raises a copy of its own."""
        return NegotiationError(str(self), self.is_of_kinds)


class DuplicateNameError(ValueError):
    """This rank submitted a name while an earlier submission of that name had not ended."""


@dataclass(frozen=True)
class Submission:
    """One rank's request for a collective. Ranks may submit in any order; submissions of the same name belong together.

    Attributes:
        kind: the kind of collective.
        name: the name by which ranks match, beginning with the kind: ``"allreduce.layer.weight"``.
        tensors: the inputs, contiguous. Several form one unit: all of them succeed or none.
        outputs: tensors to write results to, of the inputs' shapes and dtypes; may be the inputs themselves. None: new tensors.
            For all-reduce and broadcast only.
        reduction: operation of an all-reduce or a reduce-scatter.
        prescale: factor that multiplies the inputs of a reduction.
        postscale: factor that multiplies the result of a reduction.
        root: of a broadcast, the rank in the channel whose tensors all ranks get.
        splits: of an all-to-all, how many rows of dim 0 go to each rank; the last rows may go nowhere. None: evenly.
    """

    kind: Kind
    name: str
    tensors: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] | None = None
    reduction: Reduction = Reduction.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int | None = None
    splits: tuple[int, ...] | None = None


class Handle:
    """The future result of a submission. Any thread may call ``done`` and ``wait``; only the channel calls other methods.

    Attributes:
        received_splits: after ``wait()`` of an all-to-all: how many rows came from each rank.
        last_joined: after ``wait()`` of a join: the rank (in the channel) that joined last; the same on all ranks.
        submission: the collective that was submitted. request: the description of it that other ranks get.
        since: time of the submission, on the monotonic clock, in seconds.
        ready: on an accelerator, the event after which the inputs are computed.
        outputs: the results, once the collective has been carried out.
        launched: on an accelerator, the device and the event after which the outputs are computed.
        is_wanted: whether a thread waits or polls, or the collective has ended; guarded by the channel's lock.
        has_ended: whether the collective was completed or has failed.
    """

    def __init__(
        self,
        submission: Submission,
        request: NamedRequest,
        hurry: Callable[[Handle], None],
        since: float = 0.0,
        ready: torch.Event | None = None,
    ) -> None:
        self.submission, self.request, self.since, self.ready = submission, request, since, ready
        self.received_splits: list[int] | None = None
        self.last_joined: int | None = None
        self.outputs: Sequence[Tensor] = ()
        self.launched: tuple[torch.device, torch.Event] | None = None
        self.is_wanted = self.has_ended = False
        self._hurry = hurry
        self._ended = threading.Lock()  # held until the collective has ended; a lock is the cheapest object to wait for
        self._ended.acquire()
        self._error: NegotiationError | None = None

    def done(self) -> bool:
        """Return at once whether the collective was completed or has failed; if neither, make the next round begin early."""
        if not self.has_ended:
            if not self.is_wanted:
                self._hurry(self)
            return False
        return self.launched is None or self.launched[1].query()

    def wait(self) -> list[Tensor]:
        """Wait for the collective and return its outputs; a barrier or a join has none.

        On an accelerator the caller's current stream waits, not the caller. The wait is limited by ``Settings.stall_stop_s``;
        the error after that time names the ranks that are missing.

        Raises:
            NegotiationError: it failed, on all ranks that took part; every further call raises it again.
        """
        if not self.has_ended:
            self._hurry(self)
            self._ended.acquire()
            self._ended.release()
        if self._error is not None:
            raise self._error.again() from self._error.__cause__
        if self.launched is not None:
            device, event = self.launched
            stream = torch.accelerator.current_stream(device)
            stream.wait_event(event)
            for tensor in self.outputs:
                if tensor.device.type == "cuda":  # the tensor was allocated in the channel's stream
                    tensor.record_stream(stream)
        return list(self.outputs)

    def end(self, error: NegotiationError | None = None) -> None:
        """Complete the handle, with an error or without, and wake waiting threads; a handle that has ended does not change."""
        if not self.has_ended:
            # A program that keeps the handle must not keep the inputs alive.
            self.submission = replace(self.submission, tensors=(), outputs=None)
            self._error, self.has_ended = error, True
            self._ended.release()
