"""Which rank failed first, in words, and the exit code that follows from it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Protocol


class Failure(Protocol):
    """What is used of torch elastic's record of a failed rank: ``exitcode`` is negative for a signal."""

    local_rank: int
    pid: int
    exitcode: int
    timestamp: int


def first(failures: Mapping[int, Failure]) -> int:
    """The rank whose failure caused the others, by what is known.

    Torch elastic dates a failure to the second it looked, so several share a date. A rank that was ended by a signal did
    not react to another one's end; the exception of a rank may well be such a reaction. SIGTERM is how torch elastic
    ends the others.
    """

    def key(rank: int) -> tuple[int, int, int]:
        code = failures[rank].exitcode
        kind = 2 if code == -signal.SIGTERM else 0 if code < 0 else 1
        return kind, failures[rank].timestamp, rank

    return min(failures, key=key)


def exit_code(code: int) -> int:
    """The exit code of a shell for a process that ended with ``code``: 128 + the signal's number for a signal."""
    return 128 - code if code < 0 else code


def describe(failures: Mapping[int, Failure]) -> str:
    """One line on the first failure, one on the others if there are any."""
    cause = first(failures)
    failure = failures[cause]
    text = f"rank {cause} failed first: {_how(failure.exitcode)} (process {failure.pid})"
    if failure.exitcode == -signal.SIGKILL:
        text += "; if nobody sent it, the machine ran out of memory"
    others = [f"rank {rank}: {_how(failures[rank].exitcode)}" for rank in sorted(failures) if rank != cause]
    return text + (f"\nthen {', '.join(others)}" if others else "")


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
