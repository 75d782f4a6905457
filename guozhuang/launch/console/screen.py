"""Show the output of several ranks on one screen: whole lines with a mark, and the progress bars of one rank.

A ``Screen`` works on bytes and writes through a function. A UTF-8 character that was cut between two reads stays whole: output
is split at line ends and escape sequences only, and their bytes never occur inside another character.

[Note: a block] On a terminal, the block of a stream is the rows that it may still overwrite: the line of a progress bar, or
several lines among which it moves the cursor up and down (rich, several bars of tqdm). Lines of other streams are inserted
above the block, and the block is drawn again below them. The height of the block is not known in advance: it only shows in how
far the cursor is moved up. So the last rows of the screen are remembered. If the cursor is moved up past a row of another
stream, which was written before the block's height was known, these rows are sorted: first the rows of other streams, then
the block. So the stream finds its rows where it expects them.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from guozhuang.launch.console.escapes import ESCAPE, RESET, is_plain, number, only_colours, width

_COLOURS = (36, 33, 35, 32, 34, 31)  # colours of the ranks' marks: cyan first; red last, because it looks like an error
_ERASE_REST = b"\x1b[K"  # the escape sequence that erases the rest of the row
_ERASE_BELOW = b"\r\x1b[J"
_END_FULL_SCREEN, _SHOW_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"
_MAX_ROWS = 200  # how many of the last rows of the screen are remembered
_MAX_REPEATED = 4096  # how many bytes of a row are kept for drawing it again
_MAX_WAITING_BYTES = 4 << 20  # lines of other streams that are held back while one stream uses the full screen
_MAX_COLOURS = 8  # maximum number of colour sequences that are repeated in the next row
_PIECE = re.compile(rb"[\r\n]|[^\x1b\r\n]+|" + ESCAPE + rb"|\x1b")
_PIECE_OF_FILE = re.compile(rb"[\r\n]|[^\r\n]+")
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]{0,64}[ -/]*|\][^\x07\x1b]{0,2048}\x1b?)?\Z")
_FULL_SCREEN = (b"?1049", b"?1047", b"?47")
# Matches escape sequences after which the cursor's row is unknown: absolute positions, saved positions, scrolling regions.
_LOST = re.compile(rb"\x1b(?:\[.*[BEHfrsuSTLM]|[78MDEc])\Z", re.DOTALL)


def mark(rank: int | str, colour: bool) -> bytes:
    """Return the prefix of each line of a rank: ``[3] ``; a text names a process without a rank, and gets no colour."""
    text = f"[{rank}]"
    is_coloured = colour and isinstance(rank, int)
    return (f"\x1b[{_COLOURS[int(rank) % len(_COLOURS)]}m{text}\x1b[0m " if is_coloured else f"{text} ").encode()


@dataclass(eq=False)
class _Row:
    is_own: bool = True  # the live stream wrote the row, or the row is empty; False: it is a line of another stream
    data: bytes = b""  # the bytes that draw the row from its first column


class Screen:
    """One terminal, file or pipe, on which the output of all ranks of a node is shown. See [Note: a block].

    Args:
        write: writes all bytes that it is given.
        is_terminal: whether lines can be overwritten. Otherwise an unfinished line is ended when another stream writes.
        size: returns columns and lines of the terminal; (0, 0) if they are not known.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        is_terminal: bool,
        size: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._write, self._is_terminal, self._size = write, is_terminal, size
        self._out: list[bytes] = []
        self._owner: Hashable = None  # the stream that last wrote by ``live``; None: none did, or ``end`` was called
        self._mark = b""  # the prefix of the owner's lines
        self._cuts: dict[Hashable, bytes] = {}  # stream -> the incomplete escape sequence at the end of its output
        self._colours: list[bytes] = []  # the colour sequences that are in effect at the end of the owner's output
        self._rows, self._at = [_Row()], 0  # the remembered last rows of the screen; the index of the cursor's row
        self._at_start = True  # whether the cursor is in the first column
        self._height, self._grown = 1, 0  # rows of the block, known from its last movement up; rows added since then
        # Whether another stream has ended the owner's line in a file, so that the owner's next line end is not written.
        self._is_ended = False
        self._waiting: deque[bytes] | None = None  # lines held back while the owner has the full screen; else None
        self._num_waiting_bytes = self._num_left_out = 0
        self._hides_cursor = False

    def lines(self, mark: bytes, texts: Sequence[bytes]) -> None:
        """Write whole lines of one rank, without lines of other ranks between them, above the block of the live stream."""
        if not texts:
            return
        new = [mark + (only_colours(text) if self._is_terminal else text) for text in texts]
        if self._waiting is not None:
            self._wait(new)
            return
        row = self._rows[self._at]
        is_lost = len(self._rows) == 1 and not row.data and not self._at_start  # the cursor's position is not known
        if is_lost or (row.data and not self._is_terminal):
            self._out.append(b"\n")
            self._forget(at_start=True)
            self._is_ended = not self._is_terminal
        if self._is_fresh() and self._at_start:
            self._append(new, is_own=False)
        else:
            top, column = self._top(), width(row.data)
            up = self._physical(self._rows[top : self._at + 1]) - 1
            self._rows[top:top] = [_Row(False, line) for line in new]
            self._draw(top, up, self._at + len(new), column)
        self._flush()

    def live(self, owner: Hashable, mark: bytes, data: bytes) -> None:
        """Write the output of one stream as it arrives, with unfinished lines and carriage returns.

        Args:
            owner: identifies the stream. Whole plain lines of a second live stream go above the block of the first.
            mark: the prefix of each line, which is repeated when the line is overwritten.
            data: the bytes, which may end inside a line.
        """
        if owner != self._owner:
            if self._owner is not None and owner not in self._cuts and is_plain(data):
                self.lines(mark, data[:-1].split(b"\n"))
                return
            self._end_block()
            self._owner = owner
        self._mark = mark
        data = self._cuts.pop(owner, b"") + data
        if self._is_simple(data):
            new = [mark + text for text in data[:-1].split(b"\n")]
            self._append(new, is_own=True)
            self._grow(len(new))
            self._flush()
            return
        cut = _UNFINISHED.search(data) if self._is_terminal else None
        if cut:
            self._cuts[owner] = data[cut.start() :]
        pieces = _PIECE if self._is_terminal else _PIECE_OF_FILE
        for match in pieces.finditer(data, 0, cut.start() if cut else len(data)):
            piece = match[0]
            if self._waiting is not None and match[1] not in (*_FULL_SCREEN, b"?25"):
                self._out.append(piece)
            elif piece == b"\n":
                self._down()
            elif piece == b"\r":
                self._to_start(piece)
            elif self._is_terminal and piece[:1] == b"\x1b":
                self._control(piece, match[1] or b"", match[2] or b"")
            else:
                self._text(piece)
        self._flush()

    def end(self) -> None:
        """Move the cursor to a new line below all output, and reset the terminal: colours, cursor, full-screen mode."""
        if self._waiting is not None:
            self._leave_full_screen(_END_FULL_SCREEN)
        self._end_block()
        if self._hides_cursor:
            self._out.append(_SHOW_CURSOR)
            self._hides_cursor = False
        self._owner = None
        self._cuts.clear()
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

    def _text(self, text: bytes) -> None:
        row = self._rows[self._at]
        if not self._at_start:
            row.data = (row.data + text)[-_MAX_REPEATED:]
        elif self._is_terminal and row.data and not text.strip(b" "):  # spaces erase a progress bar; erase its mark too
            row.data = text
            text += _ERASE_REST
        else:
            # The text overwrites the row, whose old text is dropped completely: progress bars always write whole rows.
            text = self._mark + b"".join(self._colours) + text
            row.data = text[-_MAX_REPEATED:]
        row.is_own, self._at_start, self._is_ended = True, False, False
        self._out.append(text)

    def _to_start(self, piece: bytes) -> None:
        self._out.append(piece)
        self._at_start = True

    def _down(self) -> None:
        row = self._rows[self._at]
        if self._is_ended:
            self._is_ended = False
            return
        if self._at_start and not row.data.strip():  # an empty line gets a mark too
            self._out.append(self._mark)
            row.is_own, row.data = True, self._mark
        self._out.append(b"\n")
        self._at_start = True
        if not self._is_terminal:
            row.data = b""
            return
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
            self._grow(1)

    def _grow(self, count: int) -> None:
        self._grown += count
        if self._grown > self._height:
            self._height = 1

    def _is_simple(self, data: bytes) -> bool:
        """Return whether these bytes of a live stream can be shown as plain whole lines at the end, which is much faster."""
        has_effects = b"\x1b" in data or b"\r" in data or not data.endswith(b"\n")
        is_ready = self._at_start and self._waiting is None and not (self._colours or self._is_ended)
        return is_ready and not has_effects and self._is_fresh()

    def _control(self, piece: bytes, parameters: bytes, kind: bytes) -> None:
        row, count = self._rows[self._at], number(parameters)
        if parameters in _FULL_SCREEN and kind == b"l":
            self._leave_full_screen(piece)
            return
        if parameters in _FULL_SCREEN and kind == b"h":
            self._waiting = self._waiting or deque()
        elif parameters == b"?25":
            self._hides_cursor = kind == b"l"
        elif _LOST.match(piece) or (kind == b"J" and parameters in (b"2", b"3")):
            self._forget(at_start=kind == b"H" or (kind == b"J" and self._at_start))
        elif kind in (b"A", b"F"):
            self._up(count, piece)
            self._at_start |= kind == b"F"
            return
        elif kind == b"G" and count == 1:
            self._to_start(b"\r")
            return
        elif kind in (b"C", b"G"):
            if kind == b"G":
                piece = b"\x1b[%dG" % (count + width(self._mark))
            if self._at_start:
                piece = b"\r" + self._mark + piece
            row.is_own, row.data, self._at_start = True, row.data + piece, False
        elif kind in (b"J", b"K") and parameters != b"1":
            if self._at_start or parameters == b"2":
                row.data = b""
            if kind == b"J":
                del self._rows[self._at + 1 :]
        else:
            if kind == b"m":
                is_reset = parameters.strip(b"0") == b""
                self._colours = [] if is_reset else [*self._colours, piece][-_MAX_COLOURS:]
                if self._at_start and not is_reset:
                    return  # ``_text`` writes the colour, after the mark
            if not (self._at_start or parameters.startswith(b"?")):
                row.data += piece
        self._out.append(piece)

    def _up(self, count: int, piece: bytes) -> None:
        """Move the cursor up by ``count`` rows of the stream. See [Note: a block]."""
        target, left = self._at, count
        while left and target > 0:
            target -= 1
            left -= self._rows[target].is_own
        above = self._physical(self._rows[target : self._at])
        num_lines = self._size()[1]
        if left or (num_lines and above >= num_lines):  # the target row is not remembered, or has left the screen
            self._out.append(piece)
            self._forget(at_start=self._at_start)
            return
        moved = self._rows[target:]
        others = [row for row in moved[: self._at - target] if not row.is_own]
        if others:
            column = width(self._rows[self._at].data)
            self._rows[target:] = others + [row for row in moved if row not in others]
            self._draw(target, above, target + len(others), column)
        else:
            self._out.append(b"\x1b[%dA" % above)
            self._at = target
        self._height, self._grown = len(self._rows) - self._at, 0

    def _wait(self, new: Sequence[bytes]) -> None:
        assert self._waiting is not None
        self._waiting += new
        self._num_waiting_bytes += sum(map(len, new))
        while self._num_waiting_bytes > _MAX_WAITING_BYTES:
            self._num_waiting_bytes -= len(self._waiting.popleft())
            self._num_left_out += 1

    def _leave_full_screen(self, piece: bytes) -> None:
        self._out.append(piece)
        self._forget(at_start=True)
        if self._num_left_out:
            text = b"guozhuang run: %d lines came while rank 0 had the whole screen, and are left out\n"
            self._out.append(text % self._num_left_out)
        self._out += [line + b"\n" for line in self._waiting or ()]
        self._waiting, self._num_waiting_bytes, self._num_left_out = None, 0, 0

    # Methods that read or change the remembered rows.

    def _append(self, new: Sequence[bytes], is_own: bool) -> None:
        """Write whole lines below all rows of the screen."""
        self._out += [line + b"\n" for line in new]
        if self._is_terminal:
            self._rows[-1:-1] = [_Row(is_own, line[-_MAX_REPEATED:]) for line in new[-_MAX_ROWS:]]
            self._at = len(self._rows) - 1

    def _end_block(self) -> None:
        """Move the cursor to a new row below the block, and forget the block: it is not drawn again."""
        if self._colours:
            self._out.append(RESET)
        if not (self._is_fresh() and self._at_start):
            self._out.append(b"\n" * (1 + self._physical(self._rows[self._at + 1 :])))
        self._forget(at_start=True)
        self._colours, self._is_ended = [], False

    def _is_fresh(self) -> bool:
        """Return whether the cursor is in an empty row below all output."""
        while len(self._rows) - 1 > self._at and not self._rows[-1].data.strip():
            self._rows.pop()  # the stream has erased this row
        return self._at == len(self._rows) - 1 and not self._rows[-1].data.strip()

    def _forget(self, at_start: bool) -> None:
        self._rows, self._at, self._at_start = [_Row()], 0, at_start
        self._height, self._grown = 1, 0

    def _physical(self, rows: Sequence[_Row]) -> int:
        """Return how many rows of the terminal these rows take, since the terminal wraps long ones."""
        columns = self._size()[0]
        return sum(max(1, math.ceil(width(row.data) / columns)) if columns else 1 for row in rows)

    def _top(self) -> int:
        """Return the index of the first row of the block among the remembered rows."""
        top = len(self._rows) - 1
        while top > 0 and self._rows[top - 1].is_own and (top > self._at or len(self._rows) - top < self._height):
            top -= 1
        return min(top, self._at)

    def _draw(self, top: int, up: int, at: int, column: int) -> None:
        """Draw the remembered rows from ``top`` on again, and move the cursor to a place among them.

        Args:
            top: index of the first row that is drawn.
            up: how many rows of the terminal the place for it is above the cursor.
            at: index of the row that the cursor is moved to.
            column: the cursor's column in that row, unless it is in the first one.
        """
        self._out.append(RESET * bool(self._colours) + (b"\x1b[%dA" % up if up else b"") + _ERASE_BELOW)
        self._out.append(b"\n".join(_closed(row.data) for row in self._rows[top:]))
        self._at = at
        below = self._physical(self._rows[at + 1 :])
        self._out.append(b"\x1b[%dA" % below if below else b"")
        if self._at_start:
            self._out.append(b"\r")
            return
        if below:
            self._out.append(b"\r" + (b"\x1b[%dC" % column if column else b""))
        self._out += self._colours


def _closed(data: bytes) -> bytes:
    return data + RESET if b"\x1b[" in data and not data.endswith(RESET) else data
