"""What the launcher says of its own, on standard error: it must never change how the run ends."""

from __future__ import annotations

import contextlib
import os
import select
import sys

WHO = "guozhuang run"  # what stands before what the launcher says


def say(text: str, who: str = WHO, within_s: float | None = None) -> None:
    """Say something to the user. Where nobody can read it (``2>&1 | head``), it is lost, and nothing else happens.

    Args:
        text: one line, or several.
        who: what stands before it.
        within_s: how long whoever reads our output may take before it is not said, in seconds; None: as long as it likes.
    """
    if sys.stderr is None:  # it was closed when this process began, and print() would take standard output
        return
    try:
        if within_s is not None and not _is_read(within_s):
            return
        print(f"{who}: {text}", file=sys.stderr, flush=True)
    except BlockingIOError:
        return
    except (OSError, ValueError):
        # What could not be written is tried again when the interpreter ends, and would make the exit code 120.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)


def _is_read(limit_s: float) -> bool:
    """Whether a few lines can be written without waiting for a reader any longer than that."""
    try:
        return bool(select.select([], [sys.stderr.fileno()], [], limit_s)[1])
    except (OSError, ValueError):
        return True  # no descriptor to ask about
