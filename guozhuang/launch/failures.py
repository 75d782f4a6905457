"""Which rank failed first, in words, and the exit code that follows from it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from guozhuang.launch import tracebacks
from guozhuang.watch.report import EXIT_CODE

_LAST_LINES = 12  # that are shown of the rank that failed first
_LEAVING_LINES = 3  # that a rank may print between its traceback and its end
_HANG = "(--hang-timeout "  # in the line of a heartbeat's report before the one that says who held the others up
_OUT_OF_MEMORY = "if nobody sent it, the machine ran out of memory"


@dataclass(frozen=True)
class Failure:
    """The end of a rank that did not end with 0.

    Attributes:
        rank: its number in the world.
        exitcode: as of ``subprocess``: negative for a signal.
        pid: of its process.
        ended: when its process ended, in seconds of any clock that is the same for all ranks.
        lines: the last lines it printed, where they were seen; with ``times``, when each came, by the clock of ``ended``
            (0.0: not known).
        times: as long as ``lines``, or empty.
    """

    rank: int
    exitcode: int
    pid: int
    ended: float
    lines: Sequence[str] = ()
    times: Sequence[float] = ()

    @property
    def traceback(self) -> Sequence[str]:
        """The Python traceback it printed; empty without one. A process that was killed may have one of earlier."""
        begin, end = self._place
        return self.lines[begin:end]

    @property
    def before(self) -> Sequence[str]:
        """The last lines it printed before the traceback."""
        begin = self._place[0]
        return _without_blanks(self.lines[:begin])[-_LAST_LINES:]

    @property
    def after(self) -> Sequence[str]:
        """The last lines it printed; behind the traceback, if it printed one."""
        return _without_blanks(self.lines[self._place[1] :])[-_LAST_LINES:]

    @property
    def stated(self) -> str:
        """The line of the traceback that tells the exception."""
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
        """Whether it had raised an exception, and the launcher's SIGTERM came while it was still leaving.

        That takes a process with much to close a second or more, in which another one can lose it and end before it.
        """
        if self.exitcode != -signal.SIGTERM:
            return False
        found = tracebacks.last(self.lines)
        return found is not None and len(self.lines) - found[1] <= _LEAVING_LINES

    @property
    def code(self) -> int:
        """What it would have ended with by itself, as of ``subprocess``: 1 for an exception."""
        return 1 if self.was_leaving else self.exitcode

    @property
    def failed(self) -> float:
        """When it failed: when it began to print its traceback, which can be long before its end."""
        found = tracebacks.last(self.lines) if self.traceback and self.times else None
        return min(self.times[found[0]] or self.ended, self.ended) if found else self.ended

    @property
    def hang(self) -> str:
        """Who held the ranks up, where its heartbeat ended it (``--hang-timeout``); a script may use the same exit code."""
        lines = list(self.lines)
        at = next((i for i in reversed(range(len(lines))) if _HANG in lines[i]), None)
        return "" if self.exitcode != EXIT_CODE or at is None else next(iter(lines[at + 1 : at + 2]), "")

    @property
    def is_reaction(self) -> bool:
        """Whether it says itself that another rank had ended before."""
        return self.exitcode not in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS) and (
            tracebacks.speaks_of_lost_peer(self.traceback or self.lines[-_LAST_LINES:])
        )


def first(failures: Mapping[int, Failure]) -> int:
    """The rank whose failure caused the others, by what is known.

    Who was ended by the launcher (SIGTERM) is no cause if there is another one, nor is who says that it lost a peer;
    among the rest, the earliest. At the same moment (a clock may tell seconds only) a signal comes before an exception:
    who is killed did not react to another rank's end.
    """

    def key(rank: int) -> tuple[int, float, bool, int]:
        failure = failures[rank]
        ended = failure.exitcode == -signal.SIGTERM and not failure.was_leaving
        kind = 2 if ended else 1 if failure.is_reaction else 0
        return kind, failure.failed, failure.exitcode >= 0, rank

    return min(failures, key=key)


def exit_code(code: int) -> int:
    """The exit code of a shell for a process that ended with ``code``: 128 + the signal's number for a signal."""
    return 128 - code if code < 0 else code


def headline(failure: Failure, host: str) -> str:
    """``rank 3 failed first: exit code 1 (process 4711 on host node7)``."""
    how_it_ended = "an exception" if failure.was_leaving else how(failure.exitcode)
    if failure.hang:
        words = f"the ranks hung, {failure.hang}"
        return (
            f"{words}\n  rank {failure.rank} ended itself first: {how_it_ended} (process {failure.pid} on host {host})"
        )
    text = f"rank {failure.rank} failed first: {how_it_ended} (process {failure.pid} on host {host})"
    return text + (f"; {_OUT_OF_MEMORY}" if failure.exitcode == -signal.SIGKILL else "")


def describe(failures: Mapping[int, Failure], host: str, num_nodes: int = 1) -> str:
    """What happened: the first failure with its traceback and last lines, then a line for each rank that ended with it.

    Args:
        failures: by rank, of this node.
        host: the name of this node.
        num_nodes: of the run; with several the cause may lie on another one.
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
    """Without empty lines at the end."""
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
    """``exit code 3`` or ``signal 9 (SIGKILL)``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
