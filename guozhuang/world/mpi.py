"""The identity of ranks of Open MPI's ``mpirun`` and Hydra's ``mpiexec`` (MPICH, Intel MPI). MPI itself is not used."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from guozhuang.errors import UsageError, explain
from guozhuang.net import meeting_point as points
from guozhuang.net.meeting_point import PortSequence
from guozhuang.watch import processes
from guozhuang.world import node_lists
from guozhuang.world.identity import Identity, LaunchedNode
from guozhuang.world.requests import requested_secret
from guozhuang.world.variables import asked_meeting, number


@dataclass(frozen=True)
class _Launcher:
    name: str
    title: str
    rank: str
    size: str
    local_rank: str
    local_size: str

    @property
    def fix(self) -> str:
        return f"start the script with {self.title}, which sets it; or unset {self.size} to run as one process"


OPEN_MPI = _Launcher(
    "openmpi",
    "Open MPI's mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = _Launcher(
    "hydra",
    "Hydra's mpiexec (MPICH, Intel MPI)",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
)


def read_open_mpi(environ: Mapping[str, str]) -> Identity | None:
    """Return the identity of a process of Open MPI's ``mpirun``; None without ``mpirun``, or if it started one process only.

    Raises:
        UsageError: the environment is half set, or contradicts itself.
    """
    return _read(OPEN_MPI, environ, _open_mpi_run)


def read_hydra(environ: Mapping[str, str]) -> Identity | None:
    """Return the identity of a process of Hydra's ``mpiexec``; None without it, or if it started one process only.

    Raises:
        UsageError: the environment is half set, or contradicts itself.
    """
    return _read(HYDRA, environ, _hydra_run)


def node_of(environ: Mapping[str, str]) -> LaunchedNode | None:
    """Return the node on which ``mpirun`` or ``mpiexec`` started this process, for a run with an agent per node; else None.

    Assumes that all processes are on one node, or that each node has one process, whose rank is then the node's.

    Raises:
        UsageError: the environment is half set, or contradicts itself.
    """
    for launcher, run in ((OPEN_MPI, _open_mpi_run), (HYDRA, _hydra_run)):
        numbers = _numbers(launcher, environ)
        if numbers is None:
            continue
        rank, size, local_rank, local_size = numbers
        num_nodes = 1 if local_size == size else size
        point = _meeting_point(launcher, environ, size, is_one_node=False, run=run) if num_nodes > 1 else None
        return LaunchedNode(rank if num_nodes > 1 else 0, num_nodes, local_size or 1, local_rank or 0, point)
    return None


def lineage() -> list[str]:
    """Return the command lines of the ancestors of this process, its parent first, as far as they can be read."""
    words = (processes.command_line(pid) for pid in processes.ancestors(os.getpid()))
    return [b" ".join(line).decode(errors="replace") for line in words]


@dataclass(frozen=True)
class _Run:
    """The values by which all processes of a run find each other: a key that no other run has, and likely hosts of rank 0."""

    key: Sequence[str]
    hosts: Sequence[str]


def _read(launcher: _Launcher, environ: Mapping[str, str], run: Callable[[Mapping[str, str]], _Run]) -> Identity | None:
    numbers = _numbers(launcher, environ)
    if numbers is None or numbers[1] == 1:
        return None
    rank, size, local_rank, local_size = numbers
    is_one_node = local_size == size
    return Identity(
        launcher=launcher.name,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        # On several nodes neither Open MPI nor Hydra gives the node of a process: the roll call determines it.
        node_rank=0 if is_one_node else None,
        num_nodes=1 if is_one_node else None,
        meeting_point=_meeting_point(launcher, environ, size, is_one_node=is_one_node, run=run),
    )


def _numbers(launcher: _Launcher, environ: Mapping[str, str]) -> tuple[int, int, int | None, int | None] | None:
    size = number(environ, launcher.size, at_least=1, fix=launcher.fix)
    if size is None:
        return None
    rank = number(environ, launcher.rank, below=(launcher.size, size), fix=launcher.fix)
    if rank is None:
        what = f"environment variable {launcher.rank} is not set, but {launcher.size}={size} is"
        raise UsageError(explain(what, fix=launcher.fix))
    local_size = number(
        environ, launcher.local_size, at_least=1, below=(f"{launcher.size} + 1", size + 1), fix=launcher.fix
    )
    limit = (launcher.size, size) if local_size is None else (launcher.local_size, local_size)
    return rank, size, number(environ, launcher.local_rank, below=limit, fix=launcher.fix), local_size


def _meeting_point(
    launcher: _Launcher,
    environ: Mapping[str, str],
    size: int,
    *,
    is_one_node: bool,
    run: Callable[[Mapping[str, str]], _Run],
) -> PortSequence:
    found, given = run(environ), requested_secret(environ)
    asked_host, asked_port = asked_meeting(environ)
    if not any(found.key) and not given:
        what = f"{launcher.title} started {size} processes, but nothing tells this run from others on the same machines"
        fix = "export GUOZHUANG_SECRET=$(openssl rand -hex 32) for all of them (mpiexec -genvlist GUOZHUANG_SECRET)"
        raise UsageError(explain(what, fix=fix))
    key = [launcher.name, str(size), *found.key]
    secret = points.secret(given, key)
    # Inside a Slurm job, rank 0 is likely to be on the job's first node, so that node is tried too.
    nodes = node_lists.expand(environ["SLURM_JOB_NODELIST"]) if environ.get("SLURM_JOB_NODELIST") else []
    hosts = ("127.0.0.1",) if is_one_node else tuple(dict.fromkeys([*asked_host, *found.hosts, *nodes[:1]]))
    return PortSequence(
        hosts=hosts,
        # The ports depend on the user's secret too: it keeps the ports of two runs apart if the launcher gives no key.
        ports=tuple(dict.fromkeys([*asked_port, *points.sequence([*key, points.secret(given, ["ports"]).hex()])])),
        secret=secret,
        is_one_node=is_one_node,
        others=() if is_one_node else tuple(found.hosts[:3]),
        note="" if is_one_node else _note(environ, points.secret(given, ["note", *key]).hex()[:24]),
    )


def _note(environ: Mapping[str, str], name: str) -> str:
    folder = environ.get("GUOZHUANG_MEETING_DIR", "").strip()
    if not folder and environ.get("HOME"):
        folder = str(Path(environ["HOME"], ".guozhuang"))
    return str(Path(folder, f"meet-{name}")) if folder else ""


def _open_mpi_run(environ: Mapping[str, str]) -> _Run:
    """Identify a run of Open MPI: version 4 gives all ranks mpirun's addresses and 128 random bits, 5 its host and pid."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    namespace = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    hosts: list[str] = []
    for part in uri.split(";")[1:]:
        match = re.fullmatch(r"tcp6?://(.+):[0-9]+", part)
        hosts += [each.strip("[]") for each in match[1].split(",")] if match else []
    launcher = re.fullmatch(r"(?:prterun|prte)-(.+)-[0-9]+@[0-9]+", namespace)
    hosts += [launcher[1]] if launcher else []
    key = [namespace, environ.get("OMPI_MCA_orte_precondition_transports", "")]
    if environ.get(OPEN_MPI.local_size) == environ.get(OPEN_MPI.size):
        # Ranks of one node share a PMIx daemon, whose port no other run has; runs in two containers may share host and pid.
        key += [environ[name] for name in sorted(environ) if re.fullmatch("PMIX_SERVER_URI[0-9]*", name)]
    return _Run(key, hosts)


def _hydra_run(environ: Mapping[str, str]) -> _Run:
    """Identify a run of Hydra by mpiexec's address in the command line of Hydra's proxy, since no variable identifies it."""
    del environ
    for command in lineage():
        if re.search(r"hydra_(pmi|bstrap)_proxy", command):
            match = re.search(r"--control-port ([^\s:]+):([0-9]+)", command)
            if match is None:  # Intel MPI has other options
                match = re.search(r"--upstream-host (\S+) --upstream-port ([0-9]+)", command)
            if match is not None:
                return _Run([match[1], match[2]], [match[1]])
    return _Run([], [])
