"""Running the launcher inside this process: its streams are kept instead of shown, and it gets a limit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass

_GRACE_S = 20.0  # for the launcher to end what it started


@dataclass
class Streams:
    """What went to stdout and stderr, of this process and those it started; filled at the end.

    Attributes:
        real_err: the descriptor of the stderr that is shown.
    """

    real_err: int
    out: str = ""
    err: str = ""


@dataclass
class Limit:
    """Whether the time was over."""

    is_over: bool = False


@contextlib.contextmanager
def captured() -> Iterator[Streams]:
    """Both streams go to files that have no name, at the level of descriptors, for processes inherit those."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = os.dup(1), os.dup(2)
        streams = Streams(kept[1])
        try:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            yield streams
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            for name, file in (("out", out), ("err", err)):
                file.seek(0)
                setattr(streams, name, file.read().decode(errors="replace"))


@contextlib.contextmanager
def limited(limit_s: float, streams: Streams) -> Iterator[Limit]:
    """After the limit this process gets SIGTERM, which makes the launcher end what it started, and return.

    If it does not return either, the process ends: what guards the launcher's ranks ends those.
    """
    limit, done = Limit(), threading.Event()

    def watch() -> None:
        if done.wait(limit_s):
            return
        limit.is_over = True
        os.kill(os.getpid(), signal.SIGTERM)
        if not done.wait(_GRACE_S):
            os.write(streams.real_err, f"guozhuang check: no result within {limit_s:g} s\n".encode())
            os._exit(1)

    thread = threading.Thread(target=watch, name="guozhuang check limit", daemon=True)
    thread.start()
    try:
        yield limit
    finally:
        done.set()
        thread.join()
