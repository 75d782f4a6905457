"""What one model of one worker has: its meeting, a line to each server, and the server in this process, if it is one.

[Note: the end] Who drops the model says goodbye to the servers in the background. Who ends in peace says goodbye and, where the
workers serve, stays until all others have said it too, or the limit has passed: they may still need this server. Who ends
after an error ends all connections, so that the others learn of it at once.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Iterable

import torch.distributed as dist

from . import meeting
from .lines import CREDIT_PARTS, Errand, Line
from .session import Session

_GOODBYE_S = 5.0


class Links:
    """The lines of one model. Every rank of the group must construct it, and take part in the same errands.

    Args:
        group: the workers.
        servers: see :func:`meeting.num_servers`.
        part_bytes: size of a part, in bytes.

    Attributes:
        lines: to each server; none where a single worker needs none.
    """

    def __init__(self, group: dist.ProcessGroup, servers: int | None, part_bytes: int) -> None:
        met = meeting.of_workers(group, servers)
        self.lines: list[Line] = []
        if met is None:
            return
        home = Session(met) if met.serves_too else None
        credit = CREDIT_PARTS * part_bytes
        self.lines = [Line(met, s, credit, home if s == met.rank else None) for s in met.servers]
        ending = _Ending(met, self.lines, home)
        self._finalizer = weakref.finalize(self, ending.in_background)
        self._finalizer.atexit = False
        atexit.register(ending.at_exit)

    def send(self, errands: Iterable[tuple[int, Errand]]) -> None:
        """Hand (server, errand) pairs to the lines."""
        by_line: dict[int, list[Errand]] = {}
        for server, errand in errands:
            by_line.setdefault(server, []).append(errand)
        for server, of_line in by_line.items():
            self.lines[server].add(of_line)

    def close(self) -> None:
        """Say goodbye to the servers, in the background. Not collective."""
        if self.lines:
            self._finalizer()


class _Ending:
    """See [Note: the end]."""

    def __init__(self, met: meeting.Meeting, lines: list[Line], home: Session | None) -> None:
        self._meeting, self._lines, self._home = met, lines, home

    def in_background(self) -> None:
        # Locks are for the thread: this may be called by the garbage collector, wherever that happens to run.
        threading.Thread(target=self._finish, name="guozhuang leaves servers", daemon=True).start()

    def _finish(self) -> None:
        for line in self._lines:
            line.hang_up()
        for line in self._lines:
            line.wait(self._meeting.limit_s)
        if self._home is not None:
            self._home.wait()
        self._meeting.crossing.close()
        atexit.unregister(self.at_exit)

    def at_exit(self) -> None:
        if getattr(sys, "last_value", None) is not None:
            self._meeting.give_up(self._meeting.rank, f"{self._meeting.names[self._meeting.rank]} ended after an error")
            return
        for line in self._lines:
            line.hang_up()
        for line in self._lines:
            line.wait(_GOODBYE_S)
        if self._home is not None:
            self._home.end(self._meeting.limit_s)
