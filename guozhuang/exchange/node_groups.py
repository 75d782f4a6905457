"""Makes the groups of a hierarchical exchange: one of the ranks of a node, and one of ranks that exchange between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PeerLost, UsageError, explain
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


def node_sizes(identities: Sequence[str] | None, world_size: int) -> list[int]:
    """Return how many ranks each node has; an empty list if that is not known, because there are no ``identities``."""
    if identities is None or len(identities) != world_size:
        return []
    return [list(identities).count(node) for node in dict.fromkeys(identities)]


def inside_of(group: dist.ProcessGroup, nodes: Nodes) -> dist.ProcessGroup:
    """Make a group of the ranks of each node, and return the group of this rank's node. Every rank must call."""
    return _own_of(group, nodes.members)


def make_groups(group: dist.ProcessGroup, nodes: Nodes) -> NodeGroups:
    """Make the groups inside and between nodes, with the backend and the time-out of ``group``. Every rank must call."""
    inside = inside_of(group, nodes)
    if nodes.is_even:
        return NodeGroups(nodes, inside, _own_of(group, [nodes.peers_of_lane(i) for i in range(nodes.num_lanes)]))
    # A rank that exchanges nothing between nodes gets a group of itself alone: see [Note: equally many groups].
    others = [(rank,) for ranks in nodes.members for rank in ranks[1:]]
    return NodeGroups(nodes, inside, _own_of(group, [nodes.peers_of_lane(0), *others]))


def num_groups() -> int:
    """Return how many process groups this process is a member of."""
    return len(dist.distributed_c10d._world.pg_names)


def on_leaders(
    groups: NodeGroups, act: Callable[[], object], device: torch.device, made: list[dist.ProcessGroup]
) -> None:
    """Call ``act`` on the first rank of each node, which may make groups or raise. Every rank must call.

    [Note: equally many groups] PyTorch names a group after its ranks and the number of groups of the process. If a program
    makes a group on ranks that are in different numbers of groups, they wait for each other for ever. This package names its
    groups otherwise ([Note: names of groups] in groups/subgroups.py), but they count too. So every rank must be in equally many
    groups, even if an exchange makes some groups on some ranks only: the other ranks make as many groups of themselves alone.

    Args:
        groups: the groups of this rank.
        act: called on the first rank of each node only.
        device: the device for the tensors by which the ranks of a node learn the outcome.
        made: a list to which this call appends the groups that it makes on ranks that do not lead.

    Raises:
        Exception: the error of ``act``, on the rank that leads.
        UsageError: on the other ranks of its node, if ``act`` raised a UsageError.
        PeerLost: on the other ranks of its node, if ``act`` raised another error, whose cause only the first rank knows.
    """
    before, failed = num_groups(), None
    if groups.leads:
        try:
            act()
        except Exception as error:  # raised below, after the ranks of the node were informed
            failed = error
    try:
        outcome: list[Any] = [num_groups() - before, type(failed).__name__, isinstance(failed, UsageError), str(failed)]
        dist.broadcast_object_list(outcome, group_src=0, group=groups.inside, device=device)
        num_made, kind, is_users, text = outcome
        if not groups.leads:
            made.extend(groups_alone(groups, num_made))
        if failed is not None:
            raise failed
    finally:
        del failed  # its traceback refers to this frame, which would keep all that ``act`` refers to
    if kind == type(None).__name__:
        return
    first = groups.nodes.here[0]
    what = f"rank {first}, which leads the ranks of this node, raised {kind}: {text}"
    if is_users:
        raise UsageError(explain(what, rank=groups.nodes.rank))
    # The launcher takes a rank that reports a lost peer for no cause, so the user is shown the traceback of the first rank.
    what = explain(what, rank=groups.nodes.rank, fix=f"look at the error of rank {first}")
    raise PeerLost(
        what, rank=first, pid=None, waiting_in="an exchange between nodes that the first rank of each node makes"
    )


def groups_alone(groups: NodeGroups, num: int) -> list[dist.ProcessGroup]:
    """Make ``num`` groups of this rank alone; none if ``num`` is below 1. See [Note: equally many groups]."""
    return [subgroup(groups.inside, [groups.inside.rank()]) for _ in range(num)]


def _own_of(group: dist.ProcessGroup, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a group of the ranks in this rank's part; every rank of ``group`` is in exactly one part and must call."""
    return subgroup(group, next(sorted(part) for part in parts if group.rank() in part))
