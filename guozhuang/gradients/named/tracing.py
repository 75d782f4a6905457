"""Writes a Chrome trace on rank 0 that shows how long each operation was negotiated and how long it ran.

The file is one JSON array that is complete at every moment: each write replaces the closing bracket by events and a bracket.
If a write fails, on a full disk for example, the file ends there and the job continues.
Each name is a process of the trace. An all-reduce is a span NEGOTIATE_ALLREDUCE (from its submission on this rank until all
ranks had submitted it) and then a span ALLREDUCE; other kinds likewise. CYCLE_START marks the beginning of a round, on request.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ...errors import UsageError, explain
from .submission import Kind

_LOG = logging.getLogger("guozhuang")
_CYCLES: Final = "cycles"
_END: Final = b"\n]\n"


class Tracing:
    """The timeline of an engine, which may be started and stopped repeatedly. Any thread may call its methods.

    Args:
        writes: whether this rank writes the file; other ranks only check that a timeline is not started twice.

    Attributes:
        is_on: whether operations are recorded on this rank.
        marks_cycles: whether the beginnings of rounds are recorded, too.
    """

    def __init__(self, writes: bool) -> None:
        self._writes = writes
        self._lock = threading.Lock()
        self._path: str | None = None
        self._file = -1
        self._end = 0
        self._numbers: dict[str, int] = {}
        self.is_on = self.marks_cycles = False

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a timeline in a file, whose old contents are replaced.

        Raises:
            UsageError: a timeline is being written already.
            OSError: the file cannot be written.
        """
        with self._lock:
            if self._path is not None:
                fix = "stop it first"
                raise UsageError(explain(f"a timeline is being written to {self._path!r}", value=path, fix=fix))
            if self._writes:
                self._numbers = {}
                began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
                first = {"name": "clock", "ph": "M", "pid": 0, "tid": 0, "args": began}
                data = b"[\n" + json.dumps(first).encode()
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                try:
                    os.pwrite(file, data + _END, 0)
                except OSError:
                    os.close(file)
                    raise
                self._file, self._end = file, len(data)
            self._path = path
            self.is_on, self.marks_cycles = self._writes, self._writes and mark_cycles

    def stop(self) -> None:
        """End the timeline; do nothing if none is being written."""
        with self._lock:
            self.is_on = self.marks_cycles = False
            self._path = None
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def round_began(self, at_s: float) -> None:
        """Record the beginning of a round, if rounds are recorded."""
        if self.marks_cycles:
            self._add([(_CYCLES, {"name": "CYCLE_START", "ph": "i", "s": "p", "ts": at_s * 1e6})])

    def negotiated(self, kind: Kind, since_s: Sequence[tuple[str, float]], until_s: float) -> None:
        """Record how long operations were negotiated; ``since_s`` holds pairs of a name and the time of its submission."""
        name = f"NEGOTIATE_{kind.name}"
        self._add((of, _span(name, since, until_s)) for of, since in since_s)

    def carried_out(self, kind: Kind, names: Sequence[str], since_s: float, until_s: float) -> None:
        """Record the beginning and end of operations that were carried out together."""
        self._add((of, _span(kind.name, since_s, until_s)) for of in names)

    def _add(self, events: Iterable[tuple[str, dict[str, Any]]]) -> None:
        with self._lock:
            if self._file < 0:
                return
            lines = []
            for of, event in events:
                number = self._numbers.get(of)
                if number is None:
                    number = self._numbers[of] = len(self._numbers) + 1
                    lines.append({"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": of}})
                lines.append({**event, "pid": number, "tid": 0})
            if lines:
                self._write(b"".join(b",\n" + json.dumps(line).encode() for line in lines))

    def _write(self, data: bytes) -> None:
        """Append events to the file; if that fails, end the file with the earlier events and stop recording."""
        try:
            if os.pwrite(self._file, data + _END, self._end) < len(data + _END):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end += len(data)
        except OSError as error:
            _LOG.warning("the timeline %s ends here: %s", self._path, error)
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
                os.pwrite(self._file, _END, self._end)
            self.is_on = self.marks_cycles = False
            os.close(self._file)
            self._file = -1


def _span(name: str, since_s: float, until_s: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": since_s * 1e6, "dur": max(0.0, until_s - since_s) * 1e6}
