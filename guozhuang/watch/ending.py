"""The last words of a rank that ends itself after a hang, and its end. See [Note: how it ends] in ``heartbeat``."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from guozhuang.watch.report import EXIT_CODE
from guozhuang.watch.stacks import OWN_THREADS

# What may be waited for while the main thread may hold the lock of the log or of stdout for ever.
_SAY_S = 1.0
_log = logging.getLogger("guozhuang")


def end(text: str, wait_s: float) -> NoReturn:
    """Say ``text``, once: in the log if one was set up, else on stderr; then end the process with ``EXIT_CODE``.

    Args:
        text: the last words.
        wait_s: the process is not gone before, so that others can do the same.
    """
    until_s = time.monotonic() + wait_s
    # Each in a thread of its own, which is left there if it does not come through: a full pipe holds it up as well.
    if not _within(_SAY_S, lambda: _log.critical("%s", text) if _log.hasHandlers() else _write(text)):
        _within(_SAY_S, lambda: _write(text))
    _within(_SAY_S, _flush)
    time.sleep(max(until_s - time.monotonic(), 0.0))
    _end_children()
    os._exit(EXIT_CODE)


def _within(limit_s: float, do: Callable[[], None]) -> bool:
    thread = threading.Thread(target=do, name=f"{OWN_THREADS} last words", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _write(text: str) -> None:
    data = (text + "\n").encode(errors="replace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def _end_children() -> None:
    """Workers of a data loader and the like, which a clean end of the interpreter would have ended."""
    for process in list(getattr(sys.modules.get("multiprocessing.process"), "_children", ())):
        with contextlib.suppress(Exception):
            process.terminate()
