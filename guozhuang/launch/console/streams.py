"""Read a rank's output from a named pipe; from a pseudo terminal for rank 0, if its output is shown on a terminal.

[Note: the terminal of rank 0] Programs draw progress bars and colours only on a terminal, and in its width. So rank 0 gets a
pseudo terminal that is narrower than the real one by the columns of its mark, and follows the size of the real one.
- It is not the rank's controlling terminal, and its input is not connected: keys, Ctrl-C and job control stay with the
  terminal that the launcher was started on. The rank opens it by its name (rank.py): if a launcher that leads a session
  without a terminal opened it, it would become the launcher's controlling terminal, and send it SIGHUP at the end.
- The launcher keeps the rank's side open too, so that the output of a killed rank can be read to its end.
- The pseudo terminal passes bytes on unchanged (no "\\r\\n" for "\\n"), because the real terminal converts them.
- Standard input stays the real terminal. Some programs (rich) ask it for the width, but read COLUMNS first, which is set.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import re
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from guozhuang.launch.console.copies import Copy
from guozhuang.launch.console.escapes import rows_up, without_escapes
from guozhuang.launch.console.lines import Lines, LiveText, WholeLines
from guozhuang.launch.console.say import WHO
from guozhuang.launch.console.screen import Screen, mark
from guozhuang.launch.tracebacks import CHAINED

# At most this many of a log file's newest bytes are read at once, because a report needs only the last lines.
_MAX_FOLLOWED_BYTES = 1 << 17
_KEPT_LINES = 400  # how many of a rank's last lines are kept for the report of a failure
_READ_BYTES = 65536
_SIZE = "HHHH"  # format of a terminal's size (struct winsize): rows, columns, width and height in pixels
_TRACEBACK = b"Traceback (most recent call last):"
_AMONG_TRACEBACKS = (b"", _TRACEBACK, *(text.encode() for text in CHAINED))
_IMPORT_OF_TORCH = re.compile(rb'  File ".*/(?:site|dist)-packages/torch/.*", line \d+, in <module>')
_OUTPUT_FLAGS, _LOCAL_FLAGS = 1, 3  # indices into the list that termios.tcgetattr returns


@dataclass
class LastOutput:
    """The process id, end and last lines of one rank in the current attempt.

    Attributes:
        pid: id of its process; 0 until it is known.
        ended: when the process ended, by the monotonic clock in seconds; None while it runs, or if there is no pidfd.
        lines: the rank's last lines without escape sequences, each with the time at which it was read.
    """

    pid: int = 0
    ended: float | None = None
    lines: collections.deque[tuple[float, str]] = field(default_factory=lambda: collections.deque(maxlen=_KEPT_LINES))

    def keep(self, lines: Sequence[bytes], draws: bool = False) -> None:
        """Add lines, with the current time, and drop the oldest if there are too many.

        Args:
            lines: without line ends.
            draws: whether a line that moves the cursor up is drawn over earlier lines, which are removed then.
        """
        now = time.monotonic()
        for line in lines[-_KEPT_LINES:]:
            for _ in range(min(rows_up(line) if draws else 0, len(self.lines))):
                self.lines.pop()
            self.lines.append((now, without_escapes(line).decode(errors="replace")))


class NamedPipe:
    """A named pipe into which a rank writes, and from which the agent reads."""

    def __init__(self, path: str) -> None:
        os.mkfifo(path, 0o600)
        self.path = path
        self.source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # While the agent holds a writing end, the pipe is never at end-of-file, only empty, so select() can wait for it.
        self._own_end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    def close(self) -> None:
        """Close both ends."""
        os.close(self.source)
        os.close(self._own_end)


class OwnTerminal:
    """A pseudo terminal on which a rank writes, and from which the agent reads. See [Note: the terminal of rank 0].

    Args:
        real: descriptor of the real terminal, on which the output is shown.
        indent: number of columns by which the pseudo terminal is narrower than the real one.

    Attributes:
        columns: width of the pseudo terminal in columns; 0 if the real one does not report a width.

    Raises:
        OSError: the system has no pseudo terminal left.
    """

    def __init__(self, real: int, indent: int) -> None:
        self._real, self._indent = real, indent
        self.source, self._own_end = os.openpty()
        try:
            self.path = os.ttyname(self._own_end)
            os.close(os.open(self.path, os.O_RDWR | os.O_NOCTTY))  # test that the rank can open the terminal by path
            attributes = termios.tcgetattr(self._own_end)
            attributes[_OUTPUT_FLAGS] &= ~termios.OPOST
            attributes[_LOCAL_FLAGS] &= ~termios.ECHO
            termios.tcsetattr(self._own_end, termios.TCSANOW, attributes)
            os.set_blocking(self.source, False)
            self.resize()
        except (OSError, termios.error) as error:
            self.close()
            raise OSError(str(error)) from error

    def resize(self) -> None:
        """Give the pseudo terminal the size of the real one, less the indent.

        Raises:
            OSError: the real terminal has been closed.
        """
        rows, columns, wide, high = struct.unpack(_SIZE, fcntl.ioctl(self._real, termios.TIOCGWINSZ, bytes(8)))
        self.columns = max(1, int(columns) - self._indent) if columns else 0
        fcntl.ioctl(self.source, termios.TIOCSWINSZ, struct.pack(_SIZE, rows, self.columns, wide, high))

    def close(self) -> None:
        """Close both ends."""
        os.close(self.source)
        os.close(self._own_end)


class _WithoutImports:
    """Leaves out of a rank's lines the traceback of a KeyboardInterrupt that came while the rank imported torch.

    Such a traceback tells nothing of the training. It is recognised by a line of a module of torch, outside of any function.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []  # a traceback, with those that it is chained to, so far
        self._exception = b""  # the exception that ended the last one of them; empty in its middle

    def feed(self, lines: Sequence[bytes]) -> list[bytes]:
        """Return those of these lines, and of the traceback so far, that are to be shown now."""
        shown: list[bytes] = []
        for line in lines:
            if self._exception and line not in _AMONG_TRACEBACKS:
                shown += self.rest()
            if not self._held and line != _TRACEBACK:
                shown.append(line)
                continue
            self._held.append(line)
            if line == _TRACEBACK:
                self._exception = b""
            elif not self._exception and not line.startswith(b" "):
                self._exception = line
        return shown

    def rest(self) -> list[bytes]:
        """Return the traceback so far, unless it is one to leave out, and forget it."""
        held, self._held, exception, self._exception = self._held, [], self._exception, b""
        is_import = exception == b"KeyboardInterrupt" and any(map(_IMPORT_OF_TORCH.fullmatch, held))
        return [] if is_import else held


