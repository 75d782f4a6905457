"""What a server keeps: for each part the sum of a step under way, or the weights. No communication: answers go to callables.

[Note: the server's threads] Messages of different workers come in different threads. Each part has a lock of its own, under
which it is changed and its answers are handed over; so what one answer says is what all answers of that moment say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set

import torch
from torch import Tensor

from guozhuang.errors import MismatchError, WorldError

from .protocol import Kind, Message

#: Takes an answer on its way; returns what makes sure that it has left, to be called before the answer's memory is used again.
Reply = Callable[[Tensor], Callable[[], object]]


class Shelf:
    """The parts of one group of workers at one server.

    Args:
        num_workers: how many there are.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int], _Sum | _Weights] = {}
        self._layouts = [0] * num_workers
        self._gone: set[int] = set()

    def take(self, worker: int, message: Message, payload: Tensor | None, is_shared: bool, reply: Reply) -> None:
        """Take in what a worker sent; answer whoever can be answered now.

        Args:
            worker: who sent it.
            message: its header.
            payload: what is to be added, in the part's dtype; flat.
            is_shared: whether the payload is memory of the worker, to be read but not kept after the answer.
            reply: how the worker is answered.

        Raises:
            MismatchError: it does not fit what other workers sent; the text names the workers.
            WorldError: it needs a worker that has left.
        """
        key = message.layout, message.part
        with self._lock:
            if message.layout > self._layouts[worker]:
                self._layouts[worker] = message.layout
                oldest = min(self._layouts)  # all workers have got their answers about earlier ones
                for old in [k for k in self._parts if k[0] < oldest]:
                    del self._parts[old]
            part = self._parts.get(key)
            if part is None:
                make = _Sum if message.kind is Kind.SUM else _Weights
                part = self._parts[key] = make(self._num_workers, self._gone)
        with part.lock:
            part.take(worker, message, payload, is_shared, reply)

    def leave(self, worker: int) -> None:
        """Note that a worker will not ask again; it holds nobody any more.

        Raises:
            WorldError: others wait for a sum that needs it.
        """
        with self._lock:
            self._gone.add(worker)
            parts = list(self._parts.values())
        for part in parts:
            with part.lock:
                part.leave(worker)

    def oldest_wait(self) -> tuple[float, list[int], str] | None:
        """Return since when (``time.monotonic``) somebody has been waiting longest, for which workers, and what for."""
        with self._lock:
            parts = list(self._parts.values())
        found = []
        for part in parts:
            with part.lock:
                if part.since is not None:
                    found.append((part.since, part.missing(), part.what))
        return min(found, default=None)


class _Sum:
    """The sum of one part, in the order of ranks however they come."""

    def __init__(self, num_workers: int, gone: Set[int]) -> None:
        self.lock = threading.Lock()
        self.since: float | None = None
        self.what = ""
        self._num_workers, self._gone = num_workers, gone
        self._message: Message | None = None
        self._waiting: dict[int, Tensor] = {}  # what came before its turn
        self._next = 0
        self._total: Tensor | None = None
        self._replies: dict[int, Reply] = {}
        self._sent: list[Callable[[], object]] = []

    def missing(self) -> list[int]:
        return [w for w in range(self._num_workers) if w not in self._replies]

    def leave(self, worker: int) -> None:
        """A sum needs all workers."""
        lost = [w for w in self.missing() if w in self._gone]
        if self.since is not None and lost:
            raise WorldError(f"rank {lost[0]} has left, and others wait for {self.what}")

    def take(self, worker: int, message: Message, payload: Tensor | None, is_shared: bool, reply: Reply) -> None:
        assert payload is not None
        if self.since is None:
            self.since, self._message, self.what = time.monotonic(), message, str(message)
        elif message != self._message or worker in self._replies:
            raise MismatchError(_difference(worker, message, next(iter(self._replies)), self._message))
        self._replies[worker] = reply
        self.leave(worker)
        self._waiting[worker] = payload.clone() if is_shared and worker == 0 else payload
        while self._next in self._waiting:
            values = self._waiting.pop(self._next)
            if self._total is None:
                self._total = values
            else:
                self._total += values
            self._next += 1
        if self._next == self._num_workers:
            for has_left in self._sent:  # the last answers: all workers have taken them, or they would not ask again
                has_left()
            assert self._total is not None
            total, replies = self._total, self._replies
            self._total, self._replies, self._next, self.since = None, {}, 0, None
            self._sent = [replies[w](total) for w in sorted(replies)]


