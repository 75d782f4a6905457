"""A thread that aborts the collectives of a round when the driver reports that one of its workers is gone.

Mostly they have failed by then: when a process ends the kernel closes its connections. But a host without power, or behind a
cut cable, closes none, and a collective would wait for it until its time-out. The driver notices such a host within seconds,
because its heartbeats stop.

[Note: the right round] The main thread moves on to the next round by itself. So each abort callback is registered for one
round, as soon as a thread may wait in that round, also while its world is still being made; a callback that is registered
after the round was found broken is called at once.
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
    """The part of ``WorkerBoard`` that tells of lost workers."""

    def lost(self, number: int) -> str:
        """See ``WorkerBoard``."""


class LostPeers:
    """The thread; it starts when the object is made, and ends with the process.

    Args:
        board: where the driver reports lost workers.
        look_every_s: the pause between two looks at the board, in seconds.
    """

    def __init__(self, board: LossBoard, look_every_s: float = _LOOK_S) -> None:
        self._board, self._look_every_s = board, look_every_s
        self._lock = threading.Lock()  # guards the next three attributes
        self._round = 0
        self._aborts: list[Callable[[], object]] = []
        self._why = ""  # the reason why the round is broken; "" while it is not
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="horovod lost peers", daemon=True)
        self._thread.start()
        # The interpreter must not end while the thread is inside a call of PyTorch's store.
        atexit.register(self.close)

    def begin(self, number: int) -> None:
        """Watch another round from now on; 0: none. Callbacks of the round before are dropped."""
        with self._lock:
            self._round, self._aborts, self._why = number, [], ""

    def breaks(self, number: int, abort: Callable[[], object]) -> None:
        """Register a callback for the thread to call when a worker of the round is gone; call it at once if one is already.

        Args:
            number: the number of the round. If it is not the newest any more, nothing is registered.
            abort: makes all waits for that worker fail; it may be called more than once, and from any thread.
        """
        with self._lock:
            if number != self._round:
                return
            self._aborts.append(abort)
            is_broken = bool(self._why)
        if is_broken:
            _call(abort)

    def lost(self) -> str:
        """Return the driver's reason why the newest round is broken; "" as long as there is none."""
        return self._why

    def look(self) -> None:
        """Ask the driver once whether a worker of the round is gone, and if so call the callbacks; the thread repeats this."""
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
            except RuntimeError as error:  # the driver is gone; the main thread reports that when it waits for it
                _log.debug("the driver does not answer: %s", error)


def _call(abort: Callable[[], object]) -> None:
    try:
        abort()
    except Exception as error:  # the collectives, or their group, have ended already
        _log.debug("there is nothing left to break: %s", error)
