"""Divides the ranks of a group into nodes, and into lanes of ranks that communicate between nodes. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """The ranks of a group by node, seen from one rank.

    A *lane* is a set of one rank of every node: lane l consists of the l-th rank of each node. There are as many lanes as the
    smallest node has ranks; further ranks of a larger node are in no lane, and their data travels through the ranks in lanes.

    Attributes:
        members: the ranks of each node in ascending order; nodes are ordered by their lowest rank.
        rank: this rank.
    """

    members: tuple[tuple[int, ...], ...]
    rank: int

    @staticmethod
    def of(identities: Sequence[str], rank: int) -> Nodes:
        """Group the ranks by node; ``identities`` has one text per rank, equal for ranks of the same node."""
        order = list(dict.fromkeys(identities))
        members = (tuple(r for r, text in enumerate(identities) if text == node) for node in order)
        return Nodes(tuple(members), rank)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(map(len, self.members))

    @property
    def node(self) -> int:
        """Return the index of this rank's node."""
        return self.node_of(self.rank)

    @property
    def here(self) -> tuple[int, ...]:
        """Return the ranks of this rank's node."""
        return self.members[self.node]

    @property
    def local_rank(self) -> int:
        """Return this rank's index among the ranks of its node."""
        return self.here.index(self.rank)

    @property
    def num_lanes(self) -> int:
        """Return the number of ranks per node that communicate with other nodes."""
        return min(map(len, self.members))

    @property
    def lane(self) -> int | None:
        """Return the index of this rank's lane; None if the rank is in no lane, as one of the last ranks of a larger node."""
        return self.local_rank if self.local_rank < self.num_lanes else None

    @property
    def is_even(self) -> bool:
        """Return whether every node has the same number of ranks, so that every rank communicates with other nodes."""
        return all(len(ranks) == self.num_lanes for ranks in self.members)

    @property
    def is_flat(self) -> bool:
        """Return whether every node has only one rank, so that no memory can be shared."""
        return all(len(ranks) == 1 for ranks in self.members)

    def node_of(self, rank: int) -> int:
        """Return the index of a rank's node."""
        return next(i for i, ranks in enumerate(self.members) if rank in ranks)

    def peers_of_lane(self, lane: int) -> tuple[int, ...]:
        """Return the ranks of a lane, one per node, in the order of the nodes."""
        return tuple(ranks[lane] for ranks in self.members)


def part_of(lane: int, num_elements: int, num_lanes: int) -> tuple[int, int]:
    """Return begin and end of the part of ``num_elements`` that a lane combines; the last parts may be shorter or empty."""
    each = -(-num_elements // num_lanes)
    return min(lane * each, num_elements), min((lane + 1) * each, num_elements)


def pieces_of(num_elements: int, longest: int) -> list[tuple[int, int]]:
    """Cut ``num_elements`` into pieces of ``longest`` elements, the last one shorter: return begin and end of each."""
    return [(begin, min(begin + longest, num_elements)) for begin in range(0, num_elements, longest)]
