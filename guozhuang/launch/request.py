"""What the program that starts an agent asks for besides the command line, and how the agent reports the end of its run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RunReport:
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


@dataclass(frozen=True)
class Extension:
    """What a layer for another system's scripts adds to a run. It travels to every host, as JSON.

    Attributes:
        python_path: folders to append to the ranks' PYTHONPATH, relative to the folder of this package.
        of_a_process: variables that tell a process who it is: ranks do not inherit them, and hosts do not get them.
        carried: how the names of further variables begin that every host gets.
        rank_variables: variables of each rank, in which ``{rank}``, ``{size}``, ``{local_rank}``, ``{local_size}``,
            ``{cross_rank}`` (its node among those that have this local rank), ``{cross_size}`` and ``{host}`` are filled in.
        other_names: variables, and how the other system calls them; that name counts where the variable is not set.
    """

    python_path: Sequence[str] = ()
    of_a_process: Sequence[str] = ()
    carried: Sequence[str] = ()
    rank_variables: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)

    def defaults(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that ``environ`` sets by their other names only."""
        found = {name: environ.get(other, "").strip() for name, other in self.other_names.items()}
        return {name: value for name, value in found.items() if value and not environ.get(name)}


NO_EXTENSION = Extension()


def with_folders(path: str, folders: Sequence[str]) -> dict[str, str]:
    """PYTHONPATH with folders of this package at its end; processes that a rank starts inherit it.

    Args:
        path: the user's own, which comes first.
        folders: relative to the package; those that are there already are not added again.
    """
    package = Path(__file__).parents[1]
    missing = [each for each in (str(package / folder) for folder in folders) if each not in path.split(os.pathsep)]
    # An empty variable is none, but an empty entry is the current folder.
    return {"PYTHONPATH": os.pathsep.join([*([path] if path else []), *missing])} if missing else {}


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Request:
    """The caller's side of an agent. The defaults are those of a user at a shell.

    Attributes:
        extension: of a layer for another system's scripts.
        host: the name of this host as the user knows it; "": its own.
        variables: further environment variables of the ranks, on every host.
        report: called with the end of the run; None: the agent prints the text itself.
        is_here: whether a host is this machine, so that no ssh is needed; None: ``ssh.is_this_machine`` decides.
        attempt: how many times the launcher of several hosts has started all ranks before.
        max_restarts: how many times that launcher may restart all ranks; None: the agent restarts its own ranks itself.
        terminals: for standard output and standard error, whether what is written there ends on a terminal, and whether it
            is to be coloured; None: the agent looks at its own streams.
        finished: called when the ranks of the node have ended well, and those of other nodes are waited for.
    """

    extension: Extension = NO_EXTENSION
    host: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    report: Callable[[RunReport], None] | None = None
    is_here: Callable[[str], bool] | None = None
    attempt: int = 0
    max_restarts: int | None = None
    terminals: tuple[tuple[bool, bool], tuple[bool, bool]] | None = None
    finished: Callable[[], None] = _nothing
