"""The words for who a process is: what a launcher tells (``Identity``), and what is known in the end (``World``)."""

from __future__ import annotations

from dataclasses import dataclass

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
            by something else), or "alone".
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
    """

    host: str
    port: int
    is_kept_by_launcher: bool = False
    attempt: str = "0"


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
    meeting_point: MeetingPoint | None = None
