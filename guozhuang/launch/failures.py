"""Determine which rank failed first, the text about it for the user, and the exit code of the run. Pure."""

from __future__ import annotations

import functools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from guozhuang.launch import tracebacks
from guozhuang.units import ranks_text

_LAST_LINES = 12  # how many last lines of the rank that failed first the report shows
_LEAVING_LINES = 3  # a rank that printed at most this many lines after a traceback was ending because of it
OUT_OF_MEMORY = "if nobody sent it, the machine ran out of memory"


@dataclass(frozen=True)
class Failure:
    """The failure of a rank: how its process ended, with an exit code other than 0, and its last output.

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

    @functools.cached_property
    def _found(self) -> tuple[int, int] | None:
        return tracebacks.last(self.lines)

    @functools.cached_property
    def _place(self) -> tuple[int, int]:
        if self._found is None or not (self.exitcode > 0 or self.exitcode == -signal.SIGABRT or self.was_leaving):
            return 0, 0
        return self._found[0], tracebacks.with_message(self.lines, self._found[1])

    @property
    def traceback(self) -> Sequence[str]:
        """Return the Python traceback that ended the rank, in lines; empty if something else did, such as SIGKILL."""
        begin, end = self._place
        return self.lines[begin:end]

    @property
    def before(self) -> Sequence[str]:
        """Return the last lines that the rank printed before its traceback."""
        return _last_lines(self.lines[: self._place[0]])

    @property
    def after(self) -> Sequence[str]:
        """Return the last lines that the rank printed after its traceback, or of all its lines if it has no traceback."""
        return _last_lines(self.lines[self._place[1] :])

    @functools.cached_property
    def _exception_line(self) -> str | None:
        return None if self._found is None else tracebacks.exception_line(self.lines[slice(*self._found)])

    @property
    def stated(self) -> str:
        """Return the line of the traceback that names the exception; "" without a traceback, or if the line is missing."""
        return (self._exception_line or "") if self.traceback else ""

    @property
    def was_leaving(self) -> bool:
        """Return whether the rank had raised an exception, and was still shutting down when the launcher's SIGTERM ended it.

        Shutting down can take a second or more; meanwhile another rank can lose the connection to this one and end first.
        """
        is_terminated = self.exitcode == -signal.SIGTERM
        return is_terminated and self._found is not None and len(self.lines) - self._found[1] <= _LEAVING_LINES

    @property
    def _was_printing(self) -> bool:
        """Return whether SIGTERM ended the rank while it printed its traceback, so that its exception may not be known.

        Python may write the name, the colon and the text of the exception one by one, so a name alone may lack its text.
        """
        line = self._exception_line
        return self.was_leaving and (line is None or (line != "" and not line.partition(":")[2].strip()))

    @property
    def code(self) -> int:
        """Return the exit code of the rank; 1, as for an exception, if ``was_leaving``."""
        return 1 if self.was_leaving else self.exitcode

    @property
    def failed(self) -> float:
        """Return the time of the failure: when the rank began to print its traceback, which can be long before its end."""
        began = self.times[self._place[0]] if self.traceback and self.times else 0.0
        return min(began or self.ended, self.ended)

    @property
    def is_reaction(self) -> bool:
        """Return whether another rank's end caused this one: the launcher ended the rank, or its output reports a lost peer."""
        return self._distance > 0

    @property
    def _distance(self) -> int:
        """Return how far this failure is from the cause.

        0: it may be the cause. 1: the rank lost a peer; or the launcher ended it before it had printed which exception it
        raised, and that may have been a lost peer. 2: the launcher ended it.
        """
        if self.code == -signal.SIGTERM:
            return 2
        if self.exitcode in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS):
            return 0
        if self._was_printing:
            return 1
        printed = self.traceback or self.lines[-_LAST_LINES:]
        if self.traceback and self._exception_line is None:
            # Another thread has printed lines into the traceback, whose rest stands after them.
            printed = self.lines[self._place[0] :]
        return int(tracebacks.speaks_of_lost_peer(printed))


def first(failures: Mapping[int, Failure]) -> int:
    """Return the rank whose failure most likely caused the other failures.

    A rank that the launcher ended (SIGTERM) or that reports a lost peer is the cause only if there is no other rank. So is a
    rank that the launcher ended while it still printed its traceback, which may have been about to report a lost peer. Among
    the rest the earliest failure counts. At equal times (a clock may have a resolution of seconds) a signal comes before an
    exception, because a rank that was killed did not react to another rank's end.
    """
    return min(failures.values(), key=lambda each: (each._distance, each.failed, each.exitcode >= 0, each.rank)).rank


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
    return text + (f"; {OUT_OF_MEMORY}" if failure.exitcode == -signal.SIGKILL else "")


def describe(failures: Mapping[int, Failure], host: str, num_nodes: int = 1, ended_before: Sequence[int] = ()) -> str:
    """Return the report of a failed run: the first failure with its traceback and last lines, then a line per further rank.

    Args:
        failures: the failures of this node, by rank.
        host: the name of this node.
        num_nodes: number of nodes of the run; with several the cause may lie on another node.
        ended_before: the ranks of this node that had ended with exit code 0 before the first failure.
    """
    cause = first(failures)
    failure = failures[cause]
    text = [headline(failure, host)]
    if num_nodes > 1 and failure.is_reaction:
        text.append("  it was ended by, or lost, a rank of another node: see that node's output for the cause")
    if ended_before and failure.is_reaction:
        who = ranks_text(ended_before)
        text.append(
            f"  {who} had ended before that with exit code 0: every rank must make the same calls until the end"
        )
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


def _last_lines(lines: Sequence[str]) -> Sequence[str]:
    """Return the last ``_LAST_LINES`` of the lines, without empty lines at the end."""
    end = max((index + 1 for index, line in enumerate(lines) if line.strip()), default=0)
    return lines[:end][-_LAST_LINES:]


def _consequence(failure: Failure) -> str:
    text = f"rank {failure.rank}: {how(failure.exitcode)}"
    if failure.exitcode == -signal.SIGTERM:
        return text + ", sent by guozhuang run"
    return text + (f": {failure.stated[:160]}" if failure.stated else "")


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]


def how(code: int) -> str:
    """Describe how a process ended: ``exit code 3`` for 3, ``signal 9 (SIGKILL)`` for -9."""
    name = signal_name(-code)
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({name})" if name.startswith("SIG") else name


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9; ``signal 40`` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
