"""Show the output of several hosts on the launcher's own standard output and standard error.

Each agent has already cut its ranks' output into whole lines, each with a mark of its rank. This module keeps lines of
different hosts apart, and shows the progress bars of rank 0, which is on the first host, as in a run on one node.
"""

from __future__ import annotations

import select
from collections.abc import Callable

from guozhuang.launch.console.lines import LiveText, WholeLines
from guozhuang.launch.console.say import WHO
from guozhuang.launch.console.target import Target, is_same
from guozhuang.launch.hosts.link import Link

# Seconds; after a signal the rest of the output is dropped if its reader takes nothing for so long.
_OVER_S = 0.2


class Display:
    """Writes the output of all hosts to the launcher's standard output and standard error; holds unfinished lines back.

    Args:
        is_over: returns whether the launcher got a signal; until then, writing may wait for the reader without limit.
    """

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self._is_over = is_over
        self._takes_nothing: set[int] = set()
        out = Target(1, wait=self._wait_for_room)
        self._targets = {"stdout": out, "stderr": out if is_same(1, 2) else Target(2, wait=self._wait_for_room)}
        # "stdout", "stderr" -> the stream of the first host, whose rank 0 may draw progress bars.
        self._live = {name: LiveText(target.screen, b"") for name, target in self._targets.items()}
        self._others: dict[tuple[int, str], WholeLines] = {}

    @property
    def terminals(self) -> list[list[bool]]:
        """Return for stdout and stderr [is it a terminal, are marks coloured]; agents, whose own streams are pipes, need it."""
        return [[each.is_terminal, each.colour] for each in self._targets.values()]

    def take(self, link: Link, stream: str, data: bytes) -> None:
        """Show output that a host has sent.

        Args:
            link: the host; the first one has rank 0.
            stream: "stdout" or "stderr".
            data: the bytes, which may end inside a line.
        """
        self._of(link, stream).feed(data)
        self.show_what_waits()

    @property
    def is_holding(self) -> bool:
        """Return whether the beginning of a line is held back, so that ``show_what_waits`` must be called again soon."""
        return any(live.is_waiting for live in self._live.values())

    def show_what_waits(self) -> None:
        """Show each beginning of a line of the first host that has been held back long enough."""
        for live in self._live.values():
            live.show_what_waits()

    def close(self, link: Link) -> None:
        """Show the unfinished lines of a host whose connection has closed."""
        for stream in self._targets:
            self._of(link, stream).finish()

    def say(self, text: str) -> None:
        """Print a message of the launcher on standard error, in a line of its own.

        While rank 0 has the full screen the message is held back, until rank 0 leaves it or ``end_lines`` is called.
        """
        self._targets["stderr"].screen.lines(b"", f"{WHO}: {text}".encode(errors="replace").split(b"\n"))

    def end_lines(self) -> None:
        """End unfinished lines and reset the screen, so that the next output, such as the shell's, begins in a new line.

        A rank or agent that was killed cannot leave the full screen or show the cursor itself.
        """
        for target in self._targets.values():
            target.screen.end()

    def _wait_for_room(self, descriptor: int) -> bool:
        """Wait until the descriptor can take output; return False if its reader takes none after a signal to the launcher."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        # Each call of poll() is short, because a signal that arrives just before the call would not interrupt it.
        while not poll.poll(0 if descriptor in self._takes_nothing else 1000 * _OVER_S):
            if self._is_over():
                self._takes_nothing.add(descriptor)
                return False
        self._takes_nothing.discard(descriptor)
        return True

    def _of(self, link: Link, stream: str) -> LiveText | WholeLines:
        if link.node_rank == 0:
            return self._live[stream]
        return self._others.setdefault((link.node_rank, stream), WholeLines(self._targets[stream].screen, b""))
