"""Calls to a store, or to another process, with a time limit: signals are handled meanwhile, errors name the silent process.

[Note: waiting for a store] A client of torch's store waits inside C++, where Python handles no signal. Torch limits the wait
for a key to be set, but not the wait for the server's answer: if the server's process is stopped, its host is off or its cable
is cut, the call blocks for a quarter of an hour. So every call to a store of another process is made in a thread, and the
caller waits for that thread in short slices. The limit counts slices and not clock time: while this process is stopped
(SIGSTOP, a laptop that sleeps) the clock runs on, but the answer is there as soon as the process continues. A thread
that never gets its answer is abandoned; being a daemon, it does not keep the process from ending.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from guozhuang.errors import WorldError, explain

ANSWER_S = 10.0  # in seconds: a store that takes longer to answer a call counts as lost
# A waiting process logs a first notice after 10 s, and further ones every 60 s.
FIRST_NOTICE_S, NEXT_NOTICE_S = 10.0, 60.0
LOOK_AT_THE_KEEPER = "look whether its process is there and not stopped, and whether its node can be reached"
_SLICE_S = 0.1
_HURRY_S = 2.0
# The pause between two polls of a key: a fraction of the wait so far, within bounds. Hundreds of ranks may poll the same key.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S, _LOOK_PART = 0.002, 0.2, 0.05
# The longest pause (s) if many processes poll one store: pauses grow with their number, for 2000 polls per second in all.
LONGEST_LOOK_S = 0.5
_LOOKS_PER_S = 2000
# The pause between two tries to connect grows from the first to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_KEY_S = 300.0  # torch's default for waiting until another process sets a key
_log = logging.getLogger("guozhuang")
# Its own, because the script may have seeded that of the module, and count on what it draws.
_jitter = random.Random()
_T = TypeVar("_T")


class OverdueError(dist.DistNetworkError):
    """No answer arrived within the time limit."""


class Notices:
    """The schedule of log messages of a process that waits: the first after 10 s, then one per minute."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._next = self._started + FIRST_NOTICE_S
        self.num = 0

    def left_s(self) -> float:
        """Return the seconds until the next notice is due."""
        return max(self._next - time.monotonic(), 0.0)

    def are_due(self) -> bool:
        """Return True if it is time for the next log message, and plan the one after it; otherwise return False."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + NEXT_NOTICE_S
        self.num += 1
        return True

    def say(self, text: str) -> None:
        """Log a warning with ``text`` and the time waited so far."""
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
        except BaseException as error:  # Client.call raises it again in the calling thread
            self.error = error
        self.done.set()


class Client:
    """A thread that makes calls, one after the other, for threads that wait. See [Note: waiting for a store].

    Args:
        limit_s: how long an answer may take, in seconds; may be changed later.
        retries: allow new calls after a late answer; if False, one call without an answer in time ends the client for good.
            A connection error ends it for good either way.
        starts: start the thread now instead of at the first call: Python cannot start threads while the interpreter exits.

    Attributes:
        lost: why further calls are useless: "is gone", "has not answered for 10 s"; empty while the client works.
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
        """Call ``function`` in this client's thread, wait for it, and return its result.

        Args:
            function: the function to call. It should end by itself soon after the limit, where it can.
            arguments: the arguments of ``function``.
            still: called now and then in the calling thread; returns a text for the log about the wait, or "" for none.

        Raises:
            OverdueError: no answer came in time, now or in an earlier call; ``function`` continues in the thread.
            DistNetworkError: the connection is broken.
            BaseException: the exception of ``function``.
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
            del asked  # otherwise the exception and this frame would refer to each other, and keep each other alive

    def close(self) -> None:
        """End this client's thread; abandon it if it is stuck in a call."""
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
            del asked  # the call refers to the store, which is freed only when no reference to it is left


