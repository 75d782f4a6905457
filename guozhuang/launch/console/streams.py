"""What a rank writes into: a named pipe; or, for rank 0 where its output is shown on a terminal, a terminal of its own.

[Note: the terminal of rank 0] Progress bars and colours are for programs that see a terminal, and fit its width. So rank 0
gets a pseudo terminal that is as many columns narrower as its mark takes, and follows the size of the real one.
- It is not the rank's controlling terminal, and its input is not connected: keys, Ctrl-C and job control stay with the
  terminal that the launcher was started on. The rank opens it, by its name (rank.py): opened by a launcher that leads a
  session and has no terminal, it would become the launcher's, and hang it up at the end.
- The launcher keeps the rank's side open too. What a rank wrote that was killed can then be read to its end.
- It changes nothing on the way (no "\\r\\n" for "\\n"): the real one does that.
- Standard input stays the real terminal, which some programs ask for the width (rich); they ask COLUMNS first.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import io
import itertools
import os
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from guozhuang.launch.console.escapes import rows_up, without_escapes
from guozhuang.launch.console.say import WHO, say
from guozhuang.launch.console.screen import Lines, Screen, mark

_KEPT_LINES = 400  # of each rank, for the report of a failure
_READ_BYTES = 65536
# An unfinished line of a rank whose output is shown by lines is shown all the same when it has stood for so long.
PATIENCE_S = 1.0
# And one of rank 0, whose progress bars are shown as they come: Python writes the parts of a line one by one, and lines of
# other ranks would come between them.
_LIVE_PATIENCE_S = 0.05
_SIZE = "HHHH"  # rows, columns, and both in pixels
_OUTPUT_FLAGS, _LOCAL_FLAGS = 1, 3  # places in what termios.tcgetattr returns
_numbers = itertools.count()


@dataclass
class Trace:
    """What was seen of one rank of the current attempt.

    Attributes:
        pid: of its process; 0 until it is known.
        ended: when the process ended, by the monotonic clock in seconds; None while it runs or where it cannot be seen.
        lines: when each of the last lines that it printed came, and the line, without colours.
    """

    pid: int = 0
    ended: float | None = None
    lines: collections.deque[tuple[float, str]] = field(default_factory=lambda: collections.deque(maxlen=_KEPT_LINES))


class NamedPipe:
    """A way from a rank to here, opened by its name."""

    def __init__(self, path: str) -> None:
        os.mkfifo(path, 0o600)
        self.path = path
        self.source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # An own end for writing: the pipe is never at its end, only empty, so that waiting for it costs nothing.
        self._own_end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    def close(self) -> None:
        """Give both ends back."""
        os.close(self.source)
        os.close(self._own_end)


class OwnTerminal:
    """The same as a terminal. See [Note: the terminal of rank 0].

    Args:
        real: descriptor of the terminal on which it is shown.
        indent: columns that are taken from it.

    Attributes:
        columns: that it has; 0 where the real one does not know them.

    Raises:
        OSError: the system has none left.
    """

    def __init__(self, real: int, indent: int) -> None:
        self._real, self._indent = real, indent
        self.source, self._own_end = os.openpty()
        try:
            self.path = os.ttyname(self._own_end)
            os.close(os.open(self.path, os.O_RDWR | os.O_NOCTTY))  # as the rank will do it
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
        """Take over the size of the real one.

        Raises:
            OSError: the real one has gone.
        """
        rows, columns, wide, high = struct.unpack(_SIZE, fcntl.ioctl(self._real, termios.TIOCGWINSZ, bytes(8)))
        self.columns = max(1, int(columns) - self._indent) if columns else 0
        fcntl.ioctl(self.source, termios.TIOCSWINSZ, struct.pack(_SIZE, rows, self.columns, wide, high))

    def close(self) -> None:
        """Give both ends back."""
        os.close(self.source)
        os.close(self._own_end)


def _opened(path: str) -> io.FileIO | None:
    """A file to add to; where that is impossible, it is said, and the rank is shown without a copy."""
    try:
        return io.FileIO(path, "ab")
    except OSError as error:
        _say_no_copy(path, error)
        return None


def _say_no_copy(path: str, error: OSError) -> None:
    say(f"no more of what a rank prints is written to {path}: {error.strerror}", within_s=PATIENCE_S)


class Stream:
    """One stream of a rank, or both: reads it, keeps its last lines, shows it.

    Args:
        way: what the rank writes into; it is closed with the stream.
        rank: its number in the world.
        trace: where lines are kept.
        screen: where they are shown; None: nowhere.
        colour: whether the mark is coloured.
        timestamps: put the time before each line; then rank 0 is shown by lines too.
        copy: a file to which all that comes is added; None: none.
    """

    def __init__(
        self,
        way: NamedPipe | OwnTerminal,
        rank: int,
        trace: Trace,
        screen: Screen | None,
        colour: bool,
        timestamps: bool = False,
        copy: str | None = None,
    ) -> None:
        self._way, self.source = way, way.source
        self._screen, self._mark = screen, mark(rank, colour)
        self._timestamps = timestamps
        self._is_live = rank == 0 and not timestamps
        self._copy = None if copy is None else _opened(copy)
        self._trace, self._lines = trace, Lines(moves=self._is_live)
        self.patience_s = _LIVE_PATIENCE_S if self._is_live else PATIENCE_S
        self._held = b""  # of a stream that is shown as it comes: the begin of a line, for a moment
        self._since = 0.0  # when what waits came
        self._is_closed = False
        self._number = next(_numbers)

    def read(self) -> bool:
        """Take what is there; False if nothing was."""
        if self._is_closed:
            return False  # the selector saw something before the other thread had read it all
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            return False
        self._surely(lambda: self._take_in(data))
        self._write_copy(data)
        return True

    def _write_copy(self, data: bytes) -> None:
        """Add to the file; where that is impossible, say so once and go on: the ranks must not wait for it."""
        if self._copy is None:
            return
        try:
            while data:
                data = data[self._copy.write(data) or 0 :]
        except OSError as error:
            file, self._copy = self._copy, None
            with contextlib.suppress(OSError):
                file.close()
            _say_no_copy(str(file.name), error)

    def _surely(self, what: Callable[[], None]) -> None:
        """Do it; a mistake in it must not keep the others' pipes, and this one, from being read: the ranks would hang."""
        try:
            what()
        except Exception as error:
            self._lines, self._held = Lines(moves=self._is_live), b""
            if self._screen is not None:
                text = f"{WHO}: no more is shown of what this rank prints there: {type(error).__name__}: {error}"
                self._screen.lines(self._mark, [text.encode(errors="replace")])
                self._screen = None

    def _take_in(self, data: bytes) -> None:
        if not self.is_waiting or not self._is_live:
            self._since = time.monotonic()
        self._take(self._lines.feed(data))
        if self._screen is not None and self._is_live:
            whole, end, self._held = (self._held + data).rpartition(b"\n")
            if b"\r" in self._held or b"\x1b" in self._held:  # a drawing, not the begin of a line
                whole, end, self._held = whole + end, self._held, b""
            if end:
                self._screen.live(self._number, self._mark, whole + end)
                self._since = time.monotonic()

    def _take(self, lines: Sequence[bytes]) -> None:
        now = time.monotonic()
        for line in lines:
            # Of several lines that are drawn over again and again, one state is kept.
            for _ in range(min(rows_up(line) if self._is_live else 0, len(self._trace.lines))):
                self._trace.lines.pop()
            self._trace.lines.append((now, without_escapes(line).decode(errors="replace")))
        if self._screen is not None and not self._is_live:
            self._screen.lines(self._stamp() + self._mark, lines)

    def _stamp(self) -> bytes:
        return time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._timestamps else b""

    @property
    def is_waiting(self) -> bool:
        """Whether an unfinished line stands here."""
        return bool(self._held) if self._is_live else self._lines.is_waiting()

    def show_what_waits(self) -> None:
        """Show an unfinished line that has stood long enough."""
        if self.is_waiting and time.monotonic() > self._since + self.patience_s:
            self._surely(self._show)

    def _show(self) -> None:
        if not self._is_live:
            self._take(self._lines.rest())
        elif self._screen is not None:
            self._screen.live(self._number, self._mark, self._held)
            self._held = b""

    def finish(self) -> None:
        """Show what is left, and give the descriptors back. Once is enough."""
        if self._is_closed:
            return
        if self._is_live and self._held:
            self._surely(self._show)
        self._surely(lambda: self._take(self._lines.rest()))
        self._is_closed = True
        self._way.close()
        if self._copy is not None:
            try:
                self._copy.close()  # a disk over a network may say only now that it is full
            except OSError as error:
                _say_no_copy(str(self._copy.name), error)

    def resize(self) -> None:
        """The size of the terminal has changed."""
        if isinstance(self._way, OwnTerminal):
            with contextlib.suppress(OSError):  # it has gone, and the ranks are about to be told
                self._way.resize()
            if self._trace.pid and self._trace.ended is None:
                with contextlib.suppress(OSError):
                    os.kill(self._trace.pid, signal.SIGWINCH)  # the kernel tells only those whose controlling one it is
