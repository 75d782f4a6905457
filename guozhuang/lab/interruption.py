"""Commands that start processes end them first when they are told to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from typing import NoReturn


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: what it started is ended first."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    kinds: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(kind, interrupt) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