def look_s(waited_s: float, num_pollers: int = 1) -> float:
    """Return how long to sleep before the next poll of a key.

    Args:
        waited_s: the time waited so far, in seconds.
        num_pollers: number of processes that poll the same store.
    """
    alone_s = min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, _LOOK_PART * waited_s))
    return max(alone_s, min(num_pollers / _LOOKS_PER_S, LONGEST_LOOK_S))


def tries(deadline: float, over: threading.Event | None = None) -> Iterator[float]:
    """Yield the seconds left until ``deadline``, once for each try of a caller that repeats a call until it succeeds.

    There is at least one try. Pauses grow, and are random because thousands of ranks may be trying at once.

    Args:
        deadline: a time of ``time.monotonic`` after which no try begins.
        over: ends the tries early when it is set.
    """
    over, pause_s = over or threading.Event(), _FIRST_PAUSE_S
    while True:
        yield max(deadline - time.monotonic(), 0.001)
        left_s = deadline - time.monotonic()
        if left_s <= 0 or over.wait(min(left_s, pause_s * _jitter.uniform(0.7, 1.3))):
            return
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


class PatientStore:
    """A store whose calls are made by a ``Client``: each has a time limit, and signals are handled meanwhile.

    Args:
        store: the store itself, or a connection to it.
        prefix: put in front of every key.
        client: makes the calls; None: a new client for this store.
        name: what errors call the store: "the store of the world (at 10.0.0.1)". With a name, a call without an answer raises
            WorldError; without one, the ``DistNetworkError`` of the client.
        rank: this rank, for errors.
        num_pollers: number of processes that poll the store.

    Attributes:
        inner: the store of the argument ``store``.
        while_waiting: called repeatedly while this store waits for a key; an exception from it ends the wait.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str = "",
        client: Client | None = None,
        *,
        name: str = "",
        rank: int | None = None,
        num_pollers: int = 1,
    ) -> None:
        self.inner, self._prefix = store, prefix
        self._client = Client() if client is None else client
        self._name, self._rank, self._num_pollers = name, rank, num_pollers
        self.while_waiting: Callable[[], None] = lambda: None

    def within(self, prefix: str) -> PatientStore:
        """Return the part of the store whose keys begin with ``prefix``."""
        return self._with_prefix(f"{self._prefix}{prefix}/")

    @property
    def whole(self) -> PatientStore:
        """The whole store: its keys are used without a prefix."""
        return self._with_prefix("")

    def _with_prefix(self, prefix: str) -> PatientStore:
        name, rank, num_pollers = self._name, self._rank, self._num_pollers
        return PatientStore(self.inner, prefix, self._client, name=name, rank=rank, num_pollers=num_pollers)

    @property
    def lost(self) -> str:
        """The reason why the store is unusable: "is gone", "has not answered for 10 s"; empty while it is usable."""
        return self._client.lost

    def hurry(self) -> None:
        """Wait at most two seconds for each further answer of the store, because this process is about to end."""
        self._client.limit_s = min(self._client.limit_s, _HURRY_S)

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Wait at most two seconds for each answer of the store, inside the ``with`` block only."""
        before = self._client.limit_s
        self.hurry()
        try:
            yield
        finally:
            self._client.limit_s = before

    def close(self) -> None:
        """End the thread that makes the calls of this store and of the parts returned by ``within``."""
        self._client.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._call(self.inner.set, self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Wait until a key exists, and return its value."""
        self.wait([key])
        return bytes(self._call(self.inner.get, self._prefix + key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait until all of these keys exist, and return their values."""
        self.wait(keys)
        return list(self._call(self.inner.multi_get, [self._prefix + key for key in keys]))

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key; set it if the key does not exist."""
        self._call(self.inner.append, self._prefix + key, value)  # type: ignore[attr-defined]

    def add(self, key: str, value: int) -> int:
        """Add to a number; return the sum."""
        return int(self._call(self.inner.add, self._prefix + key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if its value is ``expected``, or it does not exist and ``expected`` is ""; return its value afterwards."""
        return bytes(self._call(self.inner.compare_set, self._prefix + key, expected, desired))

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys exist."""
        return bool(self._call(self.inner.check, [self._prefix + key for key in keys]))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it existed."""
        return bool(self._call(self.inner.delete_key, self._prefix + key))

    def list_keys(self) -> list[str]:
        """Return all keys of this part of the store, without the prefix."""
        every = self._call(self.inner.list_keys)
        return [key.removeprefix(self._prefix) for key in every if key.startswith(self._prefix)]

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Wait until all of these keys exist.

        Raises:
            DistStoreError: a key was not set in time.
        """
        if not self.exist_within(keys, _KEY_S if timeout is None else timeout.total_seconds()):
            raise dist.DistStoreError(f"nobody set {', '.join(keys)} in time")

    def exist_within(self, keys: list[str], limit_s: float) -> bool:
        """Wait until all of these keys exist; return False if one was not set within ``limit_s`` seconds."""
        begin = time.monotonic()
        while not self.check(keys):
            waited_s = time.monotonic() - begin
            if waited_s >= limit_s:
                return False
            self.while_waiting()
            time.sleep(min(look_s(waited_s, self._num_pollers), limit_s - waited_s))
        return True

    def read(self, key: str, limit_s: float = 0.0) -> bytes | None:
        """Return the value of a key; None if it was not set within ``limit_s`` seconds."""
        if not self.exist_within([key], limit_s):
            return None
        return bytes(self._call(self.inner.get, self._prefix + key))

    def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        try:
            return self._client.call(
                function, *arguments, still=lambda: self._name and f"{self._name} does not answer yet"
            )
        except RuntimeError as error:
            if not self._name:
                raise
            is_silent = isinstance(error, OverdueError)
            why = str(error).partition("\n")[0]  # frames of C++ may follow
            what = f"{self._name} {self._client.lost}" if is_silent else f"{self._name} is gone: {why}"
            fix = (
                LOOK_AT_THE_KEEPER
                if is_silent
                else "look at the output of rank 0 and of the launcher for the first error"
            )
            raise WorldError(explain(what, rank=self._rank, fix=fix)) from error


def attempt(limit_s: float, do: Callable[[], _T], still: Callable[[], str] = str) -> _T:
    """Call ``do`` in a thread of its own, and wait for it; signals are handled meanwhile. See ``Client.call``.

    Raises:
        OverdueError: ``do`` did not end in time; it continues in its thread.
        BaseException: the exception of ``do``.
    """
    client = Client(limit_s)
    try:
        return client.call(do, still=still)
    finally:
        client.close()


def within(
    limit_s: float, what: str, do: Callable[[], _T], *, rank: int | None = None, fix: str = LOOK_AT_THE_KEEPER
) -> _T:
    """Call ``do``, which sends a request to another process, and raise if that process does not answer in time.

    Args:
        limit_s: the time limit in seconds.
        what: name of the process that must answer, for the error: "rank 0's store at 10.0.0.1:29500".
        do: the function to call, in a thread of its own.
        rank: this rank, for the error.
        fix: the remedy, for the error.

    Raises:
        WorldError: ``do`` did not end in time.
        BaseException: the exception of ``do``.
    """
    try:
        return attempt(limit_s, do, lambda: f"{what} does not answer yet")
    except OverdueError:
        raise WorldError(explain(f"{what} has not answered for {limit_s:g} s", rank=rank, fix=fix)) from None


def who(rank: int | None) -> str:
    """Return what log lines call a process that waits: "rank 3"; "this process" where its rank is not known."""
    return f"rank {rank}" if rank is not None else "this process"


def why_no_connection(error: OSError) -> str:
    """Return a text that says why a connection to a host failed."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved here ({error.strerror or error})"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, TimeoutError):
        return "the host does not answer"
    return str(error)
