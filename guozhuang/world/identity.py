"""Data classes for a process's rank and node: as its launcher gives them (``Identity``), and complete (``World``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from guozhuang.net.meeting_point import MeetingPoint, PortSequence
from guozhuang.world.layout import Layout


@dataclass(frozen=True)
class World:
    """All processes of a run as one of them sees them: its rank, its node and its device.

    Attributes:
        rank: number of this process, 0 <= rank < size.
        size: how many processes there are.
        local_rank: number of this process among those of its node.
        local_size: how many processes its node has.
        node_rank: number of its node, 0 <= node_rank < num_nodes.
        num_nodes: how many nodes there are.
        device: the device on which this rank computes; a CUDA device always has its index.
        launcher: the launcher's name: "torchrun" (also ``guozhuang run``), "environment" (another program exported RANK and so
            on, or DMLC_WORKER_ID and so on), "slurm" (srun), "openmpi" (its mpirun), "hydra" (mpiexec of MPICH and Intel MPI),
            or "alone".
        layout: how many ranks share the batch, and how many divide the model; by default all ranks share the batch.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    launcher: str
    layout: Layout = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Choose the usual layout if none is given, or one of another world that this one was made from."""
        if self.layout is None or self.layout.size != self.size:
            object.__setattr__(self, "layout", Layout(dp=self.size))

    @property
    def data_rank(self) -> int:
        """The number of this rank's share of the data: its index on the axis ``dp``."""
        return self.layout.coordinate(self.rank)["dp"]

    @property
    def data_size(self) -> int:
        """How many shares of the data there are: the ranks that hold one copy of the model together get the same share."""
        return self.layout.dp


@dataclass(frozen=True)
class LaunchedNode:
    """A node as a launcher like srun or mpirun describes it to a process there; for runs with one agent per node.

    Attributes:
        node_rank: number of this node, 0 <= node_rank < num_nodes.
        num_nodes: on how many nodes the launcher started processes.
        num_tasks: how many processes it started on this node; an agent needs exactly one.
        local_rank: number of this process among them.
        meeting_point: the ports at which the processes of this run can find each other; None on a single node.
    """

    node_rank: int
    num_nodes: int
    num_tasks: int
    local_rank: int
    meeting_point: PortSequence | None


@dataclass(frozen=True)
class Identity:
    """The rank and node of this process as its environment gives them; a field is None if the roll call must determine it.

    ``meeting_point`` is None in a world of one, which has no other ranks to meet.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    meeting_point: MeetingPoint | PortSequence | None = None
