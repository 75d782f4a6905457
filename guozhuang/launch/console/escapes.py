"""Remove, filter and interpret the terminal escape sequences in a program's output. Pure."""

from __future__ import annotations

import re
import unicodedata

RESET = b"\x1b[0m"
_MAX_DIGITS = 9  # a number with more digits is not parsed: int() raises for some thousands of digits
# Matches an escape sequence: a control sequence (group 1: its parameters, 2: its kind), a link or title, or a short sequence.
ESCAPE = rb"\x1b\[([0-?]*)[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]"
_ESCAPE = re.compile(ESCAPE)
# Match whole lines, and the beginning of a line, that have no escape sequences except colours.
_PLAIN_LINE = rb"[^\r\n\x1b]*(?:\x1b\[[0-9;]*m[^\r\n\x1b]*)*"
_PLAIN = re.compile(rb"(?:" + _PLAIN_LINE + rb"\n)+")
_PLAIN_BEGIN = re.compile(_PLAIN_LINE + rb"(?:\x1b(?:\[[0-9;]*)?)?")


def without_escapes(data: bytes) -> bytes:
    """Return a line without escape sequences."""
    return _ESCAPE.sub(b"", data) if b"\x1b" in data else data


def only_colours(text: bytes) -> bytes:
    """Return a line without its escape sequences other than colours, with a reset at the end if it had any sequence."""
    if b"\x1b" not in text:
        return text
    return _ESCAPE.sub(lambda match: match[0] if match[2] == b"m" else b"", text) + RESET


def is_plain(data: bytes) -> bool:
    """Return whether the bytes are whole lines without carriage returns and without escape sequences other than colours."""
    return _PLAIN.fullmatch(data) is not None


def is_plain_begin(data: bytes) -> bool:
    """Return whether the bytes begin a line that ``is_plain`` would accept; they may end inside an escape sequence."""
    return _PLAIN_BEGIN.fullmatch(data) is not None


def rows_up(data: bytes) -> int:
    """Return by how many rows the escape sequences of a line move the cursor up."""
    found = (match for match in _ESCAPE.finditer(data) if match[2] in (b"A", b"F")) if b"\x1b" in data else ()
    return sum(number(match[1]) for match in found)


def width(data: bytes) -> int:
    """Return how many columns of the terminal the text of a row takes, without its escape sequences."""
    text = without_escapes(data)
    if text.isascii():
        return max(map(len, text.split(b"\r")))
    return max(sum(map(_columns, part)) for part in text.decode(errors="replace").split("\r"))


def _columns(char: str) -> int:
    if unicodedata.combining(char) or char in "\u200b\u200d\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def number(parameters: bytes) -> int:
    """Return the number that is the parameter of an escape sequence; 1 if it is missing or 0."""
    if not parameters.isdigit():
        return 1
    return max(1, int(parameters)) if len(parameters) <= _MAX_DIGITS else 10**_MAX_DIGITS
