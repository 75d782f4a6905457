"""Makes the groups of a hierarchical exchange: one of the ranks of a node, and one of ranks that exchange between nodes."""

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
    """The two groups of this rank in a hierarchical exchange.

    Attributes:
        nodes: which ranks are on which node.
        inside: the ranks of this rank's node, in rank order.
        across: if all nodes have equally many ranks, the ranks with this one's local rank on all nodes; else the first ranks of
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
        identities: one text per rank, equal for ranks of one node; None: ranks that can share memory are on one node.

    Raises:
        UsageError: ``identities`` does not hold one text per rank.
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
    """Make a group of the ranks of each node, and return the group of this rank's node. Every rank must call."""
    return _own_of(group, nodes.members)


def make_groups(group: dist.ProcessGroup, nodes: Nodes) -> NodeGroups:
    """Make both groups, with the backend and the time-out of ``group``. Every rank must call."""
    inside = inside_of(group, nodes)
    if nodes.is_even:
        return NodeGroups(nodes, inside, _own_of(group, [nodes.peers_of_lane(i) for i in range(nodes.num_lanes)]))
    # Ranks that take no part between nodes get a group of their own: see [Note: equally many groups].
    others = [(rank,) for ranks in nodes.members for rank in ranks[1:]]
    return NodeGroups(nodes, inside, _own_of(group, [nodes.peers_of_lane(0), *others]))


def num_groups() -> int:
    """Return how many process groups this process is a member of."""
    return len(dist.distributed_c10d._world.pg_names)


def make_up_for(groups: NodeGroups, made: int, device: torch.device) -> list[dist.ProcessGroup]:
    """Make groups of this rank alone until it has made as many as the first rank of its node. Every rank must call.

    [Note: equally many groups] PyTorch names a group after its ranks and the number of groups of the process. If a program
    makes a group on ranks that are in different numbers of groups, they wait for each other for ever. This package names its
    groups otherwise ([Note: names of groups] in groups/subgroups.py), but they count too. So every rank must be in equally many
    groups, even if an exchange makes some groups on some ranks only.

    Args:
        groups: the groups of this rank.
        made: how many groups this rank has made.
        device: the device on which the numbers are compared.

    Returns:
        The groups that this call made.
    """
    wanted = torch.tensor([made], device=device)
    dist.broadcast(wanted, group_src=0, group=groups.inside)
    return groups_alone(groups, int(wanted) - made)


def groups_alone(groups: NodeGroups, num: int) -> list[dist.ProcessGroup]:
    """Make ``num`` groups of this rank alone; none if ``num`` is below 1. See [Note: equally many groups]."""
    return [subgroup(groups.inside, [groups.inside.rank()]) for _ in range(num)]


def _own_of(group: dist.ProcessGroup, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a group of the part that holds this rank; every rank of ``group`` is in exactly one part and must call."""
    return subgroup(group, next(sorted(part) for part in parts if group.rank() in part))
