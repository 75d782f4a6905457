"""How the lines of several ranks become one readable stream: whole lines with a mark, and one rank's progress bars alive.

Pure: it works on bytes and writes through a function. A character of UTF-8 that was cut between two reads stays whole,
because bytes are split at line ends only, which are no part of any other character.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan first: red last, because it reads as an error
_RESET = b"\x1b[0m"
_ERASE = b"\r\x1b[K"  # to the first column, and away with what stands in the row
# A line that is longer is passed on in pieces: memory is bounded, whatever a rank writes.
MAX_LINE = 65536
# What is repeated of an unfinished line when it was interrupted.
_MAX_REPEATED = 4096
_PIECE = re.compile(rb"[\r\n]|[^\r\n]+")


def mark(rank: int, colour: bool) -> bytes:
    """What stands before each line of a rank: ``[3] ``."""
    text = f"[{rank}]"
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} ").encode()


class Lines:
    """Cuts what a rank wrote into lines. Of a line that was drawn over with carriage returns the last state remains."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            drawn = _last_state(self._rest)
            if len(drawn) > MAX_LINE:
                lines.append(self._rest)
                drawn = b""
            self._rest = drawn
        return [_last_state(line) for line in lines]

    def is_waiting(self) -> bool:
        """Whether an unfinished line stands here that is no progress bar."""
        return bool(self._rest) and b"\r" not in self._rest

    def rest(self) -> list[bytes]:
        """What is left of an unfinished line, as a line; nothing is left of it here."""
        line, self._rest = _last_state(self._rest), b""
        return [line] if line else []


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Screen:
    """One terminal, file or pipe, to which all ranks of a node write.

    Args:
        write: takes all bytes it is given.
        is_terminal: lines can be drawn over.
    """

    def __init__(self, write: Callable[[bytes], None], is_terminal: bool) -> None:
        self._write, self._is_terminal = write, is_terminal
        self._alive: dict[int, _Alive] = {}
        self._open: _Alive | None = None  # whose unfinished line the cursor stands in

    def line(self, mark: bytes, text: bytes) -> None:
        """Write a whole line."""
        broken = self._interrupt()
        self._write(mark + text + (_RESET if self._is_terminal and b"\x1b[" in text else b"") + b"\n")
        self._resume(broken)

    def live(self, owner: int, mark: bytes, data: bytes) -> None:
        """Write what one stream wrote as it comes, unfinished lines and carriage returns too.

        Args:
            owner: tells streams apart; two of them may be alive.
            mark: goes before the first character of each line, also of one that is drawn over.
            data: what was read, cut anywhere.
        """
        stream = self._alive.setdefault(owner, _Alive(mark))
        broken = self._interrupt() if self._open is not stream else None
        out = stream.add(data)
        self._write(out)
        self._open = stream if stream.tail else None
        if self._open is None:
            self._resume(broken)

    def end(self) -> None:
        """Finish an unfinished line, so that what comes next stands in its own."""
        if self._open is not None:
            self._write(b"\n")
            self._open = None

    def _interrupt(self) -> _Alive | None:
        stream, self._open = self._open, None
        if stream is None:
            return None
        if self._is_terminal:
            self._write(_ERASE)
            return stream
        self._write(b"\n")
        stream.clear()
        stream.is_cut = True
        return None

    def _resume(self, stream: _Alive | None) -> None:
        """Draw an interrupted line again, so that what follows it finds it."""
        if stream is not None:
            self._write(stream.again())
            self._open = stream


class _Alive:
    """A stream that is shown as it comes.

    ``tail`` is what stands in its unfinished line; ``at_start``: the cursor was sent back before it. ``is_cut``: its line was
    ended by somebody else's, so its own end, if that comes next, is none.
    """

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.tail, self.at_start, self.is_cut = b"", False, False

    def add(self, data: bytes) -> bytes:
        """The bytes to write: ``data`` with the mark before each line that gets a character."""
        out = []
        for piece in _PIECE.findall(data):
            if piece == b"\r":
                self.at_start = bool(self.tail)
            elif piece == b"\n":
                if self.is_cut:
                    self.is_cut = False
                    continue
                if not self.tail:
                    out.append(self.mark)  # an empty line is a line
                self.clear()
            else:
                if self.at_start or not self.tail:
                    out.append(self.mark)
                    self.clear()
                self.tail = (self.tail + piece)[-_MAX_REPEATED:]
                self.is_cut = False
            out.append(piece)
        return b"".join(out)

    def clear(self) -> None:
        self.tail, self.at_start = b"", False

    def again(self) -> bytes:
        return self.mark + self.tail + (b"\r" if self.at_start else b"")
