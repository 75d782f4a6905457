"""Spans and instants of training steps, written as a Chrome trace that Perfetto opens.

Code that can be recorded holds ``timeline: Timeline | None`` and tests ``if timeline is not None``: off costs one comparison.
A timeline never synchronizes a device: on an accelerator a span covers the launch of work, not its end.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError, explain


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time: it lasted from ``start_ns`` to ``end_ns`` (monotonic clock), on a track."""

    name: str
    track: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Instant:
    """Something that happened at one moment: ``at_ns`` on the monotonic clock, on a track."""

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
        body: list[dict[str, Any]] = []
        for event in self.events:
            place = {"name": event.name, "pid": self.rank, "tid": tracks[event.track], "args": event.args}
            if isinstance(event, Span):  # the format's unit is the microsecond
                body.append(
                    {**place, "ph": "X", "ts": event.start_ns / 1e3, "dur": (event.end_ns - event.start_ns) / 1e3}
                )
            else:
                body.append({**place, "ph": "i", "s": "t", "ts": event.at_ns / 1e3})
        body.sort(key=lambda e: float(e["ts"]))
        return names + body


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
