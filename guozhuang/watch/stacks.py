"""Read where this process's threads are: the place of the main thread, all stacks as text, the number of collectives.

This module only reads: it starts no thread, handles no signal and opens no file (a source file may lie on a disk that does not
answer, which may be the very reason for a hang). Frames are released at once, because a reference to a frame keeps its
local variables alive, and with them memory of the model.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from guozhuang.errors import WorldError
from guozhuang.watch.waits import num_started

# The names of the heartbeat's own threads begin with this text; those threads are left out of the stacks.
OWN_THREADS = "guozhuang heartbeat"
# The most bytes of one rank's stacks: enough for a deep main thread and some other threads, small enough for the store.
MAX_STACK_BYTES = 16_384
_OUTER_FRAMES, _INNER_FRAMES = 10, 50

_SEP = os.sep
_COLLECTIVES = tuple(
    name.replace("/", _SEP)
    for name in (
        "/torch/distributed/distributed_c10d.py",
        "/torch/distributed/_functional_collectives.py",
        "/torch/distributed/nn/functional.py",
        "/guozhuang/groups/",
    )
)
# Folders whose code is no part of a training script: the standard library, installed packages and this package.
_LIBRARIES = tuple(
    {
        *(sysconfig.get_paths()[name] + _SEP for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + _SEP,
        # The folder that holds torch: a virtual environment may use the packages of another one.
        os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))) + _SEP,
    }
)
# Names of functions that only call another function, and so are not shown as the place of a thread.
_WRAPPERS = {"wrapper", "inner", "_fn", "_wrapped_call_impl", "_call_impl", "decorate_context"}


@dataclass(frozen=True)
class CodePlace:
    """The place in the code where a thread is.

    Attributes:
        text: for people, such as "all_reduce, called in step (train.py:31)".
        waits_in: the collective that the thread is in, as far as Python frames show; "" if it is in none.
    """

    text: str
    waits_in: str = ""


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return ``frame`` and its callers, from the innermost outward.

    To ask for a caller makes an object for it, and before Python 3.12 that may collect garbage, whose finalizers may let the
    thread go on and leave the caller just then: the object would refer to memory that is no frame any more. So nothing is
    collected meanwhile.
    """
    found, pauses = [], sys.version_info < (3, 12) and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
    finally:
        if pauses:
            gc.enable()
    return found


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def place_of(frame: FrameType | None) -> CodePlace:
    """Return the ``CodePlace`` of a thread whose innermost frame is ``frame``."""
    if frame is None:
        return CodePlace("its main thread has ended")
    return _place([(each.f_code, each.f_lineno) for each in _frames(frame)])


def place_of_error(error: BaseException) -> CodePlace:
    """Return the ``CodePlace`` where ``error`` was raised."""
    calls = _calls_of_error(error)
    return _place(calls) if calls else CodePlace("")


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether ``error`` was raised by communication with other ranks, so that its cause may be on another rank."""
    return (
        isinstance(error, WorldError | dist.DistError)
        or bool(place_of_error(error).waits_in)
        # The backward pass waited in C++ for a collective that failed: no Python frame of the collective is on the stack.
        or is_of_gloo(error)
        or (isinstance(error, RuntimeError) and "NCCL" in str(error))
    )


def is_of_gloo(error: BaseException) -> bool:
    """Return whether gloo raised ``error`` because a connection broke, or a peer did not answer in time."""
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


def _calls_of_error(error: BaseException) -> list[tuple[CodeType, int | None]]:
    calls: list[tuple[CodeType, int | None]] = []
    entry = error.__traceback__
    while entry is not None:
        calls.append((entry.tb_frame.f_code, entry.tb_lineno))
        entry = entry.tb_next
    return calls[::-1]


def _place(calls: Sequence[tuple[CodeType, int | None]]) -> CodePlace:
    """Return the ``CodePlace`` of a stack of calls, which are given from the innermost outward."""
    called, collective = "", ""
    for code, line in calls:
        if not code.co_filename.startswith((*_LIBRARIES, "<")):
            here = f"{code.co_qualname} ({os.path.basename(code.co_filename)}:{line})"
            return CodePlace(f"{called}, called in {here}" if called else here, collective)
        if code.co_name not in _WRAPPERS and not code.co_name.startswith("<"):
            called = code.co_name
            if any(part in code.co_filename for part in _COLLECTIVES):
                collective = code.co_name
    code, line = calls[0]
    return CodePlace(f"{code.co_qualname} ({os.path.basename(code.co_filename)}:{line})", collective)


class MainThread:
    """A sampler of the main thread's stack, which measures for how long the thread has been standing at one place.

    Standing means: every sample shows the same calls, each at the same instruction. A loop around one long call shows
    the same; so standing alone is no proof of a hang, see [Note: what a hang is] in ``judge``.
    """

    def __init__(self, now_s: float) -> None:
        self.place = CodePlace("")
        self._position: tuple[tuple[int, int], ...] = ()
        self._since_s = now_s

    def look(self, now_s: float) -> None:
        """Sample the main thread's stack. Call this often, because a move away and back between two samples is missed."""
        frame = _main_frame()
        position = tuple((id(each.f_code), each.f_lasti) for each in _frames(frame))
        if position != self._position:
            self._position, self._since_s = position, now_s
        self.place = place_of(frame)

    def still_s(self, now_s: float) -> float:
        """Return for how many seconds the main thread has been standing at its place."""
        return now_s - self._since_s


def stacks_text(max_bytes: int = MAX_STACK_BYTES) -> str:
    """Return the Python stacks of all threads but the heartbeat's, main thread first, each with its innermost call last."""
    main = threading.main_thread().ident
    names = {each.ident: each.name for each in threading.enumerate()}
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, "a thread that was not started by Python")
        if not name.startswith(OWN_THREADS):
            parts.append(f"{name}:\n{_stack(frame)}")
    text = "\n".join(parts) or "no thread runs Python"
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    return encoded[:max_bytes].decode(errors="ignore") + f"\n  ... cut: {len(encoded) - max_bytes} bytes more"


def error_text(error: BaseException) -> str:
    """Return the stack of an exception in the form of ``stacks_text``."""
    return f"MainThread, ended by {type(error).__name__}:\n{_lines(_calls_of_error(error))}"


def _stack(frame: FrameType) -> str:
    return _lines([(each.f_code, each.f_lineno) for each in _frames(frame)])


def _lines(calls: Sequence[tuple[CodeType, int | None]]) -> str:
    lines = [f'  File "{code.co_filename}", line {line}, in {code.co_qualname}' for code, line in reversed(calls)]
    more = len(lines) - _OUTER_FRAMES - _INNER_FRAMES
    if more > 0:
        lines[_OUTER_FRAMES : _OUTER_FRAMES + more] = [f"  ... {more} calls left out"]
    return "\n".join(lines)


def started_collectives() -> tuple[int, int] | None:
    """Return how many collectives, sends and receives were started in the default group, and in all; None without a group."""
    if not dist.is_initialized():
        return None
    default, total = 0, 0
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    for group in groups:
        number = num_started(group)
        total += number
        default = number if group is dist.group.WORLD else default
    return default, total
