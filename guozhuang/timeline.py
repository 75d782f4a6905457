"""Spans and instants of training steps, written as a Chrome trace that Perfetto opens.

Code that can be recorded holds ``timeline: Timeline | None`` and tests ``if timeline is not None``: off costs one comparison.
A timeline never synchronizes a device: on an accelerator a span covers the launch of work, not its end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import UsageError, explain

_LOG = logging.getLogger("guozhuang")
_CLOSING: Final = b"\n]\n"


@dataclass(frozen=True, slots=True)
class Span:
    """A recorded activity, which lasted from ``start_ns`` to ``end_ns`` (monotonic clock); a viewer shows it on ``track``."""

    name: str
    track: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Instant:
    """A recorded event without a duration, at ``at_ns`` on the monotonic clock; a viewer shows it on ``track``."""

    name: str
    track: str
    at_ns: int
    args: dict[str, Any]


class Timeline:
    """Records the spans and instants of one rank.

    Appending is safe from several threads (a list append is one step under the interpreter's lock).

    Args:
        rank: this process's rank; it is the process number in the trace, so that a viewer shows ranks one below the other.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[Span | Instant] = []

    @staticmethod
    def now() -> int:
        """Return nanoseconds on the monotonic clock, which all processes of one node share."""
        return time.monotonic_ns()

    def add(self, name: str, track: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Record a span whose start and end were read with :meth:`now`."""
        self.events.append(Span(name, track, start_ns, end_ns, args))

    def mark(self, name: str, track: str, at_ns: int | None = None, **args: Any) -> None:
        """Record an instant: the present one, or ``at_ns``, which was read with :meth:`now`."""
        self.events.append(Instant(name, track, self.now() if at_ns is None else at_ns, args))

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[None]:
        """Record the time that the body of the ``with`` statement took, also if it raises."""
        start_ns = self.now()
        try:
            yield
        finally:
            self.add(name, track, start_ns, self.now(), **args)

    def spans(self, name: str) -> list[Span]:
        """Return the recorded spans of that name, in the order in which they ended."""
        return [event for event in self.events if isinstance(event, Span) and event.name == name]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write this rank's events as a Chrome trace; the file appears complete or not at all."""
        _write_trace(Path(path), self._trace_events())

    def _trace_events(self) -> list[dict[str, Any]]:
        tracks = {track: i for i, track in enumerate(dict.fromkeys(event.track for event in self.events))}
        names = [_name_event("process_name", self.rank, 0, f"rank {self.rank}")]
        names += [_name_event("thread_name", self.rank, i, track) for track, i in tracks.items()]
        body = [_trace_event(event, self.rank, tracks[event.track]) for event in self.events]
        body.sort(key=lambda e: float(e["ts"]))
        return names + body


class TraceStream:
    """A trace file to which each event is written at once, for programs that may end at any time.

    Each track is a process of the trace. The file is one JSON array that is complete at every moment: each write replaces the
    closing bracket by an event and a bracket. If a write fails, on a full disk for example, the file ends there and the program
    continues. Any thread may call the methods.

    Args:
        path: the file, whose old contents are replaced.

    Attributes:
        path: path of the file.
        is_on: whether events are still written.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path, self.is_on = path, True
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        data = b"[\n" + json.dumps({"name": "clock", "ph": "M", "pid": 0, "tid": 0, "args": began}).encode()
        self._file, self._end = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 0
        try:
            self._append(data)
        except OSError:
            os.close(self._file)
            raise

    def record(self, event: Span | Instant) -> None:
        """Write an event to the file; do nothing if the file was closed, or an earlier write failed."""
        with self._lock:
            if not self.is_on:
                return
            lines = []
            if event.track not in self._numbers:
                self._numbers[event.track] = len(self._numbers) + 1
                lines.append(_name_event("process_name", self._numbers[event.track], 0, event.track))
            lines.append(_trace_event(event, self._numbers[event.track], 0))
            try:
                self._append(b"".join(b",\n" + json.dumps(line).encode() for line in lines))
            except OSError as error:
                _LOG.warning("the timeline %s ends here: %s", self.path, error)
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._end)
                    os.pwrite(self._file, _CLOSING, self._end)
                self._close()

    def close(self) -> None:
        """End the file; later events are dropped."""
        with self._lock:
            if self.is_on:
                self._close()

    def _append(self, data: bytes) -> None:
        if os.pwrite(self._file, data + _CLOSING, self._end) < len(data + _CLOSING):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += len(data)

    def _close(self) -> None:
        self.is_on = False
        os.close(self._file)


def merge(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Join the traces of several ranks of one node into one file.

    Raises:
        UsageError: a file is missing or is no trace.
    """
    events: list[dict[str, Any]] = []
    for path in paths:
        try:
            events += json.loads(Path(path).read_text())["traceEvents"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                explain(
                    f"no trace can be read from a rank's file: {error}",
                    value=str(path),
                    fix="look for that rank's own error",
                )
            ) from error
    _write_trace(Path(out), events)


def _trace_event(event: Span | Instant, pid: int, tid: int) -> dict[str, Any]:
    place = {"name": event.name, "pid": pid, "tid": tid, "args": event.args}
    if isinstance(event, Span):  # the format's unit is the microsecond
        return {**place, "ph": "X", "ts": event.start_ns / 1e3, "dur": (event.end_ns - event.start_ns) / 1e3}
    return {**place, "ph": "i", "s": "t", "ts": event.at_ns / 1e3}


def _name_event(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _write_trace(path: Path, events: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
