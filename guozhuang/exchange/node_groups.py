"""The groups of an exchange that works inside nodes and between them: who shares this rank's node, and its peers elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import UsageError, explain
from ..groups.hierarchical.nodes import Nodes
from ..groups.subgroups import subgroup
from ..watch.processes import SHARE_MEMORY, node_identity


@dataclass(frozen=True)
class NodeGroups:
    """Two groups that this rank belongs to.

    Attributes:
        nodes: where all ranks are.
        inside: the ranks of this rank's node, in rank order; one rank where it is alone there.
        across: where all nodes have equally many ranks, the rank with this one's place on every node; else the first ranks of
            all nodes, or this rank alone if it is not the first of its node.
    """

    nodes: Nodes
    inside: dist.ProcessGroup
    across: dist.ProcessGroup

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.nodes.local_rank == 0


def find_nodes(group: dist.ProcessGroup, identities: Sequence[str] | None) -> Nodes:
    """Find out which ranks share a node. Every rank must call.

    Args:
        group: the ranks.
        identities: one text per rank, equal for ranks of one node; None: ranks are of one node that can share memory.

    Raises:
        UsageError: not one text per rank.
    """
    if identities is not None:
        if len(identities) != group.size():
            fix = f"give one text for each of the {group.size()} ranks, or leave it out"
            raise UsageError(explain("identities name the node of every rank", value=list(identities), fix=fix))
        return Nodes.of(identities, group.rank())
    if group.size() == 1:
        return Nodes.of([""], 0)
    found: list[str | None] = [None] * group.size()
    dist.all_gather_object(found, node_identity(SHARE_MEMORY), group=group)
    return Nodes.of([str(text) for text in found], group.rank())


def inside_of(group: dist.ProcessGroup, nodes: Nodes) -> dist.ProcessGroup:
    """Make a group of the ranks of each node, and return that of this rank's. Every rank must call."""
    return _own_of(group, nodes.members)


def make_groups(group: dist.ProcessGroup, nodes: Nodes) -> NodeGroups:
    """Make the groups, with the backend and the time-out of ``group``. Every rank must call."""
    inside = inside_of(group, nodes)
    if nodes.is_even:
        return NodeGroups(nodes, inside, _own_of(group, [nodes.peers_of_lane(i) for i in range(nodes.num_lanes)]))
    # Ranks that do not cross get a group too: see [Note: equally many groups].
    others = [(rank,) for ranks in nodes.members for rank in ranks[1:]]
    return NodeGroups(nodes, inside, _own_of(group, [nodes.peers_of_lane(0), *others]))


def num_groups() -> int:
    """Return how many groups this process is in."""
    return len(dist.distributed_c10d._world.pg_names)


def make_up_for(groups: NodeGroups, made: int, device: torch.device) -> list[dist.ProcessGroup]:
    """Make groups of this rank alone until it has made as many as the first rank of its node. Every rank must call.

    [Note: equally many groups] Ours have names of their own ([Note: names of groups] in groups/subgroups.py), but a program may
    make groups as PyTorch names them: members that are in different numbers of groups then wait for each other for ever. So no
    rank may end up in more groups than another, whatever an exchange makes on some ranks only.

    Args:
        groups: of this rank.
        made: how many groups this rank made.
        device: for the comparison.

    Returns:
        what was made here.
    """
    wanted = torch.tensor([made], device=device)
    dist.broadcast(wanted, group_src=0, group=groups.inside)
    return groups_alone(groups, int(wanted) - made)


def groups_alone(groups: NodeGroups, num: int) -> list[dist.ProcessGroup]:
    """Make so many groups of this rank alone; none of a number below 1. See [Note: equally many groups]."""
    return [subgroup(groups.inside, [groups.inside.rank()]) for _ in range(num)]


def _own_of(group: dist.ProcessGroup, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a group of each part and return that of this rank; every rank of ``group`` is in one part."""
    return subgroup(group, next(sorted(part) for part in parts if group.rank() in part))