class _Weights:
    """One part of the weights, and how far each worker has come."""

    def __init__(self, num_workers: int, gone: Set[int]) -> None:
        self.lock = threading.Lock()
        self.since: float | None = None
        self.what = ""
        self._all, self._gone = range(num_workers), gone
        self._bound = 0
        self._value: Tensor | None = None
        self._steps = dict.fromkeys(self._all, 0)
        self._active: set[int] = set()
        self._held: dict[int, Reply] = {}  # who waits for slower ones
        self._seeding: dict[int, Reply] = {}
        self._agreeing: dict[int, Reply] = {}
        self._seed: Tensor | None = None
        self._sent: dict[int, Callable[[], object]] = {}
        self._known: tuple[int, Message] | None = None

    def missing(self) -> list[int]:
        meeting = self._seeding or self._agreeing
        if meeting and not self._held:
            return [w for w in self._all if w not in meeting and w not in self._gone]
        lowest = min((self._steps[w] for w in self._active), default=0)
        return [w for w in self._active if self._steps[w] == lowest and w not in self._held]

    def take(self, worker: int, message: Message, payload: Tensor | None, is_shared: bool, reply: Reply) -> None:
        self._compare(worker, message)
        if worker in self._sent:
            self._sent.pop(worker)()
        self.what = str(message)
        if message.kind is Kind.SEED:
            if payload is not None:
                self._seed = payload.clone() if is_shared else payload
            self._bound = message.number
            self._seeding[worker] = reply
        elif self._value is None:
            raise MismatchError(f"rank {worker} asked for weights before they were seeded")
        else:
            if payload is not None:
                self._value += payload
            if message.kind is Kind.AGREE:
                self._active.discard(worker)
                self._agreeing[worker] = reply
            elif message.kind is Kind.REST:
                self._active.discard(worker)
                self._answer({worker: reply})
            else:
                if worker not in self._active:  # it has rested, and begins where the slowest are now
                    self._steps[worker] = min((self._steps[w] for w in self._active), default=self._steps[worker])
                    self._active.add(worker)
                self._steps[worker] += 1
                self._held[worker] = reply
        self._go_on()

    def leave(self, worker: int) -> None:
        self._active.discard(worker)
        if self._value is not None:
            self._go_on()

    def _compare(self, worker: int, message: Message) -> None:
        if self._known is None:
            self._known = worker, message
        other, known = self._known
        if (message.dtype, message.num_elements) != (known.dtype, known.num_elements):
            raise MismatchError(_difference(worker, message, other, known))

    def _go_on(self) -> None:
        """Answer whoever need not wait for others."""
        here = [w for w in self._all if w not in self._gone]
        if self._seeding and all(w in self._seeding for w in here):
            assert self._seed is not None, "worker 0 sends the weights"
            self._value, self._seed = self._seed, None
            self._begin_anew(here, self._seeding)
        if self._agreeing and all(w in self._agreeing for w in here):
            self._begin_anew(here, self._agreeing)
        lowest = min((self._steps[w] for w in self._active), default=0)
        near = [w for w in self._held if self._steps[w] - lowest <= self._bound or not self._active]
        if near:
            self._answer({w: self._held.pop(w) for w in near})
        if not (self._held or self._seeding or self._agreeing):
            self.since = None
        elif self.since is None or near:
            self.since = time.monotonic()

    def _begin_anew(self, here: list[int], replies: dict[int, Reply]) -> None:
        self._active = set(here)
        self._steps = dict.fromkeys(self._all, 0)
        self._answer(dict(replies))
        replies.clear()

    def _answer(self, replies: dict[int, Reply]) -> None:
        assert self._value is not None
        now = self._value.clone()  # others change the weights while this is on its way
        for worker in sorted(replies):
            self._sent[worker] = replies[worker](now)


def _difference(worker: int, message: Message, other: int, known: Message | None) -> str:
    texts = [f"{m} ({m.num_elements} of {m.dtype})" if m is not None else "" for m in (known, message)]
    return f"ranks {other} and {worker} do not send the same part to a parameter server: {texts[0]} and {texts[1]}"


def in_memory_of(into: Tensor) -> Reply:
    """Return a reply that copies into memory of this process at once."""

    def reply(answer: Tensor) -> Callable[[], object]:
        with torch.no_grad():
            into.copy_(answer)
        return lambda: None

    return reply
