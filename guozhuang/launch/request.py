"""The options that a program passes to an agent besides the command line, and the report of how the agent's run ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from guozhuang.launch.rendezvous.members import Members as Members
from guozhuang.launch.rendezvous.roles import LaunchedRole as LaunchedRole
from guozhuang.launch.rendezvous.roles import launched_role as launched_role
from guozhuang.launch.rendezvous.roles import members_of as members_of


@dataclass(frozen=True)
class RunReport:
    """The report of how the run of a node, or of all hosts, ended. An agent sends it to the launcher of several hosts as JSON.

    Attributes:
        text: the message for the user, in paragraphs; empty if all ranks ended with 0.
        who: the rank that failed first, as in "rank 3"; empty if no rank is known.
        host: the name of the host where the run failed first.
        code: the exit code of the launcher; 128 + the number for a signal.
        is_cause: whether the first failure happened on this node, as far as this node knows.
    """

    text: str = ""
    who: str = ""
    host: str = ""
    code: int = 0
    is_cause: bool = True

    @property
    def title(self) -> str:
        """Return where the run failed first: ``rank 3 on host node7``, or only the host where no rank is known."""
        return f"{self.who} on host {self.host}" if self.who else f"host {self.host}"


@dataclass(frozen=True)
class Extension:
    """Additions of a compatibility layer (for scripts of another system) to a run. The launcher sends it to every host as JSON.

    Attributes:
        python_path: folders to append to the ranks' PYTHONPATH, relative to the folder of this package.
        of_a_process: variables that identify one process: ranks do not inherit them, and they are not sent to hosts.
        carried: prefixes of further environment variables that are sent to every host.
        rank_variables: templates of variables of each rank. ``{rank}``, ``{size}``, ``{local_rank}``, ``{local_size}``,
            ``{cross_rank}`` (index of the node among the nodes that have this local rank), ``{cross_size}``, ``{host}`` are
            filled in.
        other_names: our variables, each mapped to its name in the other system, which is read if ours is not set.
    """

    python_path: Sequence[str] = ()
    of_a_process: Sequence[str] = ()
    carried: Sequence[str] = ()
    rank_variables: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)

    def defaults(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the values of our variables that ``environ`` sets only under the other system's names."""
        found = {name: environ.get(other, "").strip() for name, other in self.other_names.items()}
        return {name: value for name, value in found.items() if value and not environ.get(name)}


NO_EXTENSION = Extension()


def with_folders(path: str, folders: Sequence[str]) -> dict[str, str]:
    """Return the variable PYTHONPATH with folders of this package appended; empty if there is nothing to append.

    Args:
        path: the user's PYTHONPATH, which stays first.
        folders: relative to the package; a folder that is already in ``path`` is not added again.
    """
    package = Path(__file__).parents[1]
    missing = [each for each in (str(package / folder) for folder in folders) if each not in path.split(os.pathsep)]
    # An empty PYTHONPATH has no entries, but an empty entry inside it would mean the current folder.
    return {"PYTHONPATH": os.pathsep.join([*([path] if path else []), *missing])} if missing else {}


def environment_of_launchers(
    num_threads: int, python_path: Sequence[str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return an environment for launchers with those variables that agents add and that programs read when they are loaded.

    An agent with this environment gives its ranks the same value of these variables, so one warm parent can fork both.

    Args:
        num_threads: the value of OMP_NUM_THREADS, unless the environment sets it.
        python_path: ``Extension.python_path``.
        environ: the environment; None: the one of this process.
    """
    found = {"OMP_NUM_THREADS": str(num_threads), **(os.environ if environ is None else environ)}
    return found | with_folders(found.get("PYTHONPATH", ""), python_path)


def environment_of_rank(
    rank: int, num_ranks: int, ranks_per_node: int, num_threads: int, strategy: str | None, layout: str | None
) -> dict[str, str]:
    """Return the environment of a rank that no agent starts, because it is alone in a fake world.

    Args:
        rank: the rank that the process plays.
        num_ranks: of the fake world.
        ranks_per_node: of each of its nodes.
        num_threads: the value of OMP_NUM_THREADS.
        strategy: of ``--strategy``; None: that of the environment.
        layout: of ``--layout``; None: that of the environment.
    """
    node, local_rank = divmod(rank, ranks_per_node)
    places = {
        "RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks_per_node,
        "GROUP_RANK": node, "GROUP_WORLD_SIZE": num_ranks // ranks_per_node, "OMP_NUM_THREADS": num_threads,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }  # fmt: skip
    asked = {"GUOZHUANG_STRATEGY": strategy, "GUOZHUANG_LAYOUT": layout}
    named = {name: value for name, value in asked.items() if value is not None}
    return {**os.environ, **named, **{name: str(value) for name, value in places.items()}}


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Request:
    """The options with which a program calls an agent. The defaults are those of a user at a shell.

    Attributes:
        extension: additions of a compatibility layer for another system's scripts.
        host: the name of this host as the user wrote it; "": the name that the system reports.
        variables: further environment variables of the ranks, on every host.
        report: called with the report at the end of the run; None: the agent prints its text itself.
        is_here: whether a host is this machine, so that no ssh is needed; None: ``ssh.is_this_machine`` decides.
        attempt: how many times the launcher of several hosts has started all ranks before.
        max_restarts: how many times that launcher may restart all ranks; None: the agent restarts its own ranks itself.
        terminals: for standard output and standard error: (whether it is shown on a terminal, whether to colour it);
            None: the agent inspects its own streams.
        finished: called when the ranks of this node have ended with 0, before the agent waits for the other nodes.
        members: the agents that meet, if not every one is that of a node with ranks; None: as many as --nnodes says.
        copy_prefix: template of what the names of a rank's two files in the folder of --copy-output begin with, with variables
            of the rank, as in ``node{GROUP_RANK}_``; "": each rank has a folder of its own, as in ``rank.0``.
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
    members: Members | None = None
    copy_prefix: str = ""
