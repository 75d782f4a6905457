"""A model of a terminal, small and plain: what one would see of the bytes that were written to it."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|.", re.DOTALL)


class Glass:
    """Rows of characters that scroll; ``text`` is all that was ever shown, as far as it was not drawn over.

    Args:
        columns, lines: its size. Longer rows are wrapped; the cursor does not come above the rows that are seen.
        cooked: a line feed goes to the first column, as the kernel's terminal makes it.
    """

    def __init__(self, columns: int = 80, lines: int = 24, cooked: bool = True) -> None:
        self.columns, self.lines, self.cooked = columns, lines, cooked
        self.rows = [[" "] * columns]
        self.row = self.column = 0
        self.cursor_is_shown = True

    def write(self, data: bytes | str) -> None:
        text = data if isinstance(data, str) else data.decode()
        for match in _PIECE.finditer(text):
            if match[2]:
                self._control(match[1], match[2])
            elif not match[0].startswith("\x1b"):
                self._put(match[0])

    @property
    def text(self) -> list[str]:
        """The rows, without blanks at their ends and empty ones below."""
        found = ["".join(row).rstrip() for row in self.rows]
        while found and not found[-1]:
            found.pop()
        return found

    def _put(self, char: str) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self._down()
            self.column = 0 if self.cooked else self.column
        else:
            if self.column == self.columns:  # a full row is left only by its next character
                self._down()
                self.column = 0
            self.rows[self.row][self.column] = char
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([" "] * self.columns)

    def _control(self, parameters: str, kind: str) -> None:
        number = int(parameters) if parameters.isdigit() else 0
        count = max(1, number)
        if kind == "A":
            self.row = max(self.row - count, len(self.rows) - self.lines, 0)
            self.column = min(self.column, self.columns - 1)
        elif kind == "B":
            self.row = min(self.row + count, max(len(self.rows), self.lines) - 1)
            self.rows += [[" "] * self.columns for _ in range(self.row + 1 - len(self.rows))]
        elif kind == "C":
            self.column = min(self.column + count, self.columns - 1)
        elif kind == "G":
            self.column = min(count, self.columns) - 1
        elif kind == "K":
            begin, end = {0: (self.column, self.columns), 1: (0, self.column + 1), 2: (0, self.columns)}[number]
            self.rows[self.row][begin:end] = [" "] * len(self.rows[self.row][begin:end])
        elif kind == "J":
            assert number == 0
            self._control("", "K")
            del self.rows[self.row + 1 :]
        elif parameters == "?25":
            self.cursor_is_shown = kind == "h"
        else:
            assert kind == "m" or parameters.startswith("?"), (parameters, kind)
