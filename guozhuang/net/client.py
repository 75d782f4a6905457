"""Asking a store, or another process, with a limit: signals get through meanwhile, and the error says who did not answer.

[Note: waiting for a store] A client of torch's store waits inside C++, where Python handles no signal. Torch limits how long it
waits for a key, and not how long for an answer: the keeper's process may be stopped, its host switched off or its cable cut,
and the call does not come back for a quarter of an hour. So whatever talks to a store of another process does so in a thread,
and who needs the answer waits for that thread in slices. Slices are counted, not the clock: while a process is stopped
(SIGSTOP, a laptop that sleeps) the clock goes on, and the answer is there as soon as the process goes on itself. A thread
that never gets its answer stays behind until the process ends, and does not keep it from ending.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from guozhuang.errors import WorldError, explain

ANSWER_S = 10.0  # a store that answers later than this is taken for lost
# When a process that waits says so for the first time, and how long after that again.
FIRST_NOTICE_S, NEXT_NOTICE_S = 10.0, 60.0
LOOK_AT_THE_KEEPER = "look whether its process is there and not stopped, and whether its node can be reached"
_SLICE_S = 0.1
_HURRY_S = 2.0
# Between two looks at a key that is waited for: a part of what was waited so far. Hundreds may wait for the same one.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S, _LOOK_PART = 0.02, 0.2, 0.05
_KEY_S = 300.0  # as torch waits for a key that another process is to set
_log = logging.getLogger("guozhuang")
_T = TypeVar("_T")


class OverdueError(dist.DistNetworkError):
    """An answer did not come within its limit."""


class Notices:
    """The times at which a process that waits says so: after 10 s, then once a minute."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._next = self._started + FIRST_NOTICE_S
        self.num = 0

    def left_s(self) -> float:
        """Until the next one, in seconds."""
        return max(self._next - time.monotonic(), 0.0)

    def are_due(self) -> bool:
        """Whether one is; True once for each."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + NEXT_NOTICE_S
        self.num += 1
        return True

    def say(self, text: str) -> None:
        """A line in the log, with how long it has been."""
        _log.warning("after %.0f s: %s", time.monotonic() - self._started, text)


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:  # raised where it was asked for
            self.error = error
        self.done.set()


class Client:
    """A thread that makes calls, one after the other, for others that wait. See [Note: waiting for a store].

    Args:
        limit_s: how long an answer may take, in seconds; may be changed later.
        retries: a late answer makes up for the silence before it; else who was silent once is lost for good. An error of
            the connection ends it for good either way.
        starts: start the thread at once, and not with the first call: an interpreter that ends starts none.

    Attributes:
        lost: why there is no use in asking: "is gone", "has not answered for 10 s"; empty while there is.
    """

    def __init__(self, limit_s: float = ANSWER_S, *, retries: bool = False, starts: bool = False) -> None:
        self.limit_s, self._retries = limit_s, retries
        self.lost = ""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._unanswered: _Call | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        if starts:
            self._start()

    def call(self, function: Callable[..., _T], *arguments: Any, still: Callable[[], str] = str) -> _T:
        """Call ``function`` in the thread, and return its result.

        Args:
            function: what to call. It should end by itself soon after the limit, where it can.
            arguments: of it.
            still: asked now and then, in the calling thread, what is waited for; a text goes into the log, "" does not.

        Raises:
            OverdueError: no answer came in time, or did not before; ``function`` goes on.
            DistNetworkError: the connection is broken, or was before.
            BaseException: what ``function`` raised.
        """
        if self._retries and self._unanswered is not None and self._unanswered.done.is_set():
            self.lost = "is gone" if isinstance(self._unanswered.error, dist.DistNetworkError) else ""
            self._unanswered = None
        if self.lost:
            raise OverdueError(self.lost)
        self._start()
        asked, waited_s, notices = _Call(lambda: function(*arguments)), 0.0, Notices()
        self._calls.put(asked)
        while not asked.done.wait(slice_s := min(_SLICE_S, max(self.limit_s - waited_s, 0.001))):
            waited_s += slice_s
            if self.lost or waited_s >= self.limit_s:
                self.lost, self._unanswered = self.lost or f"has not answered for {waited_s:.0f} s", asked
                raise OverdueError(self.lost)
            if notices.are_due() and (text := still()):
                notices.say(text)
        try:
            if asked.error is not None:
                self.lost = "is gone" if isinstance(asked.error, dist.DistNetworkError) else self.lost
                raise asked.error
            result: _T = asked.result
            return result
        finally:
            del asked  # else the exception and this frame hold each other

    def close(self) -> None:
        """Let the thread go; where it is stuck, it is left behind."""
        self.lost = self.lost or "was closed"
        self._calls.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_SLICE_S)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="guozhuang store", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            asked.make()
            del asked  # it refers to the store, which is to end when nobody does


def look_s(waited_s: float) -> float:
    """How long to sleep before the next look at a key, after that many seconds of waiting."""
    return min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, _LOOK_PART * waited_s))


class PatientStore:
    """A store whose calls a ``Client`` makes: each has a limit, and signals get through.

    Args:
        store: the store itself, or a connection to it.
        prefix: what all keys begin with.
        client: who makes the calls; None: one of its own.

    Attributes:
        while_waiting: called again and again while a key is waited for; what it raises ends the waiting.
    """

    def __init__(self, store: dist.Store, prefix: str = "", client: Client | None = None) -> None:
        self._inner, self._prefix = store, prefix
        self._client = Client() if client is None else client
        self.while_waiting: Callable[[], None] = lambda: None

    def within(self, prefix: str) -> PatientStore:
        """The part of the store whose keys begin so."""
        return PatientStore(self._inner, f"{self._prefix}{prefix}/", self._client)

    @property
    def whole(self) -> PatientStore:
        """The whole store, with its keys as they are."""
        return PatientStore(self._inner, "", self._client)

    @property
    def lost(self) -> str:
        """Why there is no use in asking any more: "is gone", "has not answered for 10 s"; empty while there is."""
        return self._client.lost

    def hurry(self) -> None:
        """From now on an answer has two seconds: this process is about to end."""
        self._client.limit_s = min(self._client.limit_s, _HURRY_S)

    def close(self) -> None:
        """End the calls of this store and of all its parts."""
        self._client.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._client.call(self._inner.set, self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, as soon as it is there."""
        self.wait([key])
        return bytes(self._client.call(self._inner.get, self._prefix + key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys, as soon as all are there."""
        self.wait(keys)
        return list(self._client.call(self._inner.multi_get, [self._prefix + key for key in keys]))

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key; where there is none, set it."""
        self._client.call(self._inner.append, self._prefix + key, value)  # type: ignore[attr-defined]

    def add(self, key: str, value: int) -> int:
        """Add to a number; return the sum."""
        return int(self._client.call(self._inner.add, self._prefix + key, value))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are there."""
        return bool(self._client.call(self._inner.check, [self._prefix + key for key in keys]))

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._client.call(self._inner.delete_key, self._prefix + key))

    def list_keys(self) -> list[str]:
        """All keys of this part of the store."""
        every = self._client.call(self._inner.list_keys)
        return [key.removeprefix(self._prefix) for key in every if key.startswith(self._prefix)]

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Return as soon as all of these keys are there.

        Raises:
            DistStoreError: they did not come in time.
        """
        begin, limit_s = time.monotonic(), _KEY_S if timeout is None else timeout.total_seconds()
        while not self.check(keys):
            waited_s = time.monotonic() - begin
            if waited_s > limit_s:
                raise dist.DistStoreError(f"nobody set {', '.join(keys)} in time")
            self.while_waiting()
            time.sleep(look_s(waited_s))


def attempt(limit_s: float, do: Callable[[], _T], still: Callable[[], str] = str) -> _T:
    """Call ``do`` in a thread of its own, and wait for it; signals get through meanwhile. See ``Client.call``.

    Raises:
        OverdueError: ``do`` did not end in time; it goes on.
        BaseException: what ``do`` raised.
    """
    client = Client(limit_s)
    try:
        return client.call(do, still=still)
    finally:
        client.close()


def within(
    limit_s: float, what: str, do: Callable[[], _T], *, rank: int | None = None, fix: str = LOOK_AT_THE_KEEPER
) -> _T:
    """Call ``do``, which asks another process for something, and give up when that does not answer.

    Args:
        limit_s: for how long it is waited for, in seconds.
        what: who is asked, for the error: "rank 0's store at 10.0.0.1:29500".
        do: what to call; in a thread of its own.
        rank: this rank, for the error.
        fix: the remedy, for the error.

    Raises:
        WorldError: it did not end in time.
        BaseException: what ``do`` raised.
    """
    try:
        return attempt(limit_s, do, lambda: f"{what} does not answer yet")
    except OverdueError:
        raise WorldError(explain(f"{what} has not answered for {limit_s:g} s", rank=rank, fix=fix)) from None


def why_no_connection(error: OSError) -> str:
    """In words, why no connection to a host came about."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved here ({error.strerror or error})"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, TimeoutError):
        return "the host does not answer"
    return str(error)
