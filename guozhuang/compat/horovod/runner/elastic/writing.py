"""Showing what workers print to a reader that may be slow, or take nothing at all for a while.

[Note: a reader that takes nothing] A terminal that was stopped, or a pager, takes nothing for as long as it likes, and then the
workers wait, as a single process would. The driver must not: workers wait for its rounds and its signs of life, and it may
itself be told to end. So a thread of its own writes (``Writer``), and what was read from workers and not written yet is counted
(``Room``): when that is much, no more is read from their pipes. What else happens to workers goes on being noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from guozhuang.launch.console.target import Target

_MOST_BYTES = 1 << 22


class Room:
    """For what workers have printed, from when it is read until it is written. From any thread.

    Args:
        most_bytes: so much, and a little more: who reads looks for room before it reads.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes, self._num_bytes, self._is_closed = most_bytes, 0, False
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> None:
        """So much was read."""
        with self._changed:
            self._num_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        """So much was written."""
        with self._changed:
            self._num_bytes -= num_bytes
            self._changed.notify_all()

    def is_full(self) -> bool:
        """Whether nothing is to be read now."""
        return self._num_bytes >= self._most_bytes and not self._is_closed

    def wait(self) -> None:
        """Wait until it is not full."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_full())

    def close(self) -> None:
        """The end is near: it is never full again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class Writer:
    """The thread that writes what was drawn. ``close`` ends it.

    Args:
        targets: that are queued.
        written: called in the thread, with how many of the bytes given to ``drawn`` have been written.
    """

    def __init__(self, targets: Sequence[Target], written: Callable[[int], object]) -> None:
        self._targets, self._written = targets, written
        self._changed = threading.Condition()
        self._num_bytes, self._is_drawn, self._is_writing, self._is_over = 0, False, False, False
        self._thread = threading.Thread(target=self._run, name="horovod output", daemon=True)
        self._thread.start()

    def drawn(self, num_bytes: int = 0) -> None:
        """Something was drawn on a target, made of so many bytes that a worker printed."""
        with self._changed:
            self._num_bytes, self._is_drawn = self._num_bytes + num_bytes, True
            self._changed.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Wait until all is written; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._is_drawn or self._is_writing), limit_s)

    def close(self) -> None:
        """Write nothing more; what is being written to somebody who takes nothing is left alone."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self.wait(0.0):
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_drawn or self._is_over)
                if self._is_over:
                    return
                num_bytes, self._num_bytes = self._num_bytes, 0
                self._is_drawn, self._is_writing = False, True
            for target in self._targets:
                target.flush()
            self._written(num_bytes)
