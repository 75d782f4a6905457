"""The identity of ranks of Slurm's ``srun``: every task of a step is a rank.

Only SLURM_STEP_* variables mean "inside srun": the batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but is one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from guozhuang.errors import UsageError, explain
from guozhuang.net import meeting_point as points
from guozhuang.net.meeting_point import PortSequence
from guozhuang.world import node_lists
from guozhuang.world.identity import Identity, LaunchedNode
from guozhuang.world.requests import requested_secret
from guozhuang.world.variables import asked_meeting, number

_FIX = "start the script with srun, which sets it; or unset the SLURM_ variables to run as one process"
# The most reserved ports, and candidates for rank 0's node, that are tried: more would only make each round longer.
_MAX_RESERVED, _MAX_GUESSES = 16, 64
# Variables in each task of a step that spans the parts of a heterogeneous job (older versions of Slurm use the second).
_PARTS = ("SLURM_HET_SIZE", "SLURM_PACK_SIZE")


@dataclass(frozen=True)
class _Step:
    rank: int
    size: int
    local_rank: int | None
    node_rank: int | None
    num_nodes: int | None
    num_tasks: int | None


def read(environ: Mapping[str, str]) -> Identity | None:
    """Return the identity of a task of ``srun``; None outside of a step, and in a step of one task.

    Raises:
        UsageError: the environment is half set, or contradicts itself.
    """
    step = _step(environ)
    if step is None or step.size == 1:
        return None
    return Identity(
        launcher="slurm",
        rank=step.rank,
        size=step.size,
        local_rank=step.local_rank,
        local_size=step.num_tasks,
        node_rank=step.node_rank,
        num_nodes=step.num_nodes,
        meeting_point=_meeting_point(environ, step),
    )


def node_of(environ: Mapping[str, str]) -> LaunchedNode | None:
    """Return the node on which ``srun`` started this task, for a run with an agent per node; None outside of a step.

    Raises:
        UsageError: the environment is half set, contradicts itself, or lacks the nodes.
    """
    step = _step(environ)
    if step is None:
        return None
    if step.node_rank is None or step.num_nodes is None or step.num_tasks is None or step.local_rank is None:
        what = "srun did not say which node of the step this is (SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE)"
        raise UsageError(explain(what, fix=_FIX))
    meets = step.num_nodes > 1
    return LaunchedNode(
        node_rank=step.node_rank,
        num_nodes=step.num_nodes,
        num_tasks=step.num_tasks,
        local_rank=step.local_rank,
        meeting_point=_meeting_point(environ, step) if meets else None,
    )


def cpus_of_step(environ: Mapping[str, str]) -> int | None:
    """Return how many CPUs of this node the step was given; None outside of a step, and where that is not told.

    What a CPU is, a core or a hardware thread, is the cluster's own affair.

    Raises:
        UsageError: the environment is half set, or contradicts itself.
    """
    step = _step(environ)
    if step is None:
        return None
    each = number(environ, "SLURM_CPUS_PER_TASK", at_least=1, fix=_FIX)
    if each is not None and step.num_tasks is not None:
        return each * step.num_tasks
    return number(environ, "SLURM_CPUS_ON_NODE", at_least=1, fix=_FIX)


def hint(environ: Mapping[str, str] | None = None, command: str = "python ...") -> str:
    """Return a hint for a process that runs alone although its job has several tasks or nodes; "" if there is none.

    Args:
        environ: the environment to read; None: the environment of this process.
        command: the command for srun, as the hint shows it.
    """
    environ = os.environ if environ is None else environ
    if environ.get("SLURM_STEP_NUM_TASKS") is not None or not environ.get("SLURM_JOB_ID"):
        return ""
    # The nodes are checked too, because a job without -n has no SLURM_NTASKS, however many nodes it has.
    for name, things in (("SLURM_NTASKS", "tasks"), ("SLURM_JOB_NUM_NODES", "nodes")):
        text = environ.get(name, "").strip()
        if text.isascii() and text.isdigit() and int(text) > 1:
            return (
                f"this process is outside of srun, so it is a world of one, although the job has {text} {things} ({name}). "
                f"Start the script with `srun {command}` for a rank in each"
            )
    return ""


def _step(environ: Mapping[str, str]) -> _Step | None:
    size = number(environ, "SLURM_STEP_NUM_TASKS", at_least=1, fix=_FIX)
    if size is None:
        return None
    # MPI launchers start a helper per node by srun, whose variables the ranks inherit: where MPI's numbers differ, they count.
    for mpi in ("PMI", "OMPI_COMM_WORLD"):
        theirs = environ.get(f"{mpi}_SIZE", str(size)), environ.get(f"{mpi}_RANK", environ.get("SLURM_PROCID"))
        if theirs != (str(size), environ.get("SLURM_PROCID")):
            return None
    rank = number(environ, "SLURM_PROCID", below=("SLURM_STEP_NUM_TASKS", size), fix=_FIX)
    if rank is None:
        seen = f"SLURM_STEP_NUM_TASKS={size}"
        raise UsageError(explain(f"environment variable SLURM_PROCID is not set, but {seen} is", fix=_FIX))
    local_rank = number(environ, "SLURM_LOCALID", below=("SLURM_STEP_NUM_TASKS", size), fix=_FIX)
    node_rank = number(environ, "SLURM_NODEID", fix=_FIX)
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "").strip()
    tasks = node_lists.counts(text) if text else []
    if node_rank is None or node_rank >= len(tasks) or sum(tasks) != size:
        # In a step with several parts (srun ... : ...) Slurm 22 gives each task the counts of all parts. Where a count does
        # not fit, the roll call of the ranks determines the nodes instead.
        return _Step(rank, size, local_rank, None, None, None)
    if local_rank is not None and local_rank >= tasks[node_rank]:
        what = f"environment variable SLURM_LOCALID must be below the {tasks[node_rank]} tasks of node {node_rank}"
        raise UsageError(explain(what, value=environ["SLURM_LOCALID"], fix=_FIX))
    return _Step(rank, size, local_rank, node_rank, len(tasks), tasks[node_rank])


def _meeting_point(environ: Mapping[str, str], step: _Step) -> PortSequence:
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_UID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    if not environ.get("SLURM_JOB_ID") or not environ.get("SLURM_STEP_ID"):
        what = "SLURM_STEP_NUM_TASKS is set, but SLURM_JOB_ID or SLURM_STEP_ID is not, so the ranks cannot tell steps apart"
        raise UsageError(explain(what, fix=_FIX))
    # The key of the run contains no port of srun (SLURM_STEP_LAUNCHER_PORT, SLURM_SRUN_COMM_PORT), because each part of a step
    # has another port, and not every step with several parts can be recognized.
    key = ["slurm", *(environ.get(name, "") for name in names)]
    asked_host, asked_port = asked_meeting(environ)
    text = environ.get("SLURM_STEP_RESV_PORTS", "").strip()
    reserved = node_lists.ports(text)[:_MAX_RESERVED] if text else []
    # These ports depend on job and step alone, so that an administrator can compute them for a firewall or a log.
    derived = points.sequence(key)
    # Slurm 22 reserves the same ports for all parts of a step; where parts may differ, reserved ports are tried last.
    wanted = [*derived, *reserved] if any(environ.get(name) for name in _PARTS) else [*reserved, *derived]
    nodes = node_lists.expand(environ["SLURM_STEP_NODELIST"]) if environ.get("SLURM_STEP_NODELIST") else []
    # With a host file (srun --distribution=arbitrary) rank 0 may be on any node, although the list of nodes is sorted.
    is_anywhere = environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    firsts = nodes[: _MAX_GUESSES if is_anywhere else 1]
    is_one_node = step.num_nodes == 1
    # If a batch script runs srun, rank 0 is on the node where srun runs. A wrong candidate does no harm.
    guesses = [*asked_host, *firsts, environ.get("SLURM_LAUNCH_NODE_IPADDR", "").strip()]
    hosts = ("127.0.0.1",) if is_one_node else tuple(dict.fromkeys(each for each in guesses if each))
    return PortSequence(
        hosts=hosts,
        ports=tuple(dict.fromkeys([*asked_port, *wanted])),
        secret=points.secret(requested_secret(environ), key),
        is_one_node=is_one_node,
        others=() if is_one_node else tuple(nodes[1:4]),
    )
