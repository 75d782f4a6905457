"""Reading a log file that a rank writes by itself."""

from __future__ import annotations

import contextlib
import os

from guozhuang.launch.console.escapes import without_escapes
from guozhuang.launch.console.screen import Lines

_MAX_BYTES = 1 << 17  # of what is new; before that nothing is of interest for a report


class LogFile:
    """What is new in a file since this was made; it need not exist yet.

    Args:
        path: the file.
        skipped: how a first line begins that the rank did not write.
        whole: what is there already is new too.
    """

    def __init__(self, path: str, skipped: bytes = b"", whole: bool = False) -> None:
        self._path, self._skipped = path, skipped
        self._file = -1
        self._lines = Lines()
        self._offset = 0
        with contextlib.suppress(OSError):
            self._offset = 0 if whole else os.stat(path).st_size

    def read(self) -> list[str]:
        """The whole lines that are new."""
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._file).st_size
            if size < self._offset:
                self._offset = 0  # somebody emptied it
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
        """All that is new, also without the end of a line. The file is closed."""
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
