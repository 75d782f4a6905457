"""Print messages of the launcher on standard error, such that a failed write never changes how the run ends."""

from __future__ import annotations

import contextlib
import os
import select
import sys

WHO = "guozhuang run"  # the prefix of the launcher's messages


def say(text: str, who: str = WHO, within_s: float | None = None) -> None:
    """Print a message for the user. If standard error is closed (``2>&1 | head``), the message is lost without an error.

    Args:
        text: one line, or several.
        who: the prefix of the message.
        within_s: how long to wait for the reader of standard error, in seconds; then the message is dropped; None: no limit.
    """
    if sys.stderr is None:  # stderr was closed when this process began; print() would write to stdout then
        return
    try:
        if within_s is not None and not _is_read(within_s):
            return
        print(f"{who}: {text}", file=sys.stderr, flush=True)
    except BlockingIOError:
        return
    except (OSError, ValueError):
        # Let stderr lead to /dev/null: otherwise Python would write the buffered text at exit again, fail, and return 120.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)


def _is_read(limit_s: float) -> bool:
    """Wait up to ``limit_s`` seconds until standard error can take output; return whether it can."""
    try:
        return bool(select.select([], [sys.stderr.fileno()], [], limit_s)[1])
    except (OSError, ValueError):
        return True  # sys.stderr has no descriptor, so a write to it does not wait for a reader
