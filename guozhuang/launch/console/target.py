"""Write to the launcher's standard output and standard error, which a terminal, pager or pipe may read slowly or no more."""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Callable

from guozhuang.launch.console.say import say
from guozhuang.launch.console.screen import Screen

_PIECE_BYTES = 4096  # a pipe that poll() reports as writable takes this many bytes without blocking
_SAY_S = 1.0


class Target:
    """Standard output or standard error of this process, with its ``screen``.

    Args:
        descriptor: 1 or 2.
        colour: whether marks are coloured; None: on a terminal, unless NO_COLOR is set.
        is_terminal: whether the output is shown on a terminal in the end; None: whether the descriptor is a terminal.
        wait: called before each piece is written; returns True once the descriptor has room, False to drop the rest.
        is_queued: whether ``screen`` only queues its output until ``flush``, which another thread may call.
    """

    def __init__(
        self,
        descriptor: int,
        colour: bool | None = None,
        is_terminal: bool | None = None,
        wait: Callable[[int], bool] = lambda descriptor: True,
        is_queued: bool = False,
    ) -> None:
        self.descriptor = descriptor
        self._wait = wait
        self._is_gone = False
        self._queue: deque[bytes] = deque()
        is_terminal = os.isatty(descriptor) if is_terminal is None else is_terminal
        if colour is None:
            colour = os.environ.get("FORCE_COLOR", "0") not in ("", "0") or (
                is_terminal and not os.environ.get("NO_COLOR")
            )
        self.colour = colour
        self.is_terminal = is_terminal
        self.screen = Screen(self._queue.append if is_queued else self.write, is_terminal, self._size)

    def _size(self) -> tuple[int, int]:
        try:
            return os.get_terminal_size(self.descriptor)
        except OSError:
            return 0, 0  # unknown: the descriptor is no terminal, but its reader may show the output on one

    def flush(self) -> bool:
        """Write the queued output; return False if there was none."""
        was_there = bool(self._queue)
        while self._queue:
            self.write(self._queue.popleft())
        return was_there

    def write(self, data: bytes) -> None:
        """Write all data, waiting until the descriptor can take it; drop the data if its reader is gone."""
        view = memoryview(data)
        while view and not self._is_gone and self._wait(self.descriptor):
            try:
                view = view[os.write(self.descriptor, view[:_PIECE_BYTES]) :]
            except BlockingIOError:
                with selectors.DefaultSelector() as selector:
                    selector.register(self.descriptor, selectors.EVENT_WRITE)
                    selector.select()
            except OSError as error:
                # The reader of our output is gone. The ranks keep running, and their pipes must still be emptied.
                self._is_gone = True
                if self.descriptor == 1:
                    say(f"standard output is closed ({error.strerror}); the ranks go on unseen", within_s=_SAY_S)


def is_same(one: int, other: int) -> bool:
    """Return whether two descriptors refer to the same terminal, file or pipe."""
    try:
        a, b = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
