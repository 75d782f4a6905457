"""What the world's rank 0 saw of each operation, as a Chrome trace: how long it was negotiated, how long it ran.

The file is one JSON array that is complete at every moment: what comes replaces the closing bracket, together with a new one.
Where it cannot be written any further, on a full disk say, it ends; the job goes on.
Each name is a process of the trace. An operation is a span NEGOTIATE_ALLREDUCE (from its submission on this rank until all
ranks had it; so by kind) and then a span ALLREDUCE. CYCLE_START marks the beginning of a round, if asked for.
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
    """The timeline of an engine; on or off at any time. Its methods may be called from any thread.

    Args:
        writes: whether this rank writes; the others only keep count of what was started.

    Attributes:
        is_on: whether anything is recorded here.
        marks_cycles: whether rounds are.
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
        """Begin a file; what is there already is replaced.

        Raises:
            UsageError: a timeline is being written.
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
        """End the file; without one nothing happens."""
        with self._lock:
            self.is_on = self.marks_cycles = False
            self._path = None
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def round_began(self, at_s: float) -> None:
        """Mark the beginning of a round."""
        if self.marks_cycles:
            self._add([(_CYCLES, {"name": "CYCLE_START", "ph": "i", "s": "p", "ts": at_s * 1e6})])

    def negotiated(self, kind: Kind, since_s: Sequence[tuple[str, float]], until_s: float) -> None:
        """Record how long operations were negotiated: names, and since when."""
        name = f"NEGOTIATE_{kind.name}"
        self._add((of, _span(name, since, until_s)) for of, since in since_s)

    def carried_out(self, kind: Kind, names: Sequence[str], since_s: float, until_s: float) -> None:
        """Record how long operations ran."""
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
        """Append; where that fails, end the file with what was there, and go on without it."""
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
