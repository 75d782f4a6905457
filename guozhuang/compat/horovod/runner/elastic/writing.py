"""Write the output of workers to a reader that may be slow, or read nothing at all for a while.

[Note: a reader that takes nothing] A stopped terminal, or a pager, may stop reading for any length of time. Then the workers
block when they print, as a single process would. The driver must not block: workers need its rounds and heartbeats, and it must
react to signals. So a separate thread writes (``Writer``), and the bytes read from workers but not written yet are counted
(``Room``): when there are too many, the workers' pipes are not read. All other events of workers are handled meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from guozhuang.launch.console.target import Target

_MOST_BYTES = 1 << 22


class Room:
    """A count of the bytes that were read from workers and are not written yet. Thread-safe.

    Args:
        most_bytes: the limit. It may be exceeded a little, because readers check it before they read.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes, self._num_bytes, self._is_closed = most_bytes, 0, False
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> None:
        """Add bytes that were read from a worker."""
        with self._changed:
            self._num_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        """Subtract bytes that were written."""
        with self._changed:
            self._num_bytes -= num_bytes
            self._changed.notify_all()

    def is_full(self) -> bool:
        """Return whether the limit is reached, so that workers' pipes should not be read now."""
        return self._num_bytes >= self._most_bytes and not self._is_closed

    def wait(self) -> None:
        """Wait until the count is below the limit."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_full())

    def close(self) -> None:
        """Release all waiting readers: from now on it is never full."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class Writer:
    """The thread that writes queued output to the terminal or file. ``close`` ends it.

    Args:
        targets: the outputs, each with a queue of lines to write.
        written: called in the thread with the number of bytes given to ``drawn`` that have been written.
    """

    def __init__(self, targets: Sequence[Target], written: Callable[[int], object]) -> None:
        self._targets, self._written = targets, written
        self._changed = threading.Condition()
        self._num_bytes, self._is_drawn, self._is_writing, self._is_over = 0, False, False, False
        self._thread = threading.Thread(target=self._run, name="horovod output", daemon=True)
        self._thread.start()

    def drawn(self, num_bytes: int = 0) -> None:
        """Report that lines were queued on a target, made of ``num_bytes`` bytes that a worker printed."""
        with self._changed:
            self._num_bytes, self._is_drawn = self._num_bytes + num_bytes, True
            self._changed.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Wait until all is written, ``limit_s`` seconds at most; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._is_drawn or self._is_writing), limit_s)

    def close(self) -> None:
        """Write nothing more, and end the thread; do not wait for it if it is blocked in a write."""
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
