"""What the program that starts an agent asks for besides the command line, and how the agent reports the end of its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """How the run of a node, or of all hosts, ended. The launcher of several hosts receives it as JSON.

    Attributes:
        text: what the user is told, in paragraphs; empty if all ended well.
        who: the rank that failed first, as in "rank 3"; empty if no rank is known.
        host: the name of its host.
        code: the exit code that follows, 128 + the number for a signal.
        is_cause: whether the first failure happened on this node, as far as this node knows.
    """

    text: str = ""
    who: str = ""
    host: str = ""
    code: int = 0
    is_cause: bool = True

    @property
    def title(self) -> str:
        """``rank 3 on host node7``, or the host alone."""
        return f"{self.who} on host {self.host}" if self.who else f"host {self.host}"


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Request:
    """The caller's side of an agent. The defaults are those of a user at a shell.

    Attributes:
        variables: further environment variables of the ranks, on every host.
        report: called with the end of the run; None: the agent prints the text itself.
        is_here: whether a host is this machine, so that no ssh is needed; None: ``ssh.is_this_machine`` decides.
        attempt: how many times the launcher of several hosts has started all ranks before.
        max_restarts: how many times that launcher may restart all ranks; None: the agent restarts its own ranks itself.
        terminals: for standard output and standard error, whether what is written there ends on a terminal, and whether it
            is to be coloured; None: the agent looks at its own streams.
        finished: called when the ranks of the node have ended well, and those of other nodes are waited for.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    report: Callable[[Report], None] | None = None
    is_here: Callable[[str], bool] | None = None
    attempt: int = 0
    max_restarts: int | None = None
    terminals: tuple[tuple[bool, bool], tuple[bool, bool]] | None = None
    finished: Callable[[], None] = _nothing
