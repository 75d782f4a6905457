"""Which ranks share a node, and which ranks of different nodes talk to each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """The ranks of a group by node, seen from one of them.

    A *lane* is one rank of every node: lane l the l-th rank of each. There are as many lanes as the smallest node has ranks;
    further ranks of a larger node are in no lane, their part travels through the ranks that are.

    Attributes:
        members: for each node, in the order of their lowest ranks, its ranks in ascending order.
        rank: whose view it is.
    """

    members: tuple[tuple[int, ...], ...]
    rank: int

    @staticmethod
    def of(identities: Sequence[str], rank: int) -> Nodes:
        """Group the ranks by node identity, one text per rank, equal for ranks of the same node."""
        order = list(dict.fromkeys(identities))
        members = (tuple(r for r, text in enumerate(identities) if text == node) for node in order)
        return Nodes(tuple(members), rank)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.members))

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.node_of(self.rank)

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return self.members[self.node]

    @property
    def local_rank(self) -> int:
        """This rank among those of its node."""
        return self.here.index(self.rank)

    @property
    def num_lanes(self) -> int:
        """How many ranks of every node talk to the other nodes."""
        return min(map(len, self.members))

    @property
    def lane(self) -> int | None:
        """The lane of this rank; None where its node has more ranks than there are lanes and this is one of the last."""
        return self.local_rank if self.local_rank < self.num_lanes else None

    @property
    def is_even(self) -> bool:
        """Whether every node has the same number of ranks, so that every rank is in a lane."""
        return all(len(ranks) == self.num_lanes for ranks in self.members)

    @property
    def is_flat(self) -> bool:
        """Whether no node has two ranks, so that there is nothing to share."""
        return all(len(ranks) == 1 for ranks in self.members)

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return next(i for i, ranks in enumerate(self.members) if rank in ranks)

    def peers_of_lane(self, lane: int) -> tuple[int, ...]:
        """The ranks of a lane, one per node, in the order of the nodes."""
        return tuple(ranks[lane] for ranks in self.members)


def part_of(lane: int, num_elements: int, num_lanes: int) -> tuple[int, int]:
    """Begin and end of a lane's part of ``num_elements``: equal parts, but for the last ones, which may be shorter or empty."""
    each = -(-num_elements // num_lanes)
    return min(lane * each, num_elements), min((lane + 1) * each, num_elements)


def pieces_of(num_elements: int, longest: int) -> list[tuple[int, int]]:
    """Cut ``num_elements`` into pieces of ``longest`` elements, and what is left: begin and end of each."""
    return [(begin, min(begin + longest, num_elements)) for begin in range(0, num_elements, longest)]
