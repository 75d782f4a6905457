"""Where the threads of this process stand: the place of the main thread, all stacks as text, equal stacks of many ranks.

It only looks: it starts nothing, takes no signal and reads no file (a source file may lie on a disk that does not answer,
which may be the very reason for a hang). Frames are released at once, because a reference to a frame keeps its
local variables alive, and with them memory of the model.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from guozhuang.errors import WorldError

# Threads of this name are ours, and of no interest in a stack.
OWN_THREADS = "guozhuang heartbeat"
# Enough for the deepest useful stack of a main thread and some others; small enough for a store to carry from each rank.
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
# Code that nobody writes in a training script: where the standard library, installed packages and this package live.
_LIBRARIES = tuple(
    {
        *(sysconfig.get_paths()[name] + _SEP for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + _SEP,
        # An environment may borrow the packages of another one, and torch with them.
        os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))) + _SEP,
    }
)
# Functions that only call another one.
_WRAPPERS = {"wrapper", "inner", "_fn", "_wrapped_call_impl", "_call_impl", "decorate_context"}


@dataclass(frozen=True)
class CodePlace:
    """Where a thread stands.

    Attributes:
        text: for people, such as "all_reduce, called in step (train.py:31)".
        waits_in: the collective that it is in, as far as Python frames tell; "" if it is in none.
    """

    text: str
    waits_in: str = ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost outward."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def place_of(frame: FrameType | None) -> CodePlace:
    """The place of a thread whose innermost frame is ``frame``."""
    if frame is None:
        return CodePlace("its main thread has ended")
    return _place([(each.f_code, each.f_lineno) for each in _frames(frame)])


def place_of_error(error: BaseException) -> CodePlace:
    """The place where it was raised."""
    calls = _calls_of_error(error)
    return _place(calls) if calls else CodePlace("")


def is_of_a_collective(error: BaseException) -> bool:
    """Whether it came out of the communication with other ranks, and may be the echo of what happened to one of them."""
    text = str(error)
    return (
        isinstance(error, WorldError | dist.DistError)
        or bool(place_of_error(error).waits_in)
        # Out of the backward pass, which waits in C++.
        or (isinstance(error, RuntimeError) and ("gloo/transport" in text or "NCCL" in text))
    )


def _calls_of_error(error: BaseException) -> list[tuple[CodeType, int | None]]:
    calls: list[tuple[CodeType, int | None]] = []
    entry = error.__traceback__
    while entry is not None:
        calls.append((entry.tb_frame.f_code, entry.tb_lineno))
        entry = entry.tb_next
    return calls[::-1]


def _place(calls: Sequence[tuple[CodeType, int | None]]) -> CodePlace:
    """From the innermost call outward."""
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
    """How long the main thread has been standing at one place, from a look at it now and then.

    Standing means: at every look the same calls, each at the same instruction. A thread that goes round a loop of one long
    call looks the same; so standing alone is no proof of a hang, see [Note: what a hang is] in ``judge``.
    """

    def __init__(self, now_s: float) -> None:
        self.place = CodePlace("")
        self._position: tuple[tuple[int, int], ...] = ()
        self._since_s = now_s

    def look(self, now_s: float) -> None:
        """Call it often: what happens between two looks is not seen."""
        frame = _main_frame()
        position = tuple((id(each.f_code), each.f_lasti) for each in _frames(frame))
        if position != self._position:
            self._position, self._since_s = position, now_s
        self.place = place_of(frame)

    def still_s(self, now_s: float) -> float:
        """For how long it has been standing there, in seconds."""
        return now_s - self._since_s


def stacks_text(max_bytes: int = MAX_STACK_BYTES) -> str:
    """The Python stacks of all threads of this process but ours, the main thread first, each with its last call last."""
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
    """Where an exception was raised, in the same form."""
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
    """How many collectives and messages this process has started: of the default group, and of all; None without a group."""
    if not dist.is_initialized():
        return None
    default, total = 0, 0
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    for group in groups:
        try:
            number = int(group._get_sequence_number_for_group())
        except Exception:  # a backend that does not count, or a group that is being destroyed
            continue
        total += number
        default = number if group is dist.group.WORLD else default
    return default, total
