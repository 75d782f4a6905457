"""The words for who a process is: what a launcher tells (``Identity``), and what is known in the end (``World``)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


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
class MeetingPoint:
    """The TCP store through which ranks find each other.

    Attributes:
        host: name or address of the machine that keeps the store.
        port: its TCP port.
        is_kept_by_launcher: the launcher keeps the store already; otherwise rank 0 starts it.
        attempt: separates the runs that share one store, where a launcher starts ranks again after a failure.
        secret: if not empty, and rank 0 keeps the store where other machines can reach it, a door that asks for it stands in
            front of the store.
        is_loopback_meant: where ``host`` stands for loopback, all ranks are on this machine. If not, it does so on rank 0's
            own node only, and the others come from outside.
    """

    host: str
    port: int
    is_kept_by_launcher: bool = False
    attempt: str = "0"
    secret: bytes = field(default=b"", repr=False)
    is_loopback_meant: bool = True


@dataclass(frozen=True)
class PortSequence:
    """Where ranks meet whom the launcher tells no port: rank 0 opens a door at the first that is free, the others knock.

    See [Note: meeting without a message] in ``search``.

    Attributes:
        hosts: names and addresses by which rank 0's node may be known, the likeliest first; empty: only ``note`` tells it.
        ports: TCP ports, in the order to try.
        secret: proves that a door belongs to this run.
        is_one_node: all ranks are on one node, and loopback is enough.
        others: names of other nodes: rank 0 opens its door on the interface that leads to them.
        note: path of a file in a folder that all nodes share, in which rank 0 says where its door is; "" for none.
        attempt: as in ``MeetingPoint``.
    """

    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    secret: bytes = field(repr=False)
    is_one_node: bool = False
    others: tuple[str, ...] = ()
    note: str = ""
    attempt: str = "0"


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
