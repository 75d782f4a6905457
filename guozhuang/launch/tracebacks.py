"""The Python traceback among the lines that a rank printed, and what it says about the cause. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEAD = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Tracebacks that did not end their process.
_HARMLESS = ("Exception ignored in", "Exception in thread", "--- Logging error ---")
_KIND = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |$)")
_RANK = re.compile(r"^\[rank\d+\]: ?")
# Lines that are no part of an exception's text, as they begin: records of a log, warnings, and our own words.
_RECORD = re.compile(
    r"^(?:\[|[WEIFC]\d{4} |\d{4}[-/]\d\d[-/]\d\d|[A-Z]+:\w|(?:WARNING|ERROR|INFO)\b|guozhuang|\S+:\d+: \w*Warning"
    r"|Exception ignored in|terminate called)"
)
_MAX_MESSAGE = 40  # lines of an exception's text behind its first
# How the end of a rank looks to the others: gloo, the store, NCCL, and our own errors.
_LOST_PEER = re.compile(
    r"PeerLost|Connection (?:closed|reset) by peer|Connection refused|[Bb]roken pipe|Read error \[|Write error \["
    r"|failed to (?:recv|send), got|DistNetworkError|the process that keeps the store .* is gone"
    r"|ncclRemoteError|remote process exited|Socket (?:closed|Timeout)|Application timeout caused pair closure"
    r"|collectives of ranks .* were shut down by rank|negotiated collectives cannot go on: rank \d+ has shut down"
    r"|rank \d+ .*is (?:gone|lost); negotiated collectives"
)


def plain(line: str) -> str:
    """A line without the ``[rank1]: `` that torch sets before those of a traceback once there is a process group."""
    return _RANK.sub("", line)


def last(lines: Sequence[str]) -> tuple[int, int] | None:
    """Where the traceback that ended the process begins and ends, with those it was chained to; None if there is none.

    Args:
        lines: the last lines that were printed, without their ends.
    """
    found, harmless = None, None
    end = 0
    for index, line in enumerate(lines):
        if index < end or not _HEAD.match(line):
            continue
        begin, end = index, _end(lines, index)
        before = [text for text in lines[max(0, begin - 3) : begin] if text.strip()]
        if found is not None and len(before) == 1 and before[0] in _CHAINED and _gap(lines, found[1], begin):
            begin = found[0]
        elif before and before[-1].startswith(_HARMLESS):
            harmless = begin, end
            continue
        found = begin, end
    return found or harmless


def with_message(lines: Sequence[str], end: int) -> int:
    """Where the text of the exception ends, if the process printed nothing behind it but what looks like a log.

    Args:
        lines: the last lines of a process that ended by its exception.
        end: behind the traceback, as ``last`` told it: the first line of the text, and those that are indented.
    """
    index = end
    while index < len(lines) and not _RECORD.match(lines[index]):
        index += 1
    while index > end and not lines[index - 1].strip():
        index -= 1
    return index if index - end <= _MAX_MESSAGE else end


def speaks_of_lost_peer(lines: Sequence[str]) -> bool:
    """Whether an exception tells that another rank ended, and so is no cause itself.

    Args:
        lines: the traceback, or the last lines where there is none.
    """
    return any(_LOST_PEER.search(line) for line in lines)


def _gap(lines: Sequence[str], end: int, begin: int) -> bool:
    """Whether nothing but a sentence of ``_CHAINED`` stands between two tracebacks."""
    return all(not text.strip() or text in _CHAINED for text in lines[end:begin])


def _end(lines: Sequence[str], begin: int) -> int:
    """The index behind a traceback: the stack is indented, the exception is not and may have further lines."""
    index = begin + 1
    while index < len(lines) and (lines[index].startswith(" ") or not lines[index].strip()):
        index += 1
    if index < len(lines) and _KIND.match(lines[index]):
        index += 1
        # A text of several lines goes on; an empty line may stand in it, and other output is not told from it for sure.
        while index < len(lines) and lines[index].startswith((" ", "\t")):
            index += 1
    return index
