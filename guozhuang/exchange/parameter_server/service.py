"""A server of one group of workers: threads that receive messages, and the parts that it keeps (sums of a step, or weights).

[Note: threads of a service] For each worker one thread receives headers and starts to receive the payloads that they announce;
another thread waits for each payload and adds it, so that the next part is received while the last one is added. A worker
limits how many bytes it sends ahead. A worker may send nothing between two steps for any time, so the wait for a header has no
limit; this is safe because a process that ends closes its connections. The waits of workers for each other have a limit, and a
watching thread names the late workers.

[Note: the server's threads] Messages of different workers are handled in different threads. Each part has a lock of its own,
which is held while the part is changed and its answers are sent, so that all answers of one moment hold the same values.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Set
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ...errors import MismatchError, WorldError, explain
from ...groups.serial import SerialThread
from .protocol import HEADER, LIFELINE, PAYLOAD, REPLY, Opcode, ServerGroup, ServerMessage, empty_header, how_lost, wire

FOR_EVER = timedelta(days=3650)
_WATCH_S = 0.5
_STUCK_S = 5.0  # how long threads may take to end after a failure: [Note: lifelines] in client.py
_SHARE_OF_LIMIT = 0.9  # share of the time-out after which the server names late workers, before other workers time out
_log = logging.getLogger("guozhuang")

#: Starts to send an answer; returns a function that waits until it was sent. Call that before reusing the answer's memory.
Reply = Callable[[Tensor], Callable[[], object]]


class HeldParts:
    """The parts that one server keeps for one group of workers.

    Args:
        num_workers: the number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int], _HeldSum | _HeldWeights] = {}
        self._layouts = [0] * num_workers
        self._gone: set[int] = set()

    def take(self, worker: int, message: ServerMessage, payload: Tensor | None, is_shared: bool, reply: Reply) -> None:
        """Apply a message to its part, and answer the workers that can be answered now.

        Args:
            worker: the sender.
            message: the header.
            payload: the values to add, in the part's dtype; flat.
            is_shared: whether the payload is the worker's own memory, which may not be changed, or read after the answer.
            reply: sends the answer to the worker.

        Raises:
            MismatchError: the message does not fit those of other workers; the text names the workers.
            WorldError: the message needs a worker that has left.
        """
        key = message.layout, message.part
        with self._lock:
            if message.layout > self._layouts[worker]:
                self._layouts[worker] = message.layout
                oldest = min(self._layouts)  # all workers have received their answers about earlier layouts
                for old in [k for k in self._parts if k[0] < oldest]:
                    del self._parts[old]
            part = self._parts.get(key)
            if part is None:
                make = _HeldSum if message.opcode is Opcode.SUM else _HeldWeights
                part = self._parts[key] = make(self._num_workers, self._gone)
        with part.lock:
            part.take(worker, message, payload, is_shared, reply)

    def leave(self, worker: int) -> None:
        """Record that a worker sends no more messages, so that other workers no longer wait for it.

        Raises:
            WorldError: other workers wait for a sum that needs this worker.
        """
        with self._lock:
            self._gone.add(worker)
            parts = list(self._parts.values())
        for part in parts:
            with part.lock:
                part.leave(worker)

    def oldest_wait(self) -> tuple[float, list[int], str] | None:
        """Return the longest current wait: its start (``time.monotonic``), the workers it waits for, and the message."""
        with self._lock:
            parts = list(self._parts.values())
        found = []
        for part in parts:
            with part.lock:
                if part.since is not None:
                    found.append((part.since, part.missing(), part.what))
        return min(found, default=None)


class _HeldPart:
    """A part that this server keeps for its workers; a caller of its methods must hold ``lock``.

    Attributes:
        lock: protects the part.
        since: when (``time.monotonic``) the worker that waits longest started to wait; None while no worker waits.
        what: a description of the last message, for error texts.
    """

    def __init__(self, num_workers: int, gone: Set[int]) -> None:
        self.lock = threading.Lock()
        self.since: float | None = None
        self.what = ""
        self._all, self._gone = range(num_workers), gone


