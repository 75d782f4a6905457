"""Signals that end a rank of a check: rank 0 still tells what is known, others say that they were ended."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from guozhuang.check.wire import Line

_SAY_S = 0.5


class Ended(Exception):
    """The launcher ends the check: what is known by now is all there will be."""


class Ending:
    """A context manager for SIGTERM and SIGHUP, of the main thread.

    On rank 0 the first raises :class:`Ended` wherever it is; what comes after changes nothing, because launchers send
    several, and rank 0 tells meanwhile. Any other rank says so over ``line`` and is gone.

    Attributes:
        line: to rank 0, once there is one.
    """

    def __init__(self, rank: int) -> None:
        self.line: Line | None = None
        self._rank = rank
        self._is_over = False
        self._before: dict[signal.Signals, Any] = {}

    def over(self) -> None:
        """From now on no signal raises: all that rank 0 knows is put together."""
        self._is_over = True

    def __enter__(self) -> Ending:
        for kind in (signal.SIGTERM, signal.SIGHUP):
            self._before[kind] = signal.signal(kind, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            # One more must not end rank 0 while it tells.
            signal.signal(kind, signal.SIG_IGN if self._rank == 0 else handler)

    def _handle(self, number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if self._rank == 0:
            if not self._is_over:
                self._is_over = True
                raise Ended(f"rank 0 got {name}")
            return
        if self.line is not None:
            with contextlib.suppress(OSError):
                self.line.send(_SAY_S, ended_by=name)
        os._exit(128 + number)
