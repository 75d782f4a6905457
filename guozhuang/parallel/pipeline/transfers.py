"""The messages between the stages of a pipeline: outputs of a stage to those that need them, and their gradients back.

[Note: messages of a pipeline] A message is a list of tensors of one microbatch, from one stage to another. It begins with a
header of fixed size that tells which message it is, and number, dtypes and shapes of its tensors, which may so differ from one
microbatch to the next. The tensors follow, each as bytes. Groups deliver what one rank sends to another in the order of the
sends, so each rank knows from the action lists which message of a rank comes next, and receives a rank's messages in this order
while it computes. It is one message ahead, of activations from when they are handed out and of gradients from when they were
used, so that buffers are few; where a later message is needed first, it goes on to that one, so that no order of use can block.
Where a group's works tell whether they have ended (shm, on the CPU), the receives of a message are started by whoever sends or
receives next; elsewhere (gloo, accelerators) one thread for each rank from which messages come waits for them. A send returns
at once. Its tensors are kept until they have left; as works of gloo do not tell when that is, a rank that has more messages on
their way to another than the schedule has microbatches in flight waits for the oldest of them, which the other rank must have
used.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import MismatchError, PeerLost, WorldError, explain
from guozhuang.groups.agreement import store_of
from guozhuang.groups.serial import SerialThread, SerialWork
from guozhuang.watch.processes import SEE_EACH_OTHER, STOPPED, Process, node_identity, state_of, this_process

ACTIVATIONS, GRADIENTS, CONCLUSION = "activations", "gradients", "conclusion"
_KINDS: Final = (ACTIVATIONS, GRADIENTS, CONCLUSION)
_DTYPES: Final = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_HEADER_WORDS: Final = 48  # of 8 bytes; longer descriptions continue in a second header
_FIRST_WORDS: Final = 7
_ABSENT, _REQUIRES_GRAD, _ON_CPU = 1, 2, 4
#: Seconds between two looks at the process of a rank that is being waited for.
LOOK_S: Final = 0.25
_log = logging.getLogger("guozhuang")


class StageMessage(NamedTuple):
    """Which message: its kind, the stages it goes from and to, and the microbatch."""

    kind: str
    source: int
    destination: int
    microbatch: int

    def __str__(self) -> str:
        """Return the message as errors call it."""
        if self.kind == CONCLUSION:
            return f"the {self.kind} of the batch"
        return f"the {self.kind} of microbatch {self.microbatch} from stage {self.source} to stage {self.destination}"


def shapes_of(tensors: Iterable[Tensor | None]) -> str:
    """Return dtypes and shapes of tensors for an error, such as ``float32 (4, 16), none``."""
    texts = ["none" if t is None else f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors]
    return ", ".join(texts) or "no tensors"


class StageTransfers:
    """The messages of one rank of a pipeline. See [Note: messages of a pipeline]. Every rank of the group must construct it.

    Args:
        group: the ranks of the pipeline.
        rank_of: returns the rank that has a stage.
        device: where received tensors are put, unless they were on the CPU of a rank that computes elsewhere.

    Attributes:
        num_buffers: how many received messages are kept: until the caller says by :meth:`release` that it has used them.
        most_buffers: the largest value of ``num_buffers`` so far.
    """

    def __init__(self, group: dist.ProcessGroup, rank_of: Callable[[int], int], device: torch.device) -> None:
        self._group, self._rank_of, self._device = group, rank_of, device
        kinds = {torch.device(each).type for each in getattr(group, "_device_types", ["cpu"])}
        self._header_device = torch.device("cpu") if "cpu" in kinds or not kinds else device
        # Tensors on accelerators travel through another group, whose works do not.
        self._polls = self._device.type == "cpu" and bool(getattr(group, "works_tell_their_end", False))
        self._threads: dict[int, SerialThread] = {}
        self._polled: dict[int, _PolledReceive] = {}  # by rank: the last one
        self._expected: dict[int, deque[StageMessage]] = defaultdict(deque)
        self._coming: dict[StageMessage, tuple[SerialWork | _PolledReceive, list[list[Tensor | None]]]] = {}
        self._sent: dict[int, deque[tuple[StageMessage, list[tuple[dist.Work, Tensor]]]]] = defaultdict(deque)
        self._here: dict[StageMessage, list[Tensor | None]] = {}
        self._batch, self._most_on_their_way = (0, 0), 0
        self.num_buffers = self.most_buffers = 0
        self._counting = threading.Lock()
        self._process = this_process(node_identity(SEE_EACH_OTHER))
        store_of(group).set(f"guozhuang/pipeline/{group.rank()}", str(self._process))
        self._told: set[int] = set()

    def begin(self, batch: int, num_microbatches: int, most_in_flight: int) -> None:
        """Tell which batch the following messages belong to, and how many microbatches it has, at all and in flight."""
        self._batch, self._most_on_their_way = (batch, num_microbatches), most_in_flight + 2

    def expect(self, peer: int, messages: Sequence[StageMessage]) -> None:
        """Start to receive the messages that a rank sends from now on, in the order in which it sends them."""
        if peer not in self._threads and not self._polls:
            self._threads[peer] = SerialThread(f"guozhuang pipeline from {peer}")
        assert not self._expected[peer], f"rank {peer} has not sent all of the last batch"
        self._expected[peer].extend(messages)
        self._take_next(peer)

    def has(self, message: StageMessage) -> bool:
        """Return whether a message has arrived, or its receive has failed."""
        if message in self._here:
            return True
        self._take_up_to(message)
        self._go_on()
        return self._coming[message][0].is_completed()

    def receive(self, message: StageMessage, why: str) -> list[Tensor | None]:
        """Wait for a message and return its tensors.

        Args:
            message: one that was expected, or was sent by this rank to itself.
            why: the action that needs it, for errors.

        Raises:
            PeerLost, WorldError, MismatchError: it did not arrive; the text names stage, microbatch and action.
        """
        if message in self._here:
            return self._here.pop(message)
        self._take_up_to(message)
        work, found = self._coming.pop(message)
        peer = self._rank_of(message.source)
        if message.kind == ACTIVATIONS:
            self._take_next(peer)
        while True:
            try:
                self._go_on()
                if _ended_within(work, datetime.timedelta(seconds=LOOK_S)):
                    break
            except Exception as error:
                # The error's traceback keeps this frame, and so would keep the work that keeps the error.
                del work, found
                raise self._failed("receive", message, peer, why, error) from error
            self._look(peer, message, why)
        tensors = found.pop()
        for tensor in tensors:
            if tensor is not None and tensor.device.type != "cpu":
                tensor.record_stream(torch.accelerator.current_stream(tensor.device))
        return tensors

    def _take_up_to(self, message: StageMessage) -> None:
        while message not in self._coming:
            self._take_next(self._rank_of(message.source))

    def _take_next(self, peer: int) -> None:
        """Have the thread of a rank receive the next message that is expected from there, if there is one."""
        if self._expected[peer]:
            message, found = self._expected[peer].popleft(), list[list[Tensor | None]]()
            steps = self._take(peer, message, self._batch, found)
            if self._polls:
                self._polled[peer] = polled = _PolledReceive(steps, self._polled.get(peer))
                self._coming[message] = polled, found
                polled.is_completed()
                return
            devices = [self._device] if self._device.type != "cpu" else []
            self._coming[message] = self._threads[peer].run(partial(_wait_for_all, steps), devices), found

    def _go_on(self) -> None:
        """Start what can be started of the receives that no thread waits for, in the order of each rank's messages."""
        for last in self._polled.values():
            last.is_completed()

    def release(self, messages: Sequence[StageMessage]) -> None:
        """Count messages as used; those of this rank to itself are not counted."""
        for message in messages:
            peer = self._rank_of(message.source)
            if peer != self._group.rank():
                with self._counting:
                    self.num_buffers -= 1
                if message.kind == GRADIENTS:
                    self._take_next(peer)

    def send(self, message: StageMessage, tensors: Sequence[Tensor | None], why: str) -> None:
        """Start to send a message, and return at once; to a stage of this rank, hand it over.

        Raises:
            PeerLost, WorldError: the receiving rank is gone, or an earlier message could not be sent.
        """
        peer = self._rank_of(message.destination)
        if peer == self._group.rank():
            self._here[message] = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
            return
        works: list[tuple[dist.Work, Tensor]] = []
        try:
            for header in self._headers(message, tensors):
                self._start(header, peer, works)
            for tensor in tensors:
                if tensor is not None and tensor.numel():
                    self._start(_bytes_of(tensor.detach().contiguous()), peer, works)
        except Exception as error:
            raise self._failed("send", message, peer, why, error, tensors) from error
        self._go_on()
        self._sent[peer].append((message, works))
        self._reap(peer, self._most_on_their_way, why)

    def finish(self, why: str) -> None:
        """Wait until everything that was sent has left."""
        for peer in self._sent:
            self._reap(peer, 0, why)

    def _start(self, tensor: Tensor, peer: int, works: list[tuple[dist.Work, Tensor]]) -> None:
        work = dist.isend(tensor, group=self._group, group_dst=peer)
        assert work is not None, f"rank {peer} is not in the group"
        works.append((work, tensor))

    def _reap(self, peer: int, num_kept: int, why: str) -> None:
        """Let go of what has left for a rank; wait for the oldest messages if more than ``num_kept`` are on their way."""
        sent = self._sent[peer]
        while sent and (len(sent) > num_kept or all(work.is_completed() for work, _ in sent[0][1])):
            message, works = sent.popleft()
            try:
                for work, _ in works:
                    work.wait()
            except Exception as error:
                raise self._failed("send", message, peer, why, error, [tensor for _, tensor in works]) from error

    def _headers(self, message: StageMessage, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        words = [*self._batch, _KINDS.index(message.kind), *message[1:], 0]
        for tensor in tensors:
            if tensor is None:
                words += [_ABSENT, 0, 0]
                continue
            on_cpu = tensor.device.type == "cpu" != self._device.type
            flags = _REQUIRES_GRAD * tensor.requires_grad + _ON_CPU * on_cpu
            words += [flags, _code_of(tensor.dtype), tensor.ndim, *tensor.shape]
        words[_FIRST_WORDS - 1] = len(words) - _FIRST_WORDS
        padded = words + [0] * (_HEADER_WORDS - len(words))
        headers = [padded[:_HEADER_WORDS]] + ([padded[_HEADER_WORDS:]] if len(padded) > _HEADER_WORDS else [])
        return [torch.tensor(each, dtype=torch.int64, device=self._header_device) for each in headers]

    def _start_receive(self, tensor: Tensor, peer: int) -> dist.Work:
        work = dist.irecv(tensor, group=self._group, group_src=peer)
        assert work is not None, f"rank {peer} is not in the group"
        return work

    def _take(
        self, peer: int, message: StageMessage, batch: tuple[int, int], found: list[list[Tensor | None]]
    ) -> Iterator[dist.Work]:
        """Receive a message: go on after each work that this yields when that has ended."""
        header = torch.empty(_HEADER_WORDS, dtype=torch.int64, device=self._header_device)
        yield self._start_receive(header, peer)
        words = header.tolist()
        came = StageMessage(_KINDS[words[2]], *words[3:6])
        if (came, tuple(words[:2])) != (message, batch):
            what = (
                f"rank {peer} sent {came}, batch {words[0]} of {words[1]} microbatches, in place of {message}, batch "
            )
            what += f"{batch[0]} of {batch[1]} microbatches"
            fix = "give all ranks of a pipeline the same batches, and let them call the model and backward in the same order"
            raise MismatchError(explain(what, rank=self._group.rank(), fix=fix))
        num_more = _FIRST_WORDS + words[_FIRST_WORDS - 1] - _HEADER_WORDS
        if num_more > 0:
            rest = torch.empty(num_more, dtype=torch.int64, device=self._header_device)
            yield self._start_receive(rest, peer)
            words += rest.tolist()
        words = words[_FIRST_WORDS : _FIRST_WORDS + words[_FIRST_WORDS - 1]]
        tensors: list[Tensor | None] = []
        works: list[dist.Work] = []
        while words:
            flags, code, num_dims = words[:3]
            shape, words = words[3 : 3 + num_dims], words[3 + num_dims :]
            if flags & _ABSENT:
                tensors.append(None)
                continue
            device = torch.device("cpu") if flags & _ON_CPU else self._device
            tensor = torch.empty(shape, dtype=_DTYPES[code], device=device)
            if tensor.numel():
                works.append(self._start_receive(_bytes_of(tensor), peer))
            tensors.append(tensor.requires_grad_(bool(flags & _REQUIRES_GRAD)))
        yield from works
        found.append(tensors)
        with self._counting:
            self.num_buffers += 1
            self.most_buffers = max(self.most_buffers, self.num_buffers)

    def _look(self, peer: int, message: StageMessage, why: str) -> None:
        """Say once that the process of a rank is stopped, if this node can see that."""
        store, key = store_of(self._group), f"guozhuang/pipeline/{peer}"
        try:
            if peer in self._told or not store.check([key]):
                return
            process = Process.read(store.get(key).decode())
        except RuntimeError:  # the rank that has the store is gone; the wait will name the rank that it waits for
            self._told.add(peer)
            return
        if process.node == self._process.node and state_of(process.pid, process.start) == STOPPED:
            self._told.add(peer)
            what = f"rank {peer} (pid {process.pid}) is stopped, and the {why} waits for {message}"
            fix = f"continue it by kill -CONT {process.pid}, or end the run"
            _log.error("%s", explain(what, rank=self._group.rank(), fix=fix))

    def _failed(
        self,
        verb: str,
        message: StageMessage,
        peer: int,
        why: str,
        error: Exception,
        tensors: Sequence[Tensor | None] = (),
    ) -> Exception:
        if isinstance(error, MismatchError):
            return MismatchError(f"{error} (In the {why}.)")
        shapes = f" ({shapes_of(tensors)})" if tensors else ""
        what = f"{why}: could not {verb} {message}{shapes}, which is on rank {peer} of the pipeline: {error}"
        if isinstance(error, PeerLost):
            text = explain(what, rank=self._group.rank())
            return PeerLost(text, rank=error.rank, pid=error.pid, waiting_in=f"{why}, {verb} of {message}")
        fix = "look for the first error among the ranks; it names the cause"
        return WorldError(explain(what, rank=self._group.rank(), fix=fix))


class _PolledReceive:
    """Receives a message without a thread; has the methods of a work that ``StageTransfers`` needs.

    Args:
        steps: starts the receives, and yields the works to wait for.
        before: the receive of the message before from the same rank, whose receives must have begun before.
    """

    def __init__(self, steps: Iterator[dist.Work], before: _PolledReceive | None) -> None:
        self._steps: Iterator[dist.Work] | None = steps
        self._before = before
        self._work: dist.Work | None = None
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Go on as far as nothing needs to be waited for; return whether the message has arrived, or its receive failed."""
        if self._before is not None and not self._before.is_completed():
            return False
        self._before = None
        while self._steps is not None and (self._work is None or self._work.is_completed()):
            self._step(None)
        return self._steps is None

    def wait(self, limit: datetime.timedelta) -> None:
        """Wait at most ``limit`` until the message has arrived; raise the error of its receive, or that it did not come yet."""
        deadline = time.monotonic() + limit.total_seconds()
        while not self.is_completed():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WorldError(explain(f"timed out: the message did not come within {limit.total_seconds():g} s"))
            first = self
            while first._before is not None:
                first = first._before
            first._step(datetime.timedelta(seconds=max(left_s, 0.001)))
        if self._error is not None:
            raise self._error

    def _step(self, limit: datetime.timedelta | None) -> None:
        assert self._steps is not None
        try:
            if self._work is not None and not _ended_within(self._work, limit):
                return
            self._work = next(self._steps)
        except StopIteration:
            self._steps = self._work = None
        except Exception as error:
            self._error, self._steps, self._work = error, None, None


def _ended_within(work: dist.Work | SerialWork | _PolledReceive, limit: datetime.timedelta | None) -> bool:
    """Wait, and return whether a work has ended. Its own error is raised, and not that of a wait that ended just before it did.

    Args:
        work: of a group whose works tell whether they have ended.
        limit: the longest wait; None: only the limit of the work itself.
    """
    try:
        work.wait(*(() if limit is None else (limit,)))
    except Exception:
        if limit is None:
            raise
        if not work.is_completed():
            return False
        work.wait(limit)  # returns at once
    return True


def _wait_for_all(steps: Iterator[dist.Work]) -> None:
    for work in steps:
        work.wait()


def _code_of(dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        what = f"tensors of dtype {dtype} cannot go from one stage to another"
        raise WorldError(explain(what, value=str(dtype), fix="cut the model where its values have another dtype"))
    return _DTYPES.index(dtype)


def _bytes_of(tensor: Tensor) -> Tensor:
    flat: Any = tensor.detach().view(-1)
    return flat.view(torch.uint8) if not flat.is_complex() else torch.view_as_real(flat).view(-1).view(torch.uint8)