class _HeldSum(_HeldPart):
    """The sum of one part; payloads are added in the order of ranks, in whatever order they arrive."""

    def __init__(self, num_workers: int, gone: Set[int]) -> None:
        super().__init__(num_workers, gone)
        self._message: ServerMessage | None = None
        self._waiting: dict[int, Tensor] = {}  # payloads, by rank, that arrived before those of lower ranks
        self._next = 0
        self._total: Tensor | None = None
        self._replies: dict[int, Reply] = {}
        self._sent: list[Callable[[], object]] = []

    def missing(self) -> list[int]:
        return [w for w in self._all if w not in self._replies]

    def leave(self, worker: int) -> None:
        """Raise if a sum was started and needs a worker that has left."""
        lost = [w for w in self.missing() if w in self._gone]
        if self.since is not None and lost:
            raise WorldError(f"rank {lost[0]} has left, and others wait for {self.what}")

    def take(self, worker: int, message: ServerMessage, payload: Tensor | None, is_shared: bool, reply: Reply) -> None:
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
        if self._next == len(self._all):
            for has_left in self._sent:  # returns at once: workers send again only after the last step's answers
                has_left()
            assert self._total is not None
            total, replies = self._total, self._replies
            self._total, self._replies, self._next, self.since = None, {}, 0, None
            self._sent = [replies[w](total) for w in sorted(replies)]


class _HeldWeights(_HeldPart):
    """One part of the weights, and the step number of each worker."""

    def __init__(self, num_workers: int, gone: Set[int]) -> None:
        super().__init__(num_workers, gone)
        self._bound = 0
        self._value: Tensor | None = None
        self._steps = dict.fromkeys(self._all, 0)
        self._active: set[int] = set()
        self._held: dict[int, Reply] = {}  # replies to workers that wait for slower ones
        self._seeding: dict[int, Reply] = {}
        self._agreeing: dict[int, Reply] = {}
        self._seed: Tensor | None = None
        self._sent: dict[int, Callable[[], object]] = {}
        self._known: tuple[int, ServerMessage] | None = None

    def missing(self) -> list[int]:
        meeting = self._seeding or self._agreeing
        if meeting and not self._held:
            return [w for w in self._all if w not in meeting and w not in self._gone]
        lowest = min((self._steps[w] for w in self._active), default=0)
        return [w for w in self._active if self._steps[w] == lowest and w not in self._held]

    def take(self, worker: int, message: ServerMessage, payload: Tensor | None, is_shared: bool, reply: Reply) -> None:
        if worker in self._sent:
            self._sent.pop(worker)()
        if message.opcode is Opcode.JOIN:
            lowest = min((self._steps[w] for w in self._active), default=self._steps[worker])
            self._sent[worker] = reply(torch.tensor([lowest]))
            return
        self._compare(worker, message)
        self.what = str(message)
        if message.opcode is Opcode.SEED:
            if payload is not None:
                self._seed = payload.clone() if is_shared else payload
            self._bound = message.number
            self._seeding[worker] = reply
        elif self._value is None:
            raise MismatchError(f"rank {worker} asked for weights before they were seeded")
        else:
            if payload is not None:
                self._value += payload
            if message.opcode is Opcode.AGREE:
                self._active.discard(worker)
                self._agreeing[worker] = reply
            elif message.opcode is Opcode.REST:
                self._active.discard(worker)
                self._answer({worker: reply})
            else:
                self._active.add(worker)
                self._steps[worker] = message.number
                self._held[worker] = reply
        self._answer_the_ready()

    def leave(self, worker: int) -> None:
        self._active.discard(worker)
        if self._value is not None:
            self._answer_the_ready()

    def _compare(self, worker: int, message: ServerMessage) -> None:
        if self._known is None:
            self._known = worker, message
        other, known = self._known
        if (message.dtype, message.num_elements) != (known.dtype, known.num_elements):
            raise MismatchError(_difference(worker, message, other, known))

    def _answer_the_ready(self) -> None:
        """Answer the workers that no longer have to wait for other workers."""
        here = [w for w in self._all if w not in self._gone]
        if self._seeding and all(w in self._seeding for w in here):
            assert self._seed is not None, "worker 0 sends the weights"
            self._value, self._seed = self._seed, None
            self._restart(here, self._seeding)
        if self._agreeing and all(w in self._agreeing for w in here):
            self._restart(here, self._agreeing)
        lowest = min((self._steps[w] for w in self._active), default=0)
        near = [w for w in self._held if self._steps[w] - lowest <= self._bound or not self._active]
        if near:
            self._answer({w: self._held.pop(w) for w in near})
        if not (self._held or self._seeding or self._agreeing):
            self.since = None
        elif self.since is None or near:
            self.since = time.monotonic()

    def _restart(self, here: list[int], replies: dict[int, Reply]) -> None:
        self._active = set(here)
        self._steps = dict.fromkeys(self._all, 0)
        self._answer(dict(replies))
        replies.clear()

    def _answer(self, replies: dict[int, Reply]) -> None:
        assert self._value is not None
        now = self._value.clone()  # messages of other workers change the weights while the answer is being sent
        for worker in sorted(replies):
            self._sent[worker] = replies[worker](now)


