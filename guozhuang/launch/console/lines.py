"""Cut the output of a stream into lines, and decide when it is shown: by whole lines, or as it arrives."""

from __future__ import annotations

import time
from collections.abc import Sequence

from guozhuang.launch.console.escapes import is_plain_begin, rows_up
from guozhuang.launch.console.screen import Screen

# Maximum bytes of a line; a longer line is passed on in pieces, so that memory stays bounded whatever a rank writes.
MAX_LINE = 65536
_MAX_DRAWN = 4096  # bytes; a longer unfinished line with carriage returns is reduced to its last state
# An unfinished line of a rank is held back until nothing was added to it for so many seconds; then it is shown.
PATIENCE_S = 1.0
# Seconds for which the beginning of a line of rank 0 is held back, whose output is shown as it arrives. Python writes a line in
# several parts, and a pipe may cut a line anywhere: without this delay lines of other ranks would come between the parts.
_LIVE_PATIENCE_S = 0.05


class Lines:
    """Cuts the output of a rank into lines. Of a line that was overwritten after a carriage return only the last state is kept.

    Args:
        moves: whether cursor movements up in the overwritten part are kept, as one escape sequence before the line.
    """

    def __init__(self, moves: bool = False) -> None:
        self._rest = b""
        self._moves = moves

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes of the output; return the lines that these bytes complete, without line ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_DRAWN and b"\r" in self._rest:
            self._rest = b"\r" + self._last_state(self._rest)
        if len(self._rest) > MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [self._last_state(line) for line in lines]

    def is_waiting(self) -> bool:
        """Return whether there is an unfinished line that is no progress bar, so has no carriage return."""
        return bool(self._rest) and b"\r" not in self._rest

    def rest(self) -> list[bytes]:
        """Remove the unfinished line and return it as a list of one line; empty if there is none."""
        line, self._rest = self._last_state(self._rest), b""
        return [line] if line else []

    def _last_state(self, line: bytes) -> bytes:
        before, _, last = line.rstrip(b"\r").rpartition(b"\r")
        up = rows_up(before) if self._moves else 0
        return b"\x1b[%dA" % up + last if up else last


class WholeLines:
    """The output of a stream that is shown by whole lines only; an unfinished line is held back for ``patience_s`` seconds.

    Args:
        screen: shows it.
        mark: the prefix of each line.
        timestamps: whether to put the time before each line.
    """

    patience_s = PATIENCE_S

    def __init__(self, screen: Screen, mark: bytes, timestamps: bool = False) -> None:
        self._screen, self.mark, self._timestamps = screen, mark, timestamps
        self._lines = Lines()
        self._since = 0.0  # when the last bytes came, by the monotonic clock

    def feed(self, data: bytes) -> None:
        """Show the lines that these bytes complete."""
        self._since = time.monotonic()
        self._show(self._lines.feed(data))

    @property
    def is_waiting(self) -> bool:
        """Return whether an unfinished line is held back."""
        return self._lines.is_waiting()

    def show_what_waits(self) -> None:
        """Show the unfinished line if nothing was added to it for ``patience_s`` seconds."""
        if self.is_waiting and time.monotonic() > self._since + self.patience_s:
            self.finish()

    def finish(self) -> None:
        """Show the unfinished line now, if there is one."""
        self._show(self._lines.rest())

    def _show(self, lines: Sequence[bytes]) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._timestamps else b""
        self._screen.lines(stamp + self.mark, lines)


class LiveText:
    """The output of a stream that is shown as it arrives, except that the beginning of a plain line is held back for a moment.

    Args:
        screen: shows it.
        mark: the prefix of each line.
    """

    patience_s = _LIVE_PATIENCE_S

    def __init__(self, screen: Screen, mark: bytes) -> None:
        self._screen, self.mark = screen, mark
        self._held = b""
        self._since = 0.0  # when the held-back text began to wait, by the monotonic clock

    def feed(self, data: bytes) -> None:
        """Show whole lines and progress bars at once, and hold back the beginning of a plain line unless it is very long."""
        whole, end, held = (self._held + data).rpartition(b"\n")
        if len(held) > MAX_LINE or not is_plain_begin(held):
            whole, end, held = whole + end, held, b""
        if end or not self._held:
            self._since = time.monotonic()
        self._held = held
        if end:
            self._screen.live(self, self.mark, whole + end)

    @property
    def is_waiting(self) -> bool:
        """Return whether the beginning of a line is held back."""
        return bool(self._held)

    def show_what_waits(self) -> None:
        """Show the beginning of a line if it has been held back for ``patience_s`` seconds."""
        if time.monotonic() > self._since + self.patience_s:
            self.finish()

    def finish(self) -> None:
        """Show the text that is held back."""
        held, self._held = self._held, b""
        if held:
            self._screen.live(self, self.mark, held)
