"""Show the output of several hosts on the launcher's own standard output and standard error.

Each agent has already cut its ranks' output into whole lines with marks. This module keeps lines of different hosts apart, and
keeps the progress bars of rank 0, which is on the first host, alive as in a run on one node.
"""

from __future__ import annotations

import itertools
import re
import select
import time
from collections.abc import Callable

from guozhuang.launch.console.say import WHO
from guozhuang.launch.console.screen import Lines
from guozhuang.launch.console.target import Target, is_same
from guozhuang.launch.hosts.link import Link

# An unfinished line of the first host is held back this long, because a pipe may cut a line anywhere.
_PATIENCE_S = 0.05
# After a signal: if the reader of our output takes nothing for this long, the rest is dropped.
_OVER_S = 0.2
# A plain line (without carriage returns and escape sequences other than colours), and the beginning of one.
_PLAIN = re.compile(rb"(?:[^\r\n\x1b]|\x1b\[[0-9;]*m)*\n")
_PLAIN_BEGIN = re.compile(rb"(?:[^\r\n\x1b]|\x1b\[[0-9;]*m)*(?:\x1b(?:\[[0-9;]*)?)?")


class Display:
    """The launcher's standard output and standard error, and unfinished lines that are held back.

    Args:
        is_over: returns whether the launcher got a signal; until then, writing may wait for the reader without limit.
    """

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self._is_over = is_over
        self._takes_nothing: set[int] = set()
        out = Target(1, wait=self._wait_for_room)
        self._targets = {"stdout": out, "stderr": out if is_same(1, 2) else Target(2, wait=self._wait_for_room)}
        self._lines: dict[tuple[int, str], Lines] = {}
        self._held: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        self._is_in_line = {"stdout": False, "stderr": False}  # whether the first host's output ends inside a line
        self._since = {"stdout": 0.0, "stderr": 0.0}  # when the held text arrived

    @property
    def terminals(self) -> list[list[bool]]:
        """Return whether each stream is a terminal, and whether to colour marks, for agents, whose own streams are pipes."""
        return [[each.is_terminal, each.colour] for each in self._targets.values()]

    def take(self, link: Link, stream: str, data: bytes) -> None:
        """Show output of a host.

        Args:
            link: the host; the first one has rank 0.
            stream: "stdout" or "stderr".
            data: the bytes, which may end inside a line.
        """
        if link.node_rank:
            self._show_lines(stream, self._of(link.node_rank, stream).feed(data))
            return
        was_held = bool(self._held[stream])
        whole, end, self._held[stream] = (self._held[stream] + data).rpartition(b"\n")
        if end:
            self._show_live(stream, whole + end)
        if end or not was_held:
            self._since[stream] = time.monotonic()
        self.show_what_waits()

    @property
    def is_holding(self) -> bool:
        """Return whether ``show_what_waits`` must be called again soon."""
        return any(self._held.values())

    def show_what_waits(self) -> None:
        """Show unfinished lines of the first host: progress bars at once, plain lines after ``_PATIENCE_S``."""
        for stream, held in self._held.items():
            is_due = time.monotonic() > self._since[stream] + _PATIENCE_S or not _PLAIN_BEGIN.fullmatch(held)
            if held and is_due:
                self._held[stream] = b""
                self._show_live(stream, held)

    def close(self, link: Link) -> None:
        """Show the unfinished lines of a host whose link has closed."""
        for stream in self._targets:
            if link.node_rank:
                self._show_lines(stream, self._of(link.node_rank, stream).rest())
            elif self._held[stream]:
                held, self._held[stream] = self._held[stream], b""
                self._show_live(stream, held)

    def say(self, text: str) -> None:
        """Print a message of the launcher on standard error, in a line of its own."""
        self.end_lines()
        self._targets["stderr"].write(f"{WHO}: {text}\n".encode(errors="replace"))

    def end_lines(self) -> None:
        """End unfinished lines, so that the next output begins in a new line."""
        for target in self._targets.values():
            target.screen.end()

    def _wait_for_room(self, descriptor: int) -> bool:
        """Wait until the descriptor has room; return False if the launcher got a signal and the reader takes nothing."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        # Each wait is short, because a signal that comes just before it would not interrupt it.
        while not poll.poll(0 if descriptor in self._takes_nothing else 1000 * _OVER_S):
            if self._is_over():
                self._takes_nothing.add(descriptor)
                return False
        self._takes_nothing.discard(descriptor)
        return True

    def _of(self, node_rank: int, stream: str) -> Lines:
        return self._lines.setdefault((node_rank, stream), Lines())

    def _show_lines(self, stream: str, lines: list[bytes]) -> None:
        self._targets[stream].screen.lines(b"", lines)

    def _show_live(self, stream: str, data: bytes) -> None:
        """Show output of the first host as it comes. Plain lines go above a progress bar of its other stream."""
        screen = self._targets[stream].screen
        pieces = re.findall(rb"[^\n]*\n|[^\n]+", data)
        for is_plain, group in itertools.groupby(pieces, lambda piece: self._is_plain(stream, piece)):
            if is_plain:
                screen.lines(b"", [piece[:-1] for piece in group])
            else:
                screen.live(_owner(stream), b"", b"".join(group))

    def _is_plain(self, stream: str, piece: bytes) -> bool:
        """Return whether a piece is a whole plain line. Must be called for each piece in order."""
        was_in_line, self._is_in_line[stream] = self._is_in_line[stream], not piece.endswith(b"\n")
        return not was_in_line and _PLAIN.fullmatch(piece) is not None


def _owner(stream: str) -> int:
    return 1 if stream == "stdout" else 2