def _difference(worker: int, message: ServerMessage, other: int, known: ServerMessage | None) -> str:
    texts = [f"{m} ({m.num_elements} of {m.dtype})" if m is not None else "" for m in (known, message)]
    return f"ranks {other} and {worker} do not send the same part to a parameter server: {texts[0]} and {texts[1]}"


def copy_into(into: Tensor) -> Reply:
    """Return a reply for a worker in this process: it copies the answer into the tensor ``into`` at once."""

    def reply(answer: Tensor) -> Callable[[], object]:
        with torch.no_grad():
            into.copy_(answer)
        return lambda: None

    return reply


class Service:
    """A server of one group of workers. Its threads start at once, and end when all workers have left, or one is lost.

    Args:
        group: the group of workers and servers, in which this process is a server.
        says: whether to log a failure.

    Attributes:
        parts: the parts that this server keeps.
        failed: the reason why the service failed; "" if it has not failed.
    """

    def __init__(self, group: ServerGroup, says: bool = False) -> None:
        self.parts = HeldParts(group.num_workers)
        self.failed = ""
        self._group, self._says = group, says
        self._lock = threading.Lock()
        self._left: set[int] = set()
        self._over = threading.Event()
        self._listeners: list[Callable[[str], None]] = []
        self._threads: list[SerialThread] = []
        for worker in range(group.num_workers):
            if worker != group.rank:
                # In this order, because wait() joins them in turn, and the first one starts the second one.
                listening, adding = self._thread(), self._thread()
                self._start(listening, functools.partial(self._listen, worker, adding))
        self._start(self._thread(), self._watch)

    def _thread(self) -> SerialThread:
        self._threads.append(SerialThread("guozhuang server", "message"))
        return self._threads[-1]

    def _start(self, thread: SerialThread, job: Callable[[], None]) -> None:
        thread.run(job)
        thread.close()

    def leave(self, worker: int) -> None:
        """Record that a worker sends no more messages; the service ends when all workers have left."""
        with self._lock:
            self._left.add(worker)
            all_left = len(self._left) == self._group.num_workers
        try:
            self.parts.leave(worker)
        except Exception as error:
            self.fail(worker, str(error))
        if all_left:
            self._over.set()

    def fail(self, lost: int | None, text: str) -> None:
        """End the service for all workers, and report the reason; later calls have no effect."""
        with self._lock:
            if self._over.is_set():
                return
            self.failed, listeners = text, list(self._listeners)
            self._over.set()
        if self._says:
            _log.error("parameter server: %s; the session with its %d workers ends", text, self._group.num_workers)
        self._group.abort(lost, text)
        for listener in listeners:
            listener(text)

    def when_it_fails(self, listener: Callable[[str], None]) -> None:
        """Call ``listener`` with the reason if the service fails, or has failed."""
        with self._lock:
            self._listeners.append(listener)
        if self.failed:
            listener(self.failed)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all threads have ended, because all workers left or the service failed; return whether they have ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        left = [t.join(None if deadline is None else max(0.0, deadline - time.monotonic())) for t in self._threads]
        return all(left)

    def wait_until_over(self) -> None:
        """Wait until all workers have left or the service has failed; then for its threads, unless they are stuck."""
        self._over.wait()
        self.wait(_STUCK_S if self.failed else None)

    def end(self, limit_s: float) -> None:
        """Wait, in a worker that serves, until all workers have left; warn if they do not within ``limit_s`` seconds."""
        if self.failed:
            self.wait(min(_STUCK_S, limit_s))
        elif not self.wait(limit_s):
            missing = [w for w in range(self._group.num_workers) if w not in self._left]
            what = f"ranks {missing} have not left within {limit_s:g} s and lose the parameter server of this rank"
            _log.warning("%s", explain(what, rank=self._group.rank, fix="let all ranks end their training together"))
            with contextlib.suppress(Exception):
                self.fail(None, what)

    def _reply_to(self, worker: int, part: int) -> Reply:
        def reply(answer: Tensor) -> Callable[[], object]:
            work = self._group.send(wire(answer), worker, REPLY + part)
            return lambda: work.wait(self._group.limit)

        return reply

    def _listen(self, worker: int, adding: SerialThread) -> None:
        """Receive the headers of one worker. See [Note: threads of a service]."""
        group, message = self._group, None
        try:
            while message is None or message.opcode is not Opcode.GOODBYE:
                header = empty_header()
                group.receive(header, worker, HEADER).wait(FOR_EVER)
                message, payload, work = ServerMessage.decode(header), None, None
                if message.has_payload:
                    payload = torch.empty(message.num_elements, dtype=message.dtype)
                    work = group.receive(wire(payload), worker, PAYLOAD)
                adding.run(functools.partial(self._take, worker, message, payload, work))
        except Exception as error:
            self._lost(worker, error)
        finally:
            adding.close()

    def _take(self, worker: int, message: ServerMessage, payload: Tensor | None, work: Any) -> None:
        """Wait for the payload of a message, and apply the message to its part."""
        if self._over.is_set():
            return
        if message.opcode is Opcode.GOODBYE:
            if not self._group.workers_serve:
                with contextlib.suppress(RuntimeError):  # it may be gone already
                    self._group.send(torch.zeros(1, dtype=torch.uint8), worker, LIFELINE).wait(self._group.limit)
            self.leave(worker)
            return
        try:
            if work is not None:
                work.wait(self._group.limit)
        except Exception as error:
            self._lost(worker, error)
            return
        try:
            self.parts.take(worker, message, payload, False, self._reply_to(worker, message.part))
        except Exception as error:
            # A failed answer means that another worker is lost. Its own threads notice that and name it; give them time.
            if isinstance(error, ValueError) or not self._over.wait(2 * _WATCH_S):
                self.fail(None, str(error))

    def _lost(self, worker: int, error: Exception) -> None:
        if not self._over.is_set():
            self.fail(worker, f"{self._group.names[worker]} {how_lost(error, self._group.limit_s)}")

    def _watch(self) -> None:
        limit_s, names = _SHARE_OF_LIMIT * self._group.limit_s, self._group.names
        while not self._over.wait(min(_WATCH_S, limit_s / 10)):
            found = self.parts.oldest_wait()
            if found is not None and time.monotonic() - found[0] > limit_s and found[1]:
                late = ", ".join(names[w] for w in found[1])
                self.fail(found[1][0], f"{late} did not bring {found[2]} within {limit_s:g} s")