class Stream:
    """Reads standard output or standard error of a rank, or both through one pipe; keeps the last lines and shows all lines.

    Args:
        way: the pipe or terminal that the rank writes into; ``finish`` closes it.
        rank: its number in the world; a text names a process without a rank, which is shown by whole lines.
        trace: keeps the last lines.
        screen: shows the lines; None: they are not shown.
        colour: whether the mark is coloured.
        timestamps: whether to put the time before each line; rank 0 is then shown by whole lines, like other ranks.
        copy: gets all output too; None: no copy.
    """

    def __init__(
        self,
        way: NamedPipe | OwnTerminal,
        rank: int | str,
        trace: LastOutput,
        screen: Screen | None,
        colour: bool,
        timestamps: bool = False,
        copy: Copy | None = None,
    ) -> None:
        self._way, self.source = way, way.source
        self._screen, self._colour = screen, colour
        self._draws = rank == 0 and not timestamps  # whether the stream may draw over earlier lines
        self._shown: LiveText | WholeLines | None = None
        if screen is not None:
            prefix = mark(rank, colour)
            self._shown = LiveText(screen, prefix) if self._draws else WholeLines(screen, prefix, timestamps)
        self._trace, self._lines, self._copy = trace, Lines(moves=self._draws), copy
        self._is_closed = False
        self._without_imports: _WithoutImports | None = None

    def read(self) -> bool:
        """Read the bytes that the rank has written so far, keep and show them; return False if there were none."""
        if self._is_closed:
            return False  # after the selector reported the stream, another thread read the rest and closed it
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            return False
        self._surely(lambda: self._take_in(data))
        if self._copy is not None:
            self._copy.write(data)
        return True

    def rename(self, rank: int | str, copy: str | None) -> None:
        """Show further lines under this rank or name; ``copy``, if given, is the file that gets the output from now on."""
        if self._shown is not None:
            self._shown.mark = mark(rank, self._colour)
        if self._copy is not None and copy is not None:
            self._copy.move(copy)

    def _surely(self, what: Callable[[], None]) -> None:
        """Call ``what``, and on an exception stop showing this stream: its pipe must still be read, or the rank would hang."""
        try:
            what()
        except Exception as error:
            self._lines, shown, self._shown = Lines(), self._shown, None
            if shown is not None and self._screen is not None:
                text = f"{WHO}: no more is shown of what this rank prints there: {type(error).__name__}: {error}"
                with contextlib.suppress(Exception):  # the screen itself may be what fails
                    self._screen.lines(shown.mark, [text.encode(errors="replace")])

    def interrupted(self) -> None:
        """Leave out tracebacks of Ctrl-C during an import of torch from now on, and show further output by whole lines."""
        if self._without_imports is None:
            self._surely(self._show_the_rest)
            self._without_imports = _WithoutImports()

    def _take_in(self, data: bytes) -> None:
        self._keep(self._lines.feed(data))
        if self._shown is not None and self._without_imports is None:
            self._shown.feed(data)

    def _show_the_rest(self) -> None:
        self._keep(self._lines.rest())
        if self._shown is not None:
            if self._without_imports is not None:
                self._shown.feed(b"".join(line + b"\n" for line in self._without_imports.rest()))
            self._shown.finish()

    def _keep(self, lines: Sequence[bytes]) -> None:
        self._trace.keep(lines, self._draws)
        if self._shown is not None and self._without_imports is not None:
            self._shown.feed(b"".join(line + b"\n" for line in self._without_imports.feed(lines)))

    @property
    def patience_s(self) -> float | None:
        """Return how long the unfinished line that is held back may wait, in seconds; None: no line is held back."""
        return self._shown.patience_s if self._shown is not None and self._shown.is_waiting else None

    def show_what_waits(self) -> None:
        """Show the unfinished line if it has been held back for ``patience_s`` seconds."""
        if self._shown is not None:
            self._surely(self._shown.show_what_waits)

    def finish(self) -> None:
        """Show the remaining output, and close the descriptors. Further calls do nothing."""
        if self._is_closed:
            return
        self._surely(self._show_the_rest)
        self._is_closed = True
        self._way.close()
        if self._copy is not None:
            self._copy.close()

    def resize(self) -> None:
        """Pass a change of the real terminal's size on to the rank."""
        if isinstance(self._way, OwnTerminal):
            with contextlib.suppress(OSError):  # the call fails if the real terminal has been closed
                self._way.resize()
            if self._trace.pid and self._trace.ended is None:
                with contextlib.suppress(OSError):
                    # The kernel sends SIGWINCH only for a controlling terminal, which this one is not.
                    os.kill(self._trace.pid, signal.SIGWINCH)


class LogFile:
    """A reader of the lines that are appended to a log file, which need not exist yet.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = -1
        self._lines = Lines()
        self._offset = 0

    def read(self) -> list[bytes]:
        """Return the whole lines that were added since the last call."""
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._file).st_size
            if size < self._offset:
                self._offset = 0  # the file was truncated: read it from its start
            if size == self._offset:
                return []
            if size - self._offset > _MAX_FOLLOWED_BYTES:
                self._lines.rest()
                self._offset = size - _MAX_FOLLOWED_BYTES
            data = os.pread(self._file, size - self._offset, self._offset)
        except OSError:
            return []
        self._offset += len(data)
        return self._lines.feed(data)

    def finish(self) -> list[bytes]:
        """Return the new lines, including an unfinished one, and close the file."""
        lines = self.read() + self._lines.rest()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        return lines
