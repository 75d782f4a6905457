"""What a program that calls the launcher as a function orders besides the command line, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FirstFailure:
    """What ended a run.

    Attributes:
        who: "rank 3 on host node7", or the host where no rank is known.
        code: its exit code, 128 + the number for a signal.
    """

    who: str
    code: int


def _nothing(failure: FirstFailure) -> None:
    pass


@dataclass(frozen=True)
class Order:
    """As it stands, nothing besides the command line.

    Attributes:
        variables: for the environment of the ranks, on every host.
        failed: called with what ended the run, where a rank or a host did.
        is_here: whether a host is this machine, so that no ssh is needed; None: as ``ssh.is_this_machine`` says.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    failed: Callable[[FirstFailure], None] = _nothing
    is_here: Callable[[str], bool] | None = None
