"""The server's side of one meeting: threads that take what workers send, and answer.

[Note: threads of a session] For each worker one thread takes headers and makes room for what they announce, and another one
waits for it and puts it on the shelf; so the next part is on its way while the last one is added. How much may be announced
ahead is the worker's care. A worker may be silent between two steps for any time: a header is waited for without a limit,
which is safe because a process that ends closes its connections. What others wait for has the limit, and a watch names who is
late.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from guozhuang.errors import explain

from .meeting import Meeting, how_lost
from .protocol import HEADER, PAYLOAD, REPLY, Kind, Message, empty_header, wire
from .shelves import Reply, Shelf

_FOR_EVER = timedelta(days=3650)
_LOOK_S = 0.5
_SHARE_OF_LIMIT = 0.9  # the server names who is late before the workers' own waits run out
_log = logging.getLogger("guozhuang")

_Announced = tuple[Message, Tensor | None, Any]


class Session:
    """A server of one meeting. Its threads start with it and end when all workers have left, or one is lost.

    Args:
        meeting: of which this process is a server.
        says: whether to say in the log how it ended.
    """

    def __init__(self, meeting: Meeting, says: bool = False) -> None:
        self.meeting = meeting
        self.shelf = Shelf(meeting.num_workers)
        self.failed = ""
        self._says = says
        self._lock = threading.Lock()
        self._left: set[int] = set()
        self._over = threading.Event()
        self._to_tell: list[Callable[[str], None]] = []
        self._remote = [w for w in range(meeting.num_workers) if w != meeting.rank]
        self._threads: list[threading.Thread] = []
        for worker in self._remote:
            coming: queue.SimpleQueue[_Announced | None] = queue.SimpleQueue()
            self._start(self._listen, worker, coming)
            self._start(self._take, worker, coming)
        self._start(self._watch)

    def _start(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="guozhuang server", daemon=True)
        thread.start()
        self._threads.append(thread)

    def leave(self, worker: int) -> None:
        """Note that a worker will not ask again."""
        with self._lock:
            self._left.add(worker)
            all_left = len(self._left) == self.meeting.num_workers
        try:
            self.shelf.leave(worker)
        except Exception as error:
            self.fail(worker, str(error))
        if all_left:
            self._over.set()

    def fail(self, lost: int | None, text: str) -> None:
        """End it for everybody, for a reason; the first one counts."""
        with self._lock:
            if self._over.is_set():
                return
            self.failed = text
            self._over.set()
        if self._says:
            _log.error("parameter server: %s; the session with its %d workers ends", text, self.meeting.num_workers)
        self.meeting.give_up(lost, text)
        for tell in self._to_tell:
            tell(text)

    def when_it_fails(self, tell: Callable[[str], None]) -> None:
        """Call with the reason, where others' failures reach this process."""
        self._to_tell.append(tell)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all workers have left, or it failed, and its threads have ended; return whether that is so."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def missing(self) -> list[int]:
        """The workers that have not left."""
        with self._lock:
            return [w for w in range(self.meeting.num_workers) if w not in self._left]

    def reply_to(self, worker: int, part: int) -> Reply:
        """Return how an answer about a part gets to a worker."""

        def reply(answer: Tensor) -> Any:
            work = self.meeting.send(wire(answer), worker, REPLY + part)
            return lambda: work.wait(self.meeting.limit)

        return reply

    def _listen(self, worker: int, coming: queue.SimpleQueue[_Announced | None]) -> None:
        """Take headers. See [Note: threads of a session]."""
        try:
            while True:
                header = empty_header()
                self.meeting.receive(header, worker, HEADER).wait(_FOR_EVER)
                message, payload, work = Message.decode(header), None, None
                if message.has_payload:
                    payload = torch.empty(message.num_elements, dtype=message.dtype)
                    work = self.meeting.receive(wire(payload), worker, PAYLOAD)
                coming.put((message, payload, work))
                if message.kind is Kind.GOODBYE:
                    return
        except Exception as error:
            self._lost(worker, error)
            coming.put(None)

    def _take(self, worker: int, coming: queue.SimpleQueue[_Announced | None]) -> None:
        """Put on the shelf what was announced."""
        while (found := coming.get()) is not None:
            message, payload, work = found
            if message.kind is Kind.GOODBYE:
                self.leave(worker)
                return
            try:
                if work is not None:
                    work.wait(self.meeting.limit)
            except Exception as error:
                self._lost(worker, error)
                return
            try:
                self.shelf.take(worker, message, payload, False, self.reply_to(worker, message.part))
            except Exception as error:
                # A failed answer means that another worker is lost, which its own threads see and name; give them time.
                if not isinstance(error, ValueError) and self._over.wait(2 * _LOOK_S):
                    return
                self.fail(None, str(error))
                return

    def _lost(self, worker: int, error: Exception) -> None:
        if self._over.is_set():
            return
        self.fail(worker, f"{self.meeting.names[worker]} {how_lost(error, self.meeting.limit_s)}")

    def _watch(self) -> None:
        limit_s = _SHARE_OF_LIMIT * self.meeting.limit_s
        while not self._over.wait(min(_LOOK_S, limit_s / 10)):
            found = self.shelf.oldest_wait()
            if found is not None and time.monotonic() - found[0] > limit_s and found[1]:
                late = ", ".join(self.meeting.names[w] for w in found[1])
                self.fail(found[1][0], f"{late} did not bring {found[2]} within {limit_s:g} s")

    def end(self, limit_s: float) -> None:
        """Wait, at a worker that serves too, until the others need it no more; warn where they do not say so in time."""
        if not self.wait(limit_s):
            what = f"ranks {self.missing} have not left within {limit_s:g} s and lose the parameter server of this rank"
            _log.warning("%s", explain(what, rank=self.meeting.rank, fix="let all ranks end their training together"))
            with contextlib.suppress(Exception):
                self.fail(None, what)
