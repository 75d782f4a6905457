"""The calls that run on this thread, and whose methods they are: the first argument of a method is its module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

from torch import nn


class RunningCall(NamedTuple):
    """A function that runs.

    Attributes:
        module: whose method it is; None if it is not a module's.
        name: of the function, such as "forward".
        file: that it stands in.
    """

    module: nn.Module | None
    name: str
    file: str


def running_calls() -> Iterator[RunningCall]:
    """Yield the calls around this one, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        yield RunningCall(first if isinstance(first, nn.Module) else None, code.co_name, code.co_filename)
        frame = frame.f_back
