"""What several hosts print, put together on the launcher's own standard output and standard error.

Each agent has already made whole lines with marks of what its ranks wrote. What is left to do: lines of one host do not come
in the middle of another's, and the progress bars of rank 0, which are on the first host, go on as they do on one node.
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

# An unfinished line of the first host is shown when it has stood for so long: pipes cut lines anywhere.
_PATIENCE_S = 0.05
# How long the reader of our output may take nothing after the launcher was told to end; what is left then is dropped.
_OVER_S = 0.2
# A line that draws over nothing, and the begin of one.
_PLAIN = re.compile(rb"(?:[^\r\n\x1b]|\x1b\[[0-9;]*m)*\n")
_PLAIN_BEGIN = re.compile(rb"(?:[^\r\n\x1b]|\x1b\[[0-9;]*m)*(?:\x1b(?:\[[0-9;]*)?)?")


class Display:
    """The launcher's standard output and standard error, and what waits to be shown there.

    Args:
        is_over: whether the launcher was told to end; until then, whoever reads its output may take as long as they like.
    """

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self._is_over = is_over
        self._takes_nothing: set[int] = set()
        out = Target(1, wait=self._wait_for_room)
        self._targets = {"stdout": out, "stderr": out if is_same(1, 2) else Target(2, wait=self._wait_for_room)}
        self._lines: dict[tuple[int, str], Lines] = {}
        self._held: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        self._is_in_line = {"stdout": False, "stderr": False}  # what was shown of the first host ends amid a line
        self._since = {"stdout": 0.0, "stderr": 0.0}  # when what is held came

    @property
    def terminals(self) -> list[list[bool]]:
        """For each stream whether it ends on a terminal, and whether marks are to be coloured: agents write to pipes."""
        return [[each.is_terminal, each.colour] for each in self._targets.values()]

    def take(self, link: Link, stream: str, data: bytes) -> None:
        """Show what a host has written.

        Args:
            link: the host; the first one has rank 0.
            stream: "stdout" or "stderr".
            data: cut anywhere.
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
        """Whether ``show_what_waits`` has to be called again soon."""
        return any(self._held.values())

    def show_what_waits(self) -> None:
        """Show unfinished lines of the first host: what draws over something, at once; what has stood long enough, too."""
        for stream, held in self._held.items():
            is_due = time.monotonic() > self._since[stream] + _PATIENCE_S or not _PLAIN_BEGIN.fullmatch(held)
            if held and is_due:
                self._held[stream] = b""
                self._show_live(stream, held)

    def close(self, link: Link) -> None:
        """Show what is left of a host that is gone."""
        for stream in self._targets:
            if link.node_rank:
                self._show_lines(stream, self._of(link.node_rank, stream).rest())
            elif self._held[stream]:
                held, self._held[stream] = self._held[stream], b""
                self._show_live(stream, held)

    def say(self, text: str) -> None:
        """Say something of the launcher's own, in a line of its own."""
        self.end_lines()
        self._targets["stderr"].write(f"{WHO}: {text}\n".encode(errors="replace"))

    def end_lines(self) -> None:
        """What comes next begins in a line of its own, whoever writes it."""
        for target in self._targets.values():
            target.screen.end()

    def _wait_for_room(self, descriptor: int) -> bool:
        """Until something can be written; False if the run is over and nobody takes anything."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        # A signal ends no write and no wait that has not begun; so each wait is short.
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
        """What the first host wrote, as it is. Plain lines go above a bar of its other stream."""
        screen = self._targets[stream].screen
        pieces = re.findall(rb"[^\n]*\n|[^\n]+", data)
        for is_plain, group in itertools.groupby(pieces, lambda piece: self._is_plain(stream, piece)):
            if is_plain:
                screen.lines(b"", [piece[:-1] for piece in group])
            else:
                screen.live(_owner(stream), b"", b"".join(group))

    def _is_plain(self, stream: str, piece: bytes) -> bool:
        """Whether this is a whole line that draws over nothing; to be asked for each piece in its turn."""
        was_in_line, self._is_in_line[stream] = self._is_in_line[stream], not piece.endswith(b"\n")
        return not was_in_line and _PLAIN.fullmatch(piece) is not None


def _owner(stream: str) -> int:
    return 1 if stream == "stdout" else 2
