"""A terminal that shows all ranks of a node: one stream draws on it as if it were alone, lines of others go above its drawing.

Pure: it works on bytes and writes through a function.

[Note: a block] The block of a stream is the rows that it may still overwrite: the line of a progress bar, or several lines
among which it moves the cursor up and down (rich, several bars of tqdm). Lines of other streams are inserted above the block,
and the block is drawn again below them. The height of the block is not known in advance: it only shows in how far the cursor
is moved up. So the last rows of the screen are remembered, with their owners. If the cursor is moved up past a row of another
stream, which was written before the block's height was known, these rows are sorted: first the rows of other streams, then
the block. So the stream finds its rows where it expects them.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from guozhuang.launch.console.escapes import CSI, OSC, RESET, number, only_colours, width

_ERASE_REST = b"\x1b[K"  # erases the rest of the row
_ERASE = b"\r" + _ERASE_REST
_ERASE_BELOW = b"\r\x1b[J"
_END_FULL_SCREEN, _SHOW_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"
_MAX_ROWS = 200  # number of rows that are remembered
_MAX_REPEATED = 4096  # number of bytes of a row that are kept for drawing it again
_MAX_HELD_BYTES = 4 << 20  # limit of lines that wait while a stream has the whole screen
_MAX_COLOURS = 8  # number of colour sequences that are repeated in the next row
_PIECE = re.compile(CSI + b"|" + OSC + rb"|\x1b[ -/]*[0-Z\\^-~]|[\r\n]|[^\x1b\r\n]+|\x1b")
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]{0,64}[ -/]*|\][^\x07\x1b]{0,2048}\x1b?)?\Z")
_FULL_SCREEN = (b"?1049", b"?1047", b"?47")
# Sequences after which the cursor's row is unknown: absolute positions, saved positions, scrolling regions.
_LOST = frozenset(b"HfrsuSTLM")


@dataclass(eq=False)
class _Row:
    owner: int | None = None  # the live stream that wrote it; None: a whole line of any rank, or empty
    data: bytes = b""  # the bytes that draw the row from its first column


class _Stream:
    """A stream that draws. ``height``: rows of its block, by its last movement up; ``grown``: rows added since."""

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.cut = b""  # the beginning of an incomplete escape sequence
        self.colours: list[bytes] = []  # the colour sequences in effect
        self.height, self.grown = 1, 0


class _Held:
    """Lines that wait while a stream has the whole screen; the oldest are dropped and counted when there are too many."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._num_bytes = self._num_left_out = 0

    def add(self, mark: bytes, texts: Sequence[bytes]) -> None:
        for text in texts:
            self._lines.append(mark + only_colours(text) + b"\n")
            self._num_bytes += len(self._lines[-1])
        while self._num_bytes > _MAX_HELD_BYTES:
            self._num_bytes -= len(self._lines.popleft())
            self._num_left_out += 1

    def lines(self) -> list[bytes]:
        words = b"guozhuang run: %d lines came while rank 0 had the whole screen, and are left out\n"
        return [*([words % self._num_left_out] if self._num_left_out else []), *self._lines]


