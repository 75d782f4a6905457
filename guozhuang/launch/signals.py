"""Handle the signals that end an agent.

[Note: signals] The first signal raises an exception, so it ends every wait, for other nodes or for a store that does not
answer. Later signals are only recorded: a second one makes the agent kill the ranks at once.

[Note: signals while a rank starts] A rank runs, and may have its own handlers, before the agent has written down that it lives.
An exception in between would leave a rank that the agent does not know: it would be killed with what the run left behind,
without the signal. So the first signal in a ``held`` block is raised at the block's end.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

# The signals that always end a run, also if --signals-to-handle does not name them.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# The signal by which the launcher of several hosts ends the agents of the other hosts after a failure: their ranks get SIGTERM,
# and are not asked to save, which they could not do without the ranks that are gone.
RUN_FAILED = signal.SIGHUP


class SignalledError(BaseException):
    """Raised when the agent gets a signal that ends the run; no ``Exception``, because code may suppress those."""

    def __init__(self, number: int) -> None:
        super().__init__(f"got {signal.Signals(number).name}")
        self.number = number


class Signals:
    """Installs signal handlers for a ``with`` block in the main thread. A signal that was ignored, as by nohup, stays ignored.

    Args:
        wanted: the signals to handle.

    Attributes:
        noted: the signals that arrived after ``note`` was called, after the first one was raised, or in a ``held`` block.
        is_signalled: whether any signal has arrived.
    """

    def __init__(self, wanted: Iterable[int]) -> None:
        self.noted: list[int] = []
        self.is_signalled = self._is_noting = self._is_held = False
        # getsignal() returns None for a handler that Python did not set: it could not be restored, so it is not replaced.
        self._numbers = [number for number in wanted if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def note(self) -> None:
        """Record signals from now on instead of raising ``SignalledError``."""
        self._is_noting = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raise the first signal in this block at its end, unless the block raises. See [Note: signals while a rank starts]."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self.noted and not self._is_noting:
            self._is_noting = True
            raise SignalledError(self.noted.pop(0))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_signalled = True
        if self._is_noting or self._is_held:
            self.noted.append(number)
            return
        self._is_noting = True
        raise SignalledError(number)
