"""The words for who a process is: what a launcher tells (``Identity``), and what is known in the end (``World``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from guozhuang.net.meeting_point import MeetingPoint, PortSequence


@dataclass(frozen=True)
class World:
    """All processes of a run, seen from one of them.

    Attributes:
        rank: this process, 0 <= rank < size.
        size: how many processes there are.
        local_rank: this process among those of its node.
        local_size: how many processes its node has.
        node_rank: its node, 0 <= node_rank < num_nodes.
        num_nodes: how many nodes there are.
        device: where this rank computes; never a bare "cuda": the index is known.
        launcher: who started it: "torchrun" (also ``guozhuang run``), "environment" (RANK and the others were exported
            by something else), "slurm" (srun), "openmpi" (its mpirun), "hydra" (mpiexec of MPICH and Intel MPI), or "alone".
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    launcher: str


@dataclass(frozen=True)
class LaunchedNode:
    """What a launcher that starts one process (or more) on each node tells about nodes; for an agent per node.

    Attributes:
        node_rank: this node, 0 <= node_rank < num_nodes.
        num_nodes: how many nodes the launcher started processes on.
        num_tasks: how many processes it started on this node; an agent wants one.
        local_rank: this process among them.
        meeting_point: where the processes of this run can meet; None on a single node.
    """

    node_rank: int
    num_nodes: int
    num_tasks: int
    local_rank: int
    meeting_point: PortSequence | None


@dataclass(frozen=True)
class Identity:
    """What the environment tells about this process. None: not told, to be found out when the ranks meet.

    ``meeting_point`` is None in a world of one, which meets nobody.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    meeting_point: MeetingPoint | PortSequence | None = None
