"""A store whose answer can be waited for in Python: a signal ends the waiting, and so does a limit.

[Note: deaf] A client of torch's store waits inside C++, where Python handles no signal, and for as long as the connection
stands: of a host that was switched off nobody says so, and the kernel tries for a quarter of an hour. So an agent would
survive Ctrl-C and TERM, and never hear that the others are gone. Here each call is made by a thread of its own, and the
caller waits for that thread in slices. Slices are counted, not the clock: of a process that was stopped (SIGSTOP, a laptop
that slept) the clock has gone on, and the answer is there as soon as it goes on itself. A key that is not there yet is
waited for outside the store. A thread that never comes back is left behind; it does not keep the process from ending.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

ANSWER_S = 10.0  # a store that answers later than this is taken for lost
_HURRY_S = 2.0
_SLICE_S = 0.1
# Between two looks at a key that is waited for: a part of what was waited so far. Hundreds may wait for the same one.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S, _LOOK_PART = 0.02, 0.2, 0.05
_KEY_S = 300.0  # as torch waits for a key that somebody is to set
_T = TypeVar("_T")


def look_s(waited_s: float) -> float:
    """How long to sleep before the next look at a key, after that many seconds of waiting."""
    return min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, _LOOK_PART * waited_s))


class _Call:
    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self.function, self.arguments = function, arguments
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        try:
            self.result = self.function(*self.arguments)
        except BaseException as error:  # raised where it was asked for
            self.error = error
        self.done.set()


class Caller:
    """A thread that makes calls, one after the other, for others that wait. See [Note: deaf].

    Args:
        limit_s: how long an answer may take, in seconds.
    """

    def __init__(self, limit_s: float = ANSWER_S) -> None:
        self.limit_s = limit_s
        self.lost = ""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Its result.

        Raises:
            DistNetworkError: no answer came in time, now or before, or the connection is broken.
        """
        if self.lost:
            raise dist.DistNetworkError(self.lost)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="guozhuang store calls", daemon=True)
                self._thread.start()
        asked = _Call(function, arguments)
        self._calls.put(asked)
        waited_s = 0.0
        while not asked.done.wait(_SLICE_S):
            waited_s += _SLICE_S
            if self.lost or waited_s >= self.limit_s:
                self.lost = self.lost or f"has not answered for {waited_s:.0f} s"
                raise dist.DistNetworkError(self.lost)
        if isinstance(asked.error, dist.DistNetworkError):
            self.lost = "is gone"
        if asked.error is not None:
            raise asked.error
        result: _T = asked.result
        return result

    def close(self) -> None:
        """Let the thread go; where it is stuck, it is left behind."""
        self.lost = self.lost or "was closed"
        self._calls.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_SLICE_S)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            asked.make()
            del asked  # it refers to the store, which is to end when nobody does


class PatientStore(dist.Store):
    """A store behind a ``Caller``, and what torch elastic takes for a store.

    Args:
        store: the store itself, or a connection to it.
        prefix: what all keys begin with.
        caller: who makes the calls; None: one of its own.

    Attributes:
        while_waiting: called again and again while a key is waited for; what it raises ends the waiting.
    """

    def __init__(self, store: dist.Store, prefix: str = "", caller: Caller | None = None) -> None:
        super().__init__()
        self._inner, self._prefix = store, prefix
        self._caller = Caller() if caller is None else caller
        self.while_waiting: Callable[[], None] = lambda: None

    def within(self, prefix: str) -> PatientStore:
        """The part of the store whose keys begin so."""
        return PatientStore(self._inner, f"{self._prefix}{prefix}/", self._caller)

    @property
    def whole(self) -> PatientStore:
        """The whole store, with its keys as they are."""
        return PatientStore(self._inner, "", self._caller)

    @property
    def lost(self) -> str:
        """Why there is no use in asking any more: "is gone", "has not answered for 10 s"; empty while there is."""
        return self._caller.lost

    def hurry(self) -> None:
        """From now on an answer has two seconds: this process is about to end."""
        self._caller.limit_s = min(self._caller.limit_s, _HURRY_S)

    def close(self) -> None:
        """End the calls of this store and of all its parts."""
        self._caller.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._caller.call(self._inner.set, self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, as soon as it is there."""
        self.wait([key])
        return bytes(self._caller.call(self._inner.get, self._prefix + key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys, as soon as all are there."""
        self.wait(keys)
        return list(self._caller.call(self._inner.multi_get, [self._prefix + key for key in keys]))

    def multi_set(self, keys: list[str], values: Any) -> None:
        """Set several keys."""
        self._caller.call(
            self._inner.multi_set,  # type: ignore[attr-defined]
            [self._prefix + key for key in keys],
            values,
        )

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key; where there is none, set it."""
        self._caller.call(self._inner.append, self._prefix + key, value)  # type: ignore[attr-defined]

    def add(self, key: str, value: int) -> int:
        """Add to a number; return the sum."""
        return int(self._caller.call(self._inner.add, self._prefix + key, value))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are there."""
        return bool(self._caller.call(self._inner.check, [self._prefix + key for key in keys]))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key that has the value that is expected; return its value."""
        return bytes(self._caller.call(self._inner.compare_set, self._prefix + key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._caller.call(self._inner.delete_key, self._prefix + key))

    def list_keys(self) -> list[str]:
        """All keys of this part of the store."""
        every = self._caller.call(self._inner.list_keys)
        return [key.removeprefix(self._prefix) for key in every if key.startswith(self._prefix)]

    def has_extended_api(self) -> bool:
        """Whether several keys can be asked for in one message."""
        return True

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
