"""The worker's side: a line to each server, on which what is most urgent goes first.

[Note: credit] What was handed to gloo can no longer be overtaken, so a line hands over only as much as keeps the link full:
``CREDIT_PARTS`` parts whose sending has not ended. What comes meanwhile waits in a heap, most urgent first. Answers come while
the next parts leave, so the link is used both ways.
"""

from __future__ import annotations

import collections
import heapq
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from guozhuang.errors import WorldError

from .meeting import Meeting
from .protocol import HEADER, PAYLOAD, REPLY, Kind, Message, wire
from .session import Session
from .shelves import in_memory_of

CREDIT_PARTS = 2
_CREDIT_MESSAGES = 16  # of small parts
_KEPT = 4096  # how much of the order of sending is remembered
_END_S = 5.0  # for goodbyes to be said


class Errand:
    """One message and its answer, under way.

    Args:
        message: what is asked.
        payload: what is sent with it, contiguous in the CPU's memory; None for none.
        into: where the answer goes, alike.
        urgency: the lower, the sooner; within the same step.
        before: called in the line's thread before the payload is sent.
    """

    def __init__(
        self,
        message: Message,
        payload: Tensor | None,
        into: Tensor | None,
        urgency: int = 0,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.message, self.payload, self.into, self.before = message, payload, into, before
        self.urgency = urgency
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        """Tell, without waiting, whether the answer is there, or will never be."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when the answer is there; raise why it will not come. Each wait of the line has the meeting's limit."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None = None) -> None:
        """Let those who wait go on."""
        self._error = error
        self._ended.set()


class Line:
    """To one server. Its threads start with it; ``hang_up`` ends them.

    Args:
        meeting: of which this process is a worker.
        server: rank of the server.
        credit_bytes: how much may be under way before what is urgent gets its turn.
        home: the session of this process, if it is that server itself.

    Attributes:
        changed: held while errands are added or chosen.
        sent: (number, part) in the order of sending, as far as remembered.
    """

    def __init__(self, meeting: Meeting, server: int, credit_bytes: int, home: Session | None = None) -> None:
        self.changed = threading.Condition()
        self.sent: collections.deque[tuple[int, int]] = collections.deque(maxlen=_KEPT)
        self._meeting, self._server, self._home, self._credit_bytes = meeting, server, home, credit_bytes
        self._heap: list[tuple[int, int, Errand]] = []
        self._num_added = 0
        self._open: set[Errand] = set()  # at home, without an answer yet
        self._failed: BaseException | None = None
        self._answers: queue.SimpleQueue[tuple[Errand, Any] | None] = queue.SimpleQueue()
        if home is not None:
            home.when_it_fails(self._home_failed)
        targets = [self._send] if home is not None else [self._send, self._receive]
        self._threads = [threading.Thread(target=t, name="guozhuang to server", daemon=True) for t in targets]
        for thread in self._threads:
            thread.start()

    def add(self, errands: Sequence[Errand]) -> None:
        """Hand over; what is most urgent leaves first."""
        with self.changed:
            if self._failed is not None:
                for errand in errands:
                    errand.end(self._failed)
                return
            for errand in errands:
                heapq.heappush(self._heap, (errand.urgency, self._num_added, errand))
                self._num_added += 1
            self.changed.notify()

    def hang_up(self) -> None:
        """Say goodbye after everything else. Not collective, and does not wait."""
        self.add([Errand(Message(Kind.GOODBYE), None, None, urgency=sys.maxsize)])

    def wait(self, timeout_s: float) -> None:
        """Wait for the threads to end, for so long."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _send(self) -> None:
        leaving: collections.deque[tuple[int, list[Any], Tensor | None]] = collections.deque()
        doing, last, errand = "", False, None
        try:
            while not last:
                with self.changed:
                    self.changed.wait_for(lambda: self._heap or self._failed)
                    if self._failed is not None:
                        break
                    errand = self._heap[0][2]
                    # See [Note: credit]: look again after the wait, for what is more urgent.
                    if not leaving or self._has_credit(errand, leaving):
                        heapq.heappop(self._heap)
                    else:
                        errand = None
                if errand is None:
                    for work in leaving.popleft()[1]:
                        work.wait(self._meeting.limit)
                    continue
                doing, last = str(errand.message), errand.message.kind is Kind.GOODBYE
                self.sent.append((errand.message.number, errand.message.part))
                if errand.before is not None:
                    errand.before()
                if self._home is not None:
                    self._serve(errand)
                else:
                    leaving.append(self._hand_over(errand))
            while leaving:
                for work in leaving.popleft()[1]:
                    work.wait(self._meeting.limit)
            if last and errand is not None:  # only of a goodbye is nothing expected; all else ends with its answer
                errand.end()
        except BaseException as error:
            self._fail(doing, error, errand)
        self._answers.put(None)

    def _has_credit(self, errand: Errand, leaving: collections.deque[Any]) -> bool:
        size = 0 if errand.payload is None else errand.payload.nbytes
        return len(leaving) < _CREDIT_MESSAGES and size + sum(each[0] for each in leaving) <= self._credit_bytes

    def _hand_over(self, errand: Errand) -> tuple[int, list[Any], Tensor | None]:
        message, payload = errand.message, errand.payload
        if errand.into is not None:
            self._answers.put((errand, self._meeting.receive(wire(errand.into), self._server, REPLY + message.part)))
        works = [self._meeting.send(message.encode(), self._server, HEADER)]
        if payload is not None:
            works.append(self._meeting.send(wire(payload), self._server, PAYLOAD))
        return 0 if payload is None else payload.nbytes, works, payload

    def _serve(self, errand: Errand) -> None:
        assert self._home is not None
        if errand.message.kind is Kind.GOODBYE:
            self._home.leave(self._meeting.rank)
            return
        assert errand.into is not None
        copy = in_memory_of(errand.into)

        def reply(answer: Tensor) -> Any:
            has_left = copy(answer)
            with self.changed:
                self._open.discard(errand)
            errand.end()
            return has_left

        with self.changed:
            self._open.add(errand)
        self._home.shelf.take(self._meeting.rank, errand.message, errand.payload, True, reply)

    def _receive(self) -> None:
        while (found := self._answers.get()) is not None:
            errand, work = found
            try:
                work.wait(self._meeting.limit)
            except BaseException as error:
                self._fail(str(errand.message), error, errand)
            else:
                errand.end()

    def _home_failed(self, text: str) -> None:
        with self.changed:
            doing = next((str(errand.message) for errand in self._open), "the other ranks")
        self._fail(doing, RuntimeError(text), None)

    def _fail(self, doing: str, error: BaseException, errand: Errand | None) -> None:
        if self._failed is None and isinstance(error, RuntimeError) and not isinstance(error, WorldError):
            error = self._meeting.why(self._server, doing, error)
        elif self._failed is None:
            self._meeting.give_up(None, f"{self._meeting.names[self._meeting.rank]} failed: {error}")
        with self.changed:
            self._failed = self._failed or error
            left = [*self._open, *(entry[2] for entry in self._heap), *([errand] if errand is not None else [])]
            self._heap, self._open = [], set()
            self.changed.notify_all()
        for each in left:
            if not each.is_completed():
                each.end(self._failed)