class Terminal:
    """A terminal and the state of its last rows. See [Note: a block].

    Args:
        write: writes all bytes that it is given.
        size: returns columns and lines of the terminal; (0, 0) if they are not known.
    """

    def __init__(self, write: Callable[[bytes], None], size: Callable[[], tuple[int, int]]) -> None:
        self._write, self._size = write, size
        self._out: list[bytes] = []
        self._streams: dict[int, _Stream] = {}
        self._rows, self._at = [_Row()], 0  # the last rows of the screen; the index of the cursor's row
        self._at_start = True  # the cursor is in the first column
        self._open: int | None = None  # the stream that drew last
        self._held: _Held | None = None  # waiting lines; not None while a stream has the whole screen
        self._hides_cursor = False

    def lines(self, mark: bytes, texts: Sequence[bytes]) -> None:
        """Write whole lines of one rank, above the block of the stream that draws."""
        if self._held is not None:
            self._held.add(mark, texts)
            return
        new = [_Row(None, mark + only_colours(text)) for text in texts]
        top = self._top()
        if top is None:
            if not self._at_start and len(self._rows) > 1:  # a row is being erased with spaces
                self._out.append(b"\r")
            elif not self._at_start:  # the cursor's position is unknown
                self._out.append(b"\n")
                self._at_start = True
            self._out += [row.data + b"\n" for row in new]
            self._rows[-1:-1] = new
            self._at += len(new)
        else:
            self._draw_above(top, new)
        self._flush()

    def live(self, owner: int, mark: bytes, data: bytes) -> None:
        """Write the output of one stream as it comes. See ``Screen.live``."""
        stream = self._streams.setdefault(owner, _Stream(mark))
        if self._open not in (None, owner) and not self._is_fresh():
            self._erase_block()
        self._open = owner
        data = stream.cut + data
        cut = _UNFINISHED.search(data)
        stream.cut = data[cut.start() :] if cut else b""
        for match in _PIECE.finditer(data, 0, cut.start() if cut else len(data)):
            self._take(stream, match)
        self._flush()

    def end(self) -> None:
        """Move to a new line below everything, and reset the terminal: colours, cursor, full-screen mode."""
        if self._held is not None:
            self._out.append(_END_FULL_SCREEN)
            self._leave_full_screen()
        stream = self._streams.get(self._open) if self._open is not None else None
        if stream is not None and stream.colours:
            self._out.append(RESET)
        if not (self._is_fresh() and self._at_start):
            self._out.append(b"\n" * (1 + self._physical(self._rows[self._at + 1 :])))
        if self._hides_cursor:
            self._out.append(_SHOW_CURSOR)
            self._hides_cursor = False
        self._streams.clear()
        self._open = None
        self._forget(at_start=True)
        self._flush()

    def _flush(self) -> None:
        surplus = min(len(self._rows) - _MAX_ROWS, self._at)
        if surplus > 0:
            del self._rows[:surplus]
            self._at -= surplus
        data = b"".join(self._out)
        self._out.clear()
        if data:
            self._write(data)

    # Methods that process the output of a live stream.

    def _take(self, stream: _Stream, match: re.Match[bytes]) -> None:
        piece, kind = match[0], match[2]
        if match[1] == b"?25":
            self._hides_cursor = kind == b"l"
        if self._held is not None and not (kind == b"l" and match[1] in _FULL_SCREEN):
            self._out.append(piece)
        elif piece == b"\r":
            self._to_start()
        elif piece == b"\n":
            self._down(stream)
        elif piece[:1] != b"\x1b":
            self._text(stream, piece)
        elif kind is None:
            self._escape(piece)
        else:
            self._control(stream, piece, match[1], kind)

    def _text(self, stream: _Stream, text: bytes) -> None:
        row = self._rows[self._at]
        if self._at_start == bool(row.data) and not text.strip(b" "):  # spaces erase a bar; erase its mark too
            row.data = b""
            self._out.append(text + _ERASE_REST)
            self._at_start = False
            return
        if self._at_start:
            # The overwritten text is forgotten, because progress bars always write whole rows.
            row.data, text = b"", stream.mark + b"".join(stream.colours) + text
        row.owner, row.data = self._open, (row.data + text)[-_MAX_REPEATED:]
        self._at_start = False
        self._out.append(text)

    def _to_start(self) -> None:
        self._out.append(b"\r")
        self._at_start = True

    def _down(self, stream: _Stream) -> None:
        row = self._rows[self._at]
        if not row.data:  # an empty line gets a mark too
            self._out.append(stream.mark)
            row.owner, row.data = self._open, stream.mark
        if self._at == len(self._rows) - 1:
            self._rows.append(_Row())
            stream.grown += 1
            if stream.grown > stream.height:
                stream.height = 1
            if len(self._rows) > 2 * _MAX_ROWS:
                del self._rows[:_MAX_ROWS]
                self._at -= _MAX_ROWS
        self._at += 1
        self._out.append(b"\n")
        self._at_start = True

    def _escape(self, piece: bytes) -> None:
        self._out.append(piece)
        if piece[:2] == b"\x1b]":  # a hyperlink or a window title
            if not self._at_start:
                self._rows[self._at].data += piece
        elif piece in (b"\x1b7", b"\x1b8", b"\x1bM", b"\x1bD", b"\x1bE", b"\x1bc"):
            self._forget(at_start=False)

    def _control(self, stream: _Stream, piece: bytes, parameters: bytes, kind: bytes) -> None:
        row, count = self._rows[self._at], number(parameters)
        if kind in b"AF":
            self._up(stream, count, piece)
        elif kind in b"BE":
            self._rows += [_Row(self._open) for _ in range(self._at + min(count, _MAX_ROWS) + 1 - len(self._rows))]
            self._at += min(count, _MAX_ROWS)
            self._out.append(piece)
        elif kind == b"m":
            stream.colours = [] if parameters.strip(b"0") == b"" else [*stream.colours, piece][-_MAX_COLOURS:]
            if not self._at_start:
                row.data += piece
            if not (self._at_start and stream.colours):  # else _text writes it after the mark
                self._out.append(piece)
        elif kind == b"G" and count == 1:
            self._to_start()
        elif kind in b"CG":
            if kind == b"G":
                piece = b"\x1b[%dG" % (count + width(stream.mark))
            if self._at_start:
                piece = b"\r" + stream.mark + piece
            row.owner, row.data = self._open, row.data + piece
            self._at_start = False
            self._out.append(piece)
        elif kind in b"JK":
            self._erase(piece, parameters, kind)
        elif kind == b"h" and parameters in _FULL_SCREEN:
            self._out.append(piece)
            self._held = _Held()
        elif kind == b"l" and parameters in _FULL_SCREEN and self._held is not None:
            self._out.append(piece)
            self._leave_full_screen()
        elif kind[0] in _LOST:
            self._out.append(piece)
            self._forget(at_start=kind == b"H")
        else:
            if not (self._at_start or parameters.startswith(b"?")):
                row.data += piece
            self._out.append(piece)
        if kind in b"EF":
            self._to_start()

    def _erase(self, piece: bytes, parameters: bytes, kind: bytes) -> None:
        self._out.append(piece)
        is_all = parameters in (b"2", b"3")
        if kind == b"J" and is_all:
            self._forget(at_start=self._at_start)
        elif kind == b"J" and parameters != b"1":
            del self._rows[self._at + 1 :]
        row = self._rows[self._at]
        if is_all or (self._at_start and parameters in (b"", b"0")):
            row.data = b""
        elif not self._at_start:
            row.data += piece

    def _up(self, stream: _Stream, count: int, piece: bytes) -> None:
        """Move the cursor up by ``count`` rows of the stream. See [Note: a block]."""
        target, left = self._at, count
        while left and target > 0:
            target -= 1
            left -= self._rows[target].owner == self._open
        above = self._physical(self._rows[target : self._at])
        num_lines = self._size()[1]
        if left or (num_lines and above >= num_lines):  # the target row is not remembered, or has left the screen
            self._out.append(piece)
            self._forget(at_start=self._at_start)
            return
        column = width(self._rows[self._at].data)
        below = self._rows[target:]
        others = [row for row in below[: self._at - target] if row.owner != self._open]
        if others:
            place = len(self._rows) - len(below) + len(others)
            self._rows[target:] = others + [row for row in below if row not in others]
            self._out.append(b"\x1b[%dA" % above + _ERASE_BELOW)
            self._at, target = target, place
            self._draw(self._at)
            self._go(len(self._rows) - 1, target)
            if not self._at_start:
                self._out.append(b"\r" + (b"\x1b[%dC" % column if column else b""))
        else:
            self._out.append(b"\x1b[%dA" % above)
        self._at = target
        stream.height, stream.grown = len(self._rows) - target, 0

    def _leave_full_screen(self) -> None:
        held, self._held = self._held, None
        self._forget(at_start=True)
        if held is not None:
            self._out += held.lines()

    # Methods on the remembered rows.

    def _is_fresh(self) -> bool:
        """Return whether the cursor is in an empty row below everything."""
        while len(self._rows) - 1 > self._at and not self._rows[-1].data:
            self._rows.pop()  # erased by the stream
        return self._at == len(self._rows) - 1 and not self._rows[-1].data

    def _forget(self, at_start: bool) -> None:
        self._rows, self._at, self._at_start = [_Row()], 0, at_start

    def _physical(self, rows: Sequence[_Row]) -> int:
        """Return how many rows of the terminal these rows take, since the terminal wraps long ones."""
        columns = self._size()[0]
        return sum(max(1, math.ceil(width(row.data) / columns)) if columns else 1 for row in rows)

    def _top(self) -> int | None:
        """Return the index of the first row of the block; None if no stream is drawing."""
        if self._is_fresh():
            return None
        stream = self._streams[self._open] if self._open is not None else None
        top, height = len(self._rows) - 1, stream.height if stream else 1
        while (
            top > 0 and self._rows[top - 1].owner == self._open and (top > self._at or len(self._rows) - top < height)
        ):
            top -= 1
        return min(top, self._at)

    def _draw_above(self, top: int, new: Sequence[_Row]) -> None:
        stream = self._streams.get(self._open) if self._open is not None else None
        colours = b"".join(stream.colours) if stream is not None else b""
        column = width(self._rows[self._at].data)
        self._out += [RESET * bool(colours), self._way_up(top)]
        self._out += [row.data + b"\n" for row in new]
        self._rows[top:top] = new
        self._at += len(new)
        top += len(new)
        self._draw(top)
        self._go(len(self._rows) - 1, self._at)
        if self._at_start:
            self._out.append(b"\r")
        elif self._at < len(self._rows) - 1:
            self._out.append(b"\r" + (b"\x1b[%dC" % column if column else b""))
        self._out.append(colours if not self._at_start else RESET * bool(colours))

    def _way_up(self, top: int) -> bytes:
        """Return the sequence that moves the cursor up to the first column of a row, and erases everything below."""
        up = self._physical(self._rows[top : self._at + 1]) - 1
        if up == 0 and self._at == len(self._rows) - 1:
            return _ERASE
        return (b"\x1b[%dA" % up if up else b"") + _ERASE_BELOW

    def _draw(self, first: int) -> None:
        rows = self._rows[first:]
        self._out.append(b"\n".join(row.data + (RESET if b"\x1b[" in row.data else b"") for row in rows))

    def _go(self, here: int, there: int) -> None:
        up = self._physical(self._rows[there + 1 : here + 1])
        if up:
            self._out.append(b"\x1b[%dA" % up)

    def _erase_block(self) -> None:
        """Erase the block because another stream begins to draw; if it was a progress bar, its stream draws it again."""
        top = self._top()
        if top is not None:
            self._out.append(self._way_up(top))
            self._rows[top:] = [_Row()]
            self._at, self._at_start = top, True
