"""How the lines of several ranks become one readable stream: whole lines with a mark, and one rank's progress bars alive.

Pure: it works on bytes and writes through a function. A character of UTF-8 that was cut between two reads stays whole,
because bytes are split at line ends only, which are no part of any other character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from guozhuang.launch.console.escapes import rows_up
from guozhuang.launch.console.terminal import Terminal

_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan first: red last, because it reads as an error
# A line that is longer is passed on in pieces: memory is bounded, whatever a rank writes.
MAX_LINE = 65536
_MAX_DRAWN = 4096  # that are kept of a line that is drawn over again and again
_PIECE = re.compile(rb"[\r\n]|[^\r\n]+")


def mark(rank: int, colour: bool) -> bytes:
    """What stands before each line of a rank: ``[3] ``."""
    text = f"[{rank}]"
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} ").encode()


class Lines:
    """Cuts what a rank wrote into lines. Of a line that was drawn over with carriage returns the last state remains.

    Args:
        moves: a line begins with the way up (``terminal.rows_up``) if the cursor was sent up in what was drawn over.
    """

    def __init__(self, moves: bool = False) -> None:
        self._rest = b""
        self._moves = moves

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_DRAWN and b"\r" in self._rest:
            self._rest = b"\r" + self._last_state(self._rest)
        if len(self._rest) > MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [self._last_state(line) for line in lines]

    def is_waiting(self) -> bool:
        """Whether an unfinished line stands here that is no progress bar."""
        return bool(self._rest) and b"\r" not in self._rest

    def rest(self) -> list[bytes]:
        """What is left of an unfinished line, as a line; nothing is left of it here."""
        line, self._rest = self._last_state(self._rest), b""
        return [line] if line else []

    def _last_state(self, line: bytes) -> bytes:
        before, _, last = line.rstrip(b"\r").rpartition(b"\r")
        up = rows_up(before) if self._moves else 0
        return b"\x1b[%dA" % up + last if up else last


class Screen:
    """One terminal, file or pipe, to which all ranks of a node write.

    Args:
        write: takes all bytes it is given.
        is_terminal: lines can be drawn over.
        size: tells columns and lines of the terminal; (0, 0) where they are not known.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        is_terminal: bool,
        size: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._write = write
        self._sheet: Terminal | _Paper = Terminal(write, size) if is_terminal else _Paper(write)

    def lines(self, mark: bytes, texts: Sequence[bytes]) -> None:
        """Write whole lines of one rank, in one piece."""
        if texts:
            self._draw(lambda sheet: sheet.lines(mark, texts))

    def live(self, owner: int, mark: bytes, data: bytes) -> None:
        """Write what one stream wrote as it comes, unfinished lines and carriage returns too.

        Args:
            owner: tells streams apart; two of them may be alive.
            mark: goes before the first character of each line, also of one that is drawn over.
            data: what was read, cut anywhere.
        """
        self._draw(lambda sheet: sheet.live(owner, mark, data))

    def end(self) -> None:
        """Finish an unfinished line, so that what comes next stands in its own."""
        self._draw(lambda sheet: sheet.end())

    def _draw(self, what: Callable[[Terminal | _Paper], None]) -> None:
        """Draw; what a rank writes must be shown and its pipe emptied, whatever a mistake in the drawing makes of it."""
        try:
            what(self._sheet)
        except Exception as error:
            self._sheet = _Paper(self._write)
            text = f"guozhuang run: progress bars are no longer drawn in their place: {type(error).__name__}: {error}"
            self._sheet.lines(b"\n", [text.encode(errors="replace")])
            what(self._sheet)


class _Paper:
    """A file or a pipe: what is written stays. An unfinished line is ended by the line of somebody else."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._alive: dict[int, _Alive] = {}
        self._open: _Alive | None = None  # whose unfinished line is the last

    def lines(self, mark: bytes, texts: Sequence[bytes]) -> None:
        self._write(self._interrupt() + b"".join(mark + text + b"\n" for text in texts))

    def live(self, owner: int, mark: bytes, data: bytes) -> None:
        stream = self._alive.setdefault(owner, _Alive(mark))
        broken = self._interrupt() if self._open is not stream else b""
        self._write(broken + stream.add(data))
        self._open = stream if stream.tail else None

    def end(self) -> None:
        if self._open is not None:
            self._write(b"\n")
            self._open = None

    def _interrupt(self) -> bytes:
        stream, self._open = self._open, None
        if stream is None:
            return b""
        stream.clear()
        stream.is_cut = True
        return b"\n"


class _Alive:
    """A stream that is shown as it comes.

    ``tail``: something stands in its unfinished line; ``at_start``: the cursor was sent back before it. ``is_cut``: its line
    was ended by somebody else's, so its own end, if that comes next, is none.
    """

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.tail, self.at_start, self.is_cut = False, False, False

    def add(self, data: bytes) -> bytes:
        """The bytes to write: ``data`` with the mark before each line that gets a character."""
        out = []
        for piece in _PIECE.findall(data):
            if piece == b"\r":
                self.at_start = self.tail
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
                self.tail = True
                self.is_cut = False
            out.append(piece)
        return b"".join(out)

    def clear(self) -> None:
        self.tail, self.at_start = False, False
