"""Determine which rank failed first, the text about it for the user, and the exit code of the run. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from guozhuang.launch import tracebacks

_LAST_LINES = 12  # number of last lines that are shown of the rank that failed first
_LEAVING_LINES = 3  # number of lines that a rank may print between its traceback and its end
_OUT_OF_MEMORY = "if nobody sent it, the machine ran out of memory"


@dataclass(frozen=True)
class Failure:
    """The end of a rank whose exit code is not 0.

    Attributes:
        rank: its number in the world.
        exitcode: the exit code as in ``subprocess``: negative for a signal.
        pid: the id of its process.
        ended: when its process ended, in seconds of any clock that is the same for all ranks.
        lines: the last lines it printed; empty where its output was not read.
        times: when each of ``lines`` was read, by the clock of ``ended`` (0.0: not known); or empty.
        hang: the line that names the ranks that hung, if ``--hang-timeout`` ended this rank; else "".
    """

    rank: int
    exitcode: int
    pid: int
    ended: float
    lines: Sequence[str] = ()
    times: Sequence[float] = ()
    hang: str = ""

    @property
    def traceback(self) -> Sequence[str]:
        """Return the lines of the Python traceback that ended it; empty if it ended by something else, such as SIGKILL."""
        begin, end = self._place
        return self.lines[begin:end]

    @property
    def before(self) -> Sequence[str]:
        """Return the last lines it printed before the traceback."""
        begin = self._place[0]
        return _without_blanks(self.lines[:begin])[-_LAST_LINES:]

    @property
    def after(self) -> Sequence[str]:
        """Return the last lines it printed after the traceback, or of all if there is no traceback."""
        return _without_blanks(self.lines[self._place[1] :])[-_LAST_LINES:]

    @property
    def stated(self) -> str:
        """Return the line of the traceback that names the exception; "" without a traceback."""
        if not self.traceback:
            return ""
        found = tracebacks.last(self.lines)
        assert found is not None
        own = self.lines[found[0] : found[1]]
        return next((line for line in reversed(own) if line and not line.startswith((" ", "\t"))), "")

    @property
    def _place(self) -> tuple[int, int]:
        found = tracebacks.last(self.lines)
        if found is None or not (self.exitcode > 0 or self.exitcode == -signal.SIGABRT or self.was_leaving):
            return 0, 0
        return found[0], tracebacks.with_message(self.lines, found[1])

    @property
    def was_leaving(self) -> bool:
        """Return whether it had raised an exception, and the launcher's SIGTERM came while it was still shutting down.

        Shutting down can take a second or more; meanwhile another rank can lose the connection to it and end first.
        """
        if self.exitcode != -signal.SIGTERM:
            return False
        found = tracebacks.last(self.lines)
        return found is not None and len(self.lines) - found[1] <= _LEAVING_LINES

    @property
    def code(self) -> int:
        """Return the exit code, or 1 (that of an exception) if the launcher's SIGTERM came while it was shutting down."""
        return 1 if self.was_leaving else self.exitcode

    @property
    def failed(self) -> float:
        """Return when it failed: when it began to print its traceback, which can be long before its end."""
        found = tracebacks.last(self.lines) if self.traceback and self.times else None
        return min(self.times[found[0]] or self.ended, self.ended) if found else self.ended

    @property
    def is_reaction(self) -> bool:
        """Return whether its output says that another rank had ended before."""
        return self.exitcode not in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS) and (
            tracebacks.speaks_of_lost_peer(self.traceback or self.lines[-_LAST_LINES:])
        )


def first(failures: Mapping[int, Failure]) -> int:
    """Return the rank whose failure most likely caused the other failures.

    A rank that the launcher ended (SIGTERM) or that reports a lost peer is the cause only if there is no other rank. Among
    the rest the earliest failure counts. At equal times (a clock may have a resolution of seconds) a signal comes before an
    exception, because a rank that was killed did not react to another rank's end.
    """

    def key(rank: int) -> tuple[int, float, bool, int]:
        failure = failures[rank]
        ended = failure.exitcode == -signal.SIGTERM and not failure.was_leaving
        kind = 2 if ended else 1 if failure.is_reaction else 0
        return kind, failure.failed, failure.exitcode >= 0, rank

    return min(failures, key=key)


def exit_code(code: int) -> int:
    """Return the exit code that a shell gives a process that ended with ``code``: for a signal, 128 + its number."""
    return 128 - code if code < 0 else code


def headline(failure: Failure, host: str) -> str:
    """Return a line like ``rank 3 failed first: exit code 1 (process 4711 on host node7)``."""
    how_it_ended = "an exception" if failure.was_leaving else how(failure.exitcode)
    if failure.hang:
        words = f"the ranks hung, {failure.hang}"
        return (
            f"{words}\n  rank {failure.rank} ended itself first: {how_it_ended} (process {failure.pid} on host {host})"
        )
    text = f"rank {failure.rank} failed first: {how_it_ended} (process {failure.pid} on host {host})"
    return text + (f"; {_OUT_OF_MEMORY}" if failure.exitcode == -signal.SIGKILL else "")


def describe(failures: Mapping[int, Failure], host: str, num_nodes: int = 1) -> str:
    """Return the report of a failed run: the first failure with its traceback and last lines, then a line per further rank.

    Args:
        failures: the failures of this node, by rank.
        host: the name of this node.
        num_nodes: number of nodes of the run; with several the cause may lie on another node.
    """
    cause = first(failures)
    failure = failures[cause]
    text = [headline(failure, host)]
    if num_nodes > 1 and (failure.is_reaction or failure.code == -signal.SIGTERM):
        text.append("  it was ended by, or lost, a rank of another node: see that node's output for the cause")
    traceback = failure.traceback
    text += _indented(traceback)
    if traceback and failure.before:
        text += [f"the last lines of rank {cause} before that:", *_indented(failure.before)]
    if failure.after:
        text += [f"the last lines of rank {cause}:", *_indented(failure.after)]
    others = [rank for rank in sorted(failures) if rank != cause]
    if others:
        text += ["ended because of it:", *(f"  {_consequence(failures[rank])}" for rank in others)]
    return "\n".join(text)


def _without_blanks(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines without empty lines at the end."""
    end = len(lines)
    while end and not lines[end - 1].strip():
        end -= 1
    return lines[:end]


def _consequence(failure: Failure) -> str:
    text = f"rank {failure.rank}: {how(failure.exitcode)}"
    if failure.exitcode == -signal.SIGTERM:
        return text + ", sent by guozhuang run"
    return text + (f": {failure.stated[:160]}" if failure.stated else "")


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]


def how(code: int) -> str:
    """Return ``exit code 3`` or ``signal 9 (SIGKILL)``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
