"""Read the new lines of a log file that a rank writes by itself."""

from __future__ import annotations

import contextlib
import os

from guozhuang.launch.console.escapes import without_escapes
from guozhuang.launch.console.screen import Lines

_MAX_BYTES = 1 << 17  # at most so many of the newest bytes are read; a report needs only the last lines


class LogFile:
    """A reader of the lines that are added to a file, which need not exist yet.

    Args:
        path: the file.
        skipped: a first line with this prefix is skipped, because rank.py and not the rank wrote it.
        whole: whether lines that are already in the file count as new.
    """

    def __init__(self, path: str, skipped: bytes = b"", whole: bool = False) -> None:
        self._path, self._skipped = path, skipped
        self._file = -1
        self._lines = Lines()
        self._offset = 0
        with contextlib.suppress(OSError):
            self._offset = 0 if whole else os.stat(path).st_size

    def read(self) -> list[str]:
        """Return the whole lines that were added since the last call."""
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._file).st_size
            if size < self._offset:
                self._offset = 0  # the file was truncated
            if size == self._offset:
                return []
            if size - self._offset > _MAX_BYTES:
                self._lines.rest()
                self._offset = size - _MAX_BYTES
            data = os.pread(self._file, size - self._offset, self._offset)
        except OSError:
            return []
        self._offset += len(data)
        return self._texts(self._lines.feed(data))

    def finish(self) -> list[str]:
        """Return the new lines, including an unfinished one, and close the file."""
        lines = self.read() + self._texts(self._lines.rest())
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        return lines

    def _texts(self, lines: list[bytes]) -> list[str]:
        if self._skipped and lines:
            lines = lines[lines[0].startswith(self._skipped) :]
            self._skipped = b""
        return [without_escapes(line).decode(errors="replace") for line in lines]
