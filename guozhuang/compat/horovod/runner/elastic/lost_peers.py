"""A thread that breaks the collectives of a round when the driver says that one of its workers is gone.

Mostly they have broken by then: the kernel closes the connections of a process that ends. But of a host without power, or
behind a cut cable, nobody hears anything; a collective would wait for it until its time-out. The driver misses it after some
seconds.

[Note: the right round] The main thread goes on to the next round by itself. So what is to be broken is given for a round, from
the moment on that somebody may wait in it, also while its world is still being made; and what comes after its round was found
broken is broken at once.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Protocol

_LOOK_S = 1.0
_JOIN_S = 2.0
_log = logging.getLogger("guozhuang")


class LossBoard(Protocol):
    """What the driver says; a ``WorkerBoard``."""

    def lost(self, number: int) -> str:
        """See ``WorkerBoard``."""


class LostPeers:
    """Begins at once, and ends with the process.

    Args:
        board: where the driver says it.
        look_every_s: how long to pause between looks, in seconds.
    """

    def __init__(self, board: LossBoard, look_every_s: float = _LOOK_S) -> None:
        self._board, self._look_every_s = board, look_every_s
        self._lock = threading.Lock()  # for the three that follow
        self._round = 0
        self._aborts: list[Callable[[], object]] = []
        self._why = ""  # the round is broken
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="horovod lost peers", daemon=True)
        self._thread.start()
        # The interpreter must not end while the thread is in PyTorch's store.
        atexit.register(self.close)

    def begin(self, number: int) -> None:
        """This worker is in another round from now on; 0: in none."""
        with self._lock:
            self._round, self._aborts, self._why = number, [], ""

    def breaks(self, number: int, abort: Callable[[], object]) -> None:
        """Call this, in the thread, when a worker of that round is gone; at once where it is known to be.

        Args:
            number: of the round. One that is not the newest any more is nobody's concern.
            abort: makes whoever waits for that worker stop; may be called more than once, and from any thread.
        """
        with self._lock:
            if number != self._round:
                return
            self._aborts.append(abort)
            is_broken = bool(self._why)
        if is_broken:
            _call(abort)

    def lost(self) -> str:
        """Why the newest round is broken, as the driver has said; "" as long as it has not."""
        return self._why

    def look(self) -> None:
        """What the thread does every second."""
        with self._lock:
            number, is_broken = self._round, bool(self._why)
        if not number or is_broken:
            return
        why = self._board.lost(number)
        with self._lock:
            if not why or self._round != number:
                return
            self._why, aborts = why, list(self._aborts)
        _log.debug("breaking the collectives of round %d: %s", number, why)
        for abort in aborts:
            _call(abort)

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(_JOIN_S)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._over.wait(self._look_every_s):
            try:
                self.look()
            except RuntimeError as error:  # the driver is gone; whoever waits for it says so
                _log.debug("the driver does not answer: %s", error)


def _call(abort: Callable[[], object]) -> None:
    try:
        abort()
    except Exception as error:  # it has ended by itself
        _log.debug("there is nothing left to break: %s", error)
