"""Show the output of workers line by line, each line with the worker's rank at that time, and write it to files if asked to.

See [Note: a reader that takes nothing] in ``writing``.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from guozhuang.compat.horovod.runner.elastic.writing import Writer
from guozhuang.errors import UsageError, explain
from guozhuang.launch.console.escapes import without_escapes
from guozhuang.launch.console.screen import Lines, mark
from guozhuang.launch.console.target import Target, is_same

_KEPT_LINES = 40  # the last lines of each worker that are kept for the report of a failure
_MAX_WAITING_BYTES = 1 << 20  # output of a worker kept per stream until it has a rank, and so a file


class Printing:
    """The output of all workers and of the driver: on the driver's standard output and error, and in files.

    Args:
        who: returns the name that stands before the lines of a worker without a rank, given its number.
        timestamps: put the time before each line that is shown.
        folder: the folder for ``rank.<rank>/stdout`` and ``stderr``; None: no files are written.
        most_ranks: the largest possible number of ranks; it sets the number of digits of <rank> in file names.
        shown: called in another thread with the number of bytes given to ``take`` that have been written.

    Raises:
        UsageError: the folder cannot be made.
    """

    def __init__(
        self,
        who: Callable[[int], str],
        timestamps: bool,
        folder: str | None,
        most_ranks: int,
        shown: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        self._who, self._timestamps = who, timestamps
        out = Target(1, is_queued=True)
        self._targets = {"stdout": out, "stderr": out if is_same(1, 2) else Target(2, is_queued=True)}
        self._lines: dict[tuple[int, str], Lines] = {}
        self._kept: dict[int, collections.deque[str]] = {}
        self._ranks: dict[int, int] = {}
        self._folder = None if folder is None else Path(folder)
        self._digits = len(str(max(most_ranks - 1, 0)))
        self._files: dict[tuple[str, str], FileIO] = {}
        self._waiting: dict[tuple[int, str], bytearray] = {}
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                what = f"--output-filename names a folder that cannot be made: {error.strerror}"
                raise UsageError(explain(what, value=folder, fix="give another path")) from error
        self._writer = Writer(list(dict.fromkeys(self._targets.values())), shown)

    def is_rank(self, worker: int, rank: int) -> None:
        """Use this rank for a worker from now on, and write its output so far to the rank's files."""
        self._ranks[worker] = rank
        for stream in self._targets:
            waiting = self._waiting.pop((worker, stream), None)
            if waiting:
                self._write(worker, stream, bytes(waiting))

    def take(self, worker: int, stream: str, data: bytes) -> None:
        """Take bytes that a worker wrote to "stdout" or "stderr"; they may begin and end inside a line."""
        self._write(worker, stream, data)
        self._show(worker, stream, self._lines.setdefault((worker, stream), Lines()).feed(data))
        self._writer.drawn(len(data))

    def ended(self, worker: int) -> None:
        """Show the unfinished last lines of a worker, which will write nothing more."""
        for stream in self._targets:
            lines = self._lines.pop((worker, stream), None)
            if lines is not None:
                self._show(worker, stream, lines.rest())
        self._writer.drawn()

    def forget(self, worker: int) -> None:
        """Drop the lines of a worker that were kept for ``last_lines``."""
        self._kept.pop(worker, None)

    def last_lines(self, worker: int, number: int) -> list[str]:
        """Return the last ``number`` lines that a worker printed."""
        return list(self._kept.get(worker, ()))[-number:]

    def say(self, text: str) -> None:
        """Show a text of the driver on standard error, never inside a line of a worker."""
        self._targets["stderr"].screen.lines(b"", [line.encode(errors="replace") for line in text.splitlines()])
        self._writer.drawn()

    def wait(self, limit_s: float) -> bool:
        """Wait until all output is written, ``limit_s`` seconds at most; return whether it is."""
        return self._writer.wait(limit_s)

    def close(self) -> None:
        """Write the output of workers that never got a rank to ``worker.<number>``, and close the files. Show nothing more."""
        self._writer.close()
        for (worker, stream), data in self._waiting.items():
            self._put(f"worker.{worker}", stream, bytes(data))
        for file in self._files.values():
            file.close()
        self._files, self._waiting = {}, {}

    def _show(self, worker: int, stream: str, lines: list[bytes]) -> None:
        if not lines:
            return
        kept = self._kept.setdefault(worker, collections.deque(maxlen=_KEPT_LINES))
        kept.extend(without_escapes(line).decode(errors="replace") for line in lines)
        target, rank = self._targets[stream], self._ranks.get(worker)
        before = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._timestamps else b""
        before += f"[{self._who(worker)}] ".encode() if rank is None else mark(rank, target.colour)
        target.screen.lines(before, lines)

    def _write(self, worker: int, stream: str, data: bytes) -> None:
        if self._folder is None:
            return
        rank = self._ranks.get(worker)
        if rank is not None:
            self._put(f"rank.{rank:0{self._digits}d}", stream, data)
            return
        waiting = self._waiting.setdefault((worker, stream), bytearray())
        waiting += data
        del waiting[:-_MAX_WAITING_BYTES]

    def _put(self, name: str, stream: str, data: bytes) -> None:
        """Append to a file. If that fails, report it once and write no more files: the workers must not wait for the disk."""
        if self._folder is None:
            return
        try:
            if (name, stream) not in self._files:
                (self._folder / name).mkdir(exist_ok=True)
                self._files[name, stream] = open(self._folder / name / stream, "wb", buffering=0)  # noqa: SIM115
            view = memoryview(data)
            while view:
                view = view[self._files[name, stream].write(view) or 0 :]
        except OSError as error:
            self.say(f"no more is written to {self._folder}: {error.strerror}")
            self._folder = None
