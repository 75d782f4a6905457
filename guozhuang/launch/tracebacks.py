"""Find the Python traceback among the lines that a rank printed, and whether it reports a lost peer. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEAD = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
# What Python prints between the tracebacks of two exceptions of which one came of the other.
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Beginnings of the line before a traceback that did not end its process.
_HARMLESS = ("Exception ignored in", "Exception in thread", "--- Logging error ---")
_KIND = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |$)")
_RANK = re.compile(r"^\[rank\d+\]: ?")
# Beginnings of lines that are not part of an exception's text: log records, warnings, and our own messages.
_RECORD = re.compile(
    r"^(?:\[|[WEIFC]\d{4} |\d{4}[-/]\d\d[-/]\d\d|[A-Z]+:\w|(?:WARNING|ERROR|INFO)\b|guozhuang|\S+:\d+: \w*Warning"
    r"|Exception ignored in|terminate called)"
)
_MAX_MESSAGE = 40  # an exception's text has at most this many lines after its first; otherwise they are other output
# Matches errors that ranks print when another rank has ended: those of gloo, the store, NCCL and torch RPC, and our own.
_LOST_PEER = re.compile(
    r"PeerLost|Connection (?:closed|reset) by peer|Connection refused|[Bb]roken pipe|Read error \[|Write error \["
    r"|failed to (?:recv|send), got|DistNetworkError|the process that keeps the store .* is gone"
    r"|this error originated at tensorpipe"
    r"|ncclRemoteError|remote process exited|Socket (?:closed|Timeout)|Application timeout caused pair closure"
    r"|collectives of ranks .* were shut down by rank|negotiated collectives cannot go on: rank \d+ has shut down"
    r"|rank \d+ .*is (?:gone|lost); negotiated collectives"
)


def plain(line: str) -> str:
    """Return a line without the prefix ``[rank1]: ``, which torch adds to tracebacks once there is a process group."""
    return _RANK.sub("", line)


def last(lines: Sequence[str]) -> tuple[int, int] | None:
    """Return (begin, end), a slice of the lines, of the traceback that ended the process, with chained ones; else None.

    Args:
        lines: the last lines that the process printed, without line ends.
    """
    found, harmless = None, None
    end = 0
    for index, line in enumerate(lines):
        if index < end or not _HEAD.match(line):
            continue
        begin, end = index, _end(lines, index)
        before = [text for text in lines[max(0, begin - 3) : begin] if text.strip()]
        if found is not None and len(before) == 1 and before[0] in CHAINED and _gap(lines, found[1], begin):
            begin = found[0]
        elif before and before[-1].startswith(_HARMLESS):
            harmless = begin, end
            continue
        found = begin, end
    return found or harmless


def with_message(lines: Sequence[str], end: int) -> int:
    """Return the index after the exception's text, which ends where lines of a log begin; ``end`` if it would be too long.

    Args:
        lines: the last lines of a process that ended by its exception.
        end: the end that ``last`` returned; it includes the first line of the text and indented lines after it.
    """
    index = end
    while index < len(lines) and not _RECORD.match(lines[index]):
        index += 1
    while index > end and not lines[index - 1].strip():
        index -= 1
    return index if index - end <= _MAX_MESSAGE else end


def exception_line(lines: Sequence[str]) -> str | None:
    """Return the line of a traceback that names the exception ("" for a group of exceptions); None if it is missing.

    It is missing if the process was ended while it printed the traceback, and if another thread printed a line meanwhile: then
    the rest of the traceback stands after that line.

    Args:
        lines: the slice that ``last`` returned.
    """
    if lines[0].startswith(" "):
        return ""
    found = next((line for line in reversed(lines) if line.strip() and not line.startswith((" ", "\t"))), "")
    return None if _HEAD.match(found) or found in CHAINED else found


def speaks_of_lost_peer(lines: Sequence[str]) -> bool:
    """Return whether an exception reports that another rank ended, so that it is not the cause itself.

    Args:
        lines: the traceback, or the last lines where there is none.
    """
    return any(_LOST_PEER.search(line) for line in lines)


def _gap(lines: Sequence[str], end: int, begin: int) -> bool:
    """Return whether only a sentence of ``CHAINED`` stands between two tracebacks."""
    return all(not text.strip() or text in CHAINED for text in lines[end:begin])


def _end(lines: Sequence[str], begin: int) -> int:
    """Return the index after a traceback: an indented stack, then the exception's line, then its indented lines."""
    index = begin + 1
    while index < len(lines) and (lines[index].startswith(" ") or not lines[index].strip()):
        index += 1
    if index < len(lines) and _KIND.match(lines[index]):
        index += 1
        # Only indented lines surely belong to the exception's text; a line without indent may be output of the program.
        while index < len(lines) and lines[index].startswith((" ", "\t")):
            index += 1
    return index
