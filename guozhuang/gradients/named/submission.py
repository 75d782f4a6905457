"""What one rank asks for, and what it gets: submissions, handles, and their errors."""

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

JOIN_NAME: Final = "join"  # of every submission of that kind
DTYPES: Final = frozenset(
    {
        *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)


class Kind(enum.Enum):
    """What a submission asks for; its value is the word for it in names, errors and the timeline."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"


class Reduction(enum.IntEnum):
    """How the tensors of the ranks become one."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class NegotiationError(RuntimeError):
    """A collective failed: ranks asked for different things, a rank was lost, left or joined. The text says which.

    Attributes:
        is_of_kinds: the ranks asked for different kinds of collectives under one name.
    """

    def __init__(self, text: str, is_of_kinds: bool = False) -> None:
        super().__init__(text)
        self.is_of_kinds = is_of_kinds

    def again(self) -> NegotiationError:
        """Return an error that says the same, to be raised elsewhere."""
        return NegotiationError(str(self), self.is_of_kinds)


class DuplicateNameError(ValueError):
    """A submission of the same name is under way on this rank."""


@dataclass(frozen=True)
class Submission:
    """One collective, as one rank asks for it. Ranks may submit in any order; what has the same name belongs together.

    Attributes:
        kind: which collective.
        name: by which ranks match, with the kind in it: ``"allreduce.layer.weight"``.
        tensors: the inputs, contiguous. Several form one unit: all of them or none.
        outputs: where results are written, of the inputs' shapes and dtypes; may be the inputs themselves. None: new tensors.
            For all-reduce and broadcast only.
        reduction: of all-reduce and reduce-scatter.
        prescale: multiplies the inputs of a reduction.
        postscale: multiplies its result.
        root: of a broadcast; a rank in the channel.
        splits: of an all-to-all, how many rows of dim 0 go to each rank; the sum may be less than there are. None: evenly.
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
    """A submission under way. ``done`` and ``wait`` may be called from any thread; all else is for the channel.

    Attributes:
        received_splits: after ``wait()`` of an all-to-all: how many rows came from each rank.
        last_joined: after ``wait()`` of a join: the rank (in the channel) that joined last; the same on all ranks.
        submission: what was asked for. request: what other ranks know of it.
        since: when it was submitted, on the monotonic clock, in seconds.
        ready: on an accelerator: the event after which the inputs are there.
        outputs: the results, once it has been carried out.
        launched: on an accelerator: device, and the event after which the outputs are there.
        is_wanted: somebody waits, or it is too late for haste; the channel's lock is over it.
        has_ended: it was completed, or has failed.
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
        self._ended = threading.Lock()  # held until the end: the cheapest thing to wait for
        self._ended.acquire()
        self._error: NegotiationError | None = None

    def done(self) -> bool:
        """Tell, without waiting, whether it has ended, well or not. Not ended: the channel makes haste from now on."""
        if not self.has_ended:
            if not self.is_wanted:
                self._hurry(self)
            return False
        return self.launched is None or self.launched[1].query()

    def wait(self) -> list[Tensor]:
        """Return the outputs when they are there; those of a barrier or a join are none.

        On an accelerator the caller's current stream waits, not the caller. The limit is that of stalls (``Settings``), and
        what fails names the ranks that did not come.

        Raises:
            NegotiationError: it failed, on all ranks that took part; again at every call.
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
                if tensor.device.type == "cuda":  # allocated in the channel's stream
                    tensor.record_stream(stream)
        return list(self.outputs)

    def end(self, error: NegotiationError | None = None) -> None:
        """Let those who wait go on, with the outputs or an error. What has ended already stays as it is."""
        if not self.has_ended:
            self.submission = replace(
                self.submission, tensors=(), outputs=None
            )  # who waits late must not hold the inputs
            self._error, self.has_ended = error, True
            self._ended.release()
