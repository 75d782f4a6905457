"""Append the output of ranks to files in a thread of its own.

[Note: slow disks] A rank waits while nobody reads the pipe that it prints into. So the thread that reads the pipes must never
wait for a disk: a file system over a network may take minutes for a write. It hands the bytes over to the thread of this
module, which keeps up to ``_MAX_WAITING_BYTES``. Further bytes are dropped; the file says how many, and the user is told once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import queue
import threading
from collections.abc import Callable

from guozhuang.launch.console.lines import PATIENCE_S
from guozhuang.launch.console.say import say

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or a user's part of it, that is full
_MAX_WAITING_BYTES = 64 << 20
_DISK_S = 5.0  # seconds; a disk that took nothing for so long is not waited for at the end of a run
_KEPT_BYTES = 1 << 20  # how many of a stream's last bytes are kept until the file for its copy is known


class Copies:
    """The thread that writes the copies of all ranks of a node. It starts with the first job; ``close`` ends it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()  # join() cannot tell after it was interrupted, see ``Output.end``
        self._lock = threading.Lock()  # guards the thread's start and the number below
        self._num_waiting_bytes = 0

    def submit(self, job: Callable[[], None], num_bytes: int = 0) -> bool:
        """Have the thread call ``job``, which must not raise; return False if too many bytes wait already."""
        with self._lock:
            if num_bytes and self._num_waiting_bytes + num_bytes > _MAX_WAITING_BYTES:
                return False
            self._num_waiting_bytes += num_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="guozhuang copies", daemon=True)
                self._thread.start()
        self._jobs.put((job, num_bytes))
        return True

    def close(self, limit_s: float | None) -> None:
        """Write the rest, and end the thread; print how much is not written if the disk does not take it.

        Args:
            limit_s: how long to wait, in seconds; None: as long as the disk takes anything within 5 s.
        """
        if self._thread is None:
            return
        self._jobs.put(None)
        before = -1
        while not self._has_ended.is_set() and before != self._num_waiting_bytes:
            before = self._num_waiting_bytes
            self._has_ended.wait(_DISK_S if limit_s is None else limit_s)
            if limit_s is not None:
                break
        if not self._has_ended.is_set() and self._num_waiting_bytes:
            what = f"the last {self._num_waiting_bytes} bytes that ranks printed are not written to their files"
            say(f"{what}: the disk does not take them", within_s=PATIENCE_S)

    def _run(self) -> None:
        while (found := self._jobs.get()) is not None:
            job, num_bytes = found
            job()
            with self._lock:
                self._num_waiting_bytes -= num_bytes
        self._has_ended.set()


class Copy:
    """A file to which the output of a rank is appended. One thread at a time may call its methods; none of them waits.

    A full disk may have room again later: the number of bytes that were lost until then stands in the file. After other errors
    nothing more is written. Either is printed once, and never keeps the rank from going on.

    Args:
        copies: the thread that writes.
        path: the file; "": ``move`` gives it later.
        title: a line to begin with if the file has something in it already; "" for none.
    """

    def __init__(self, copies: Copies, path: str, title: str = "") -> None:
        self._copies, self._num_dropped = copies, 0
        # Only the thread that writes changes these: the path, the file, whether to open it (again) for the next bytes, what was
        # printed before the path was known, and the loss since the last bytes that the disk took.
        self._path, self._num_lost = path, 0
        self._file: io.FileIO | None = None
        self._opens = False
        self._early: bytearray | None = bytearray()
        self._told: set[str] = set()  # what was printed for the user; ``write`` and the thread that writes add to it
        if path:
            copies.submit(functools.partial(self._open, path, title))

    def write(self, data: bytes) -> None:
        """Append bytes."""
        if self._copies.submit(functools.partial(self._append, data, self._num_dropped), len(data)):
            self._num_dropped = 0
            return
        self._num_dropped += len(data)
        self._tell("the disk takes it too slowly; the rank goes on, and its output is written again later")

    def move(self, path: str) -> None:
        """Append to another file from now on; if this is the first one, it gets what was written before (the last MiB)."""
        self._copies.submit(functools.partial(self._open, path, ""))

    def close(self) -> None:
        """Close the file after all that was written to it."""
        self._copies.submit(functools.partial(self._append, b"", self._num_dropped))
        self._copies.submit(self._close)

    def _open(self, path: str, title: str) -> None:
        self._close()
        self._path, self._opens = path, True
        early, self._early = self._early, None
        has_content = False
        with contextlib.suppress(OSError):
            has_content = os.stat(path).st_size > 0
        self._append((title.encode() if has_content else b"") + bytes(early or b""), 0)

    def _append(self, data: bytes, num_dropped: int) -> None:
        self._num_lost += num_dropped
        if self._early is not None:
            self._early += data
            del self._early[:-_KEPT_BYTES]
        try:
            if self._file is None and self._opens:
                self._file = io.FileIO(self._path, "ab")
            if self._file is None:
                return
            if self._num_lost:
                self._file.write(f"\n--- {self._num_lost} bytes were lost here: the disk was full or slow\n".encode())
                self._num_lost = 0
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            if error.errno in FULL:
                self._num_lost += len(data)
            else:
                self._close()
            self._tell_error(error)

    def _close(self) -> None:
        file, self._file, self._opens = self._file, None, False
        try:
            if file is not None:
                file.close()
        except OSError as error:  # a file system over a network may report a full disk only now
            self._tell_error(error)

    def _tell_error(self, error: OSError) -> None:
        is_full = error.errno in FULL
        more = "; the rank goes on, and its output is written again where there is room" if is_full else ""
        self._tell(f"{error.strerror}{more}")

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            say(f"no more of what a rank prints is written to {self._path}: {why}", within_s=PATIENCE_S)
