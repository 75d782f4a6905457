"""Remove, filter and interpret the terminal escape sequences in a program's output. Pure."""

from __future__ import annotations

import re
import unicodedata

RESET = b"\x1b[0m"
_MAX_DIGITS = 9  # longest number to parse: int() raises for some thousands of digits
# A control sequence with its parameters and its kind, a link or a title, and the short ones.
ESCAPE = rb"\x1b\[([0-?]*)[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]"
_ESCAPE = re.compile(ESCAPE)
# Whole lines, and the beginning of a line, with colours as their only escape sequences.
_PLAIN = re.compile(rb"(?:(?:[^\r\n\x1b]|\x1b\[[0-9;]*m)*\n)+")
_PLAIN_BEGIN = re.compile(rb"(?:[^\r\n\x1b]|\x1b\[[0-9;]*m)*(?:\x1b(?:\[[0-9;]*)?)?")


def without_escapes(data: bytes) -> bytes:
    """Return a line without escape sequences."""
    return _ESCAPE.sub(b"", data) if b"\x1b" in data else data


def only_colours(text: bytes) -> bytes:
    """Return a line with colours as its only escape sequences, and a reset at its end if it has any."""
    if b"\x1b" not in text:
        return text
    return _ESCAPE.sub(lambda match: match[0] if match[2] == b"m" else b"", text) + RESET


def is_plain(data: bytes) -> bool:
    """Return whether these are whole lines without carriage returns, and without escape sequences other than colours."""
    return _PLAIN.fullmatch(data) is not None


def is_plain_begin(data: bytes) -> bool:
    """Return whether this is the beginning of such a line; it may end inside an escape sequence."""
    return _PLAIN_BEGIN.fullmatch(data) is not None


def rows_up(data: bytes) -> int:
    """Return by how many rows the escape sequences of a line move the cursor up."""
    found = (match for match in _ESCAPE.finditer(data) if match[2] in (b"A", b"F")) if b"\x1b" in data else ()
    return sum(number(match[1]) for match in found)


def width(data: bytes) -> int:
    """Return how many columns the text of a row takes."""
    text = without_escapes(data)
    if text.isascii():
        return max(map(len, text.split(b"\r")))
    return max(sum(map(_columns, part)) for part in text.decode(errors="replace").split("\r"))


def _columns(char: str) -> int:
    if unicodedata.combining(char) or char in "\u200b\u200d\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def number(parameters: bytes) -> int:
    """Return the number in the parameters of an escape sequence, at least 1."""
    if not parameters.isdigit():
        return 1
    return max(1, int(parameters)) if len(parameters) <= _MAX_DIGITS else 10**_MAX_DIGITS
