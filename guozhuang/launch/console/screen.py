"""Merge the output of several ranks into one readable stream: whole lines with a mark, and progress bars of one rank.

Pure: it works on bytes and writes through a function. A UTF-8 character that was cut between two reads stays whole, because
bytes are split at line ends only, and the byte of a line end never occurs inside another character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from guozhuang.launch.console.escapes import rows_up
from guozhuang.launch.console.terminal import Terminal

_COLOURS = (36, 33, 35, 32, 34, 31)  # of the marks: cyan first; red last, because it looks like an error
# A longer line is passed on in pieces, so that memory stays bounded whatever a rank writes.
MAX_LINE = 65536
_MAX_DRAWN = 4096  # an unfinished line with carriage returns that is longer is reduced to its last state
_PIECE = re.compile(rb"[\r\n]|[^\r\n]+")


def mark(rank: int | str, colour: bool) -> bytes:
    """Return the prefix of each line of a rank: ``[3] ``; a text names a process without a rank, and gets no colour."""
    text = f"[{rank}]"
    is_coloured = colour and isinstance(rank, int)
    return (f"\x1b[{_COLOURS[int(rank) % len(_COLOURS)]}m{text}\x1b[0m " if is_coloured else f"{text} ").encode()


class Lines:
    """Cuts the output of a rank into lines. Of a line that was overwritten by carriage returns only the last state is kept.

    Args:
        moves: whether cursor movements up in the overwritten part are kept, as one escape sequence before the line.
    """

    def __init__(self, moves: bool = False) -> None:
        self._rest = b""
        self._moves = moves

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the lines that they complete, without line ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_DRAWN and b"\r" in self._rest:
            self._rest = b"\r" + self._last_state(self._rest)
        if len(self._rest) > MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [self._last_state(line) for line in lines]

    def is_waiting(self) -> bool:
        """Return whether there is an unfinished line that is no progress bar (has no carriage return)."""
        return bool(self._rest) and b"\r" not in self._rest

    def rest(self) -> list[bytes]:
        """Remove the unfinished line and return it as a list of one line; empty if there is none."""
        line, self._rest = self._last_state(self._rest), b""
        return [line] if line else []

    def _last_state(self, line: bytes) -> bytes:
        before, _, last = line.rstrip(b"\r").rpartition(b"\r")
        up = rows_up(before) if self._moves else 0
        return b"\x1b[%dA" % up + last if up else last


class Screen:
    """One terminal, file or pipe, on which the output of all ranks of a node is shown.

    Args:
        write: writes all bytes that it is given.
        is_terminal: whether lines can be overwritten.
        size: returns columns and lines of the terminal; (0, 0) if they are not known.
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
        """Write whole lines of one rank, without lines of other ranks between them."""
        if texts:
            self._draw(lambda sheet: sheet.lines(mark, texts))

    def live(self, owner: int, mark: bytes, data: bytes) -> None:
        """Write the output of one stream as it comes, with unfinished lines and carriage returns.

        Args:
            owner: identifies the stream; up to two streams may be shown live.
            mark: the prefix of each line, which is repeated when the line is overwritten.
            data: the bytes, which may end inside a line.
        """
        self._draw(lambda sheet: sheet.live(owner, mark, data))

    def end(self) -> None:
        """End an unfinished line, so that the next output begins in a new line."""
        self._draw(lambda sheet: sheet.end())

    def _draw(self, what: Callable[[Terminal | _Paper], None]) -> None:
        """Call ``what`` with the sheet; after an exception replace the sheet by plain output, so that ranks are still shown."""
        try:
            what(self._sheet)
        except Exception as error:
            self._sheet = _Paper(self._write)
            text = f"guozhuang run: progress bars are no longer drawn in their place: {type(error).__name__}: {error}"
            self._sheet.lines(b"\n", [text.encode(errors="replace")])
            what(self._sheet)


class _Paper:
    """A file or a pipe, where lines cannot be overwritten. An unfinished line is ended when another stream writes."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._alive: dict[int, _Alive] = {}
        self._open: _Alive | None = None  # the stream whose unfinished line is the last text in the file

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

    ``tail``: its unfinished line is not empty; ``at_start``: a carriage return sent the cursor back to the line's start.
    ``is_cut``: another stream has ended its line, so a line end that comes next is not written.
    """

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.tail, self.at_start, self.is_cut = False, False, False

    def add(self, data: bytes) -> bytes:
        """Return the bytes to write: ``data`` with the mark before each line."""
        out = []
        for piece in _PIECE.findall(data):
            if piece == b"\r":
                self.at_start = self.tail
            elif piece == b"\n":
                if self.is_cut:
                    self.is_cut = False
                    continue
                if not self.tail:
                    out.append(self.mark)  # an empty line gets a mark too
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
