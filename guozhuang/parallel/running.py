"""The calls that run on this thread, and whose methods they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def running_frames() -> Iterator[FrameType]:
    """Yield the frames of the calls around this one, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def first_argument(frame: FrameType) -> object:
    """Return the first positional argument of a call: of a method what it is called on, however it is named; None without."""
    return frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
