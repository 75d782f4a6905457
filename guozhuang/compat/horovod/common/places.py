"""Which rank is where: local and cross ranks, from what each rank was told of its node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        local_rank: its place among the ranks of its node.
        local_size: how many ranks its node has.
        cross_rank: the place of its node among those that have a rank with this local rank.
        cross_size: how many those are.
        is_homogeneous: all nodes have equally many ranks.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


def place_of(rank: int, told: Sequence[tuple[int, int]]) -> Place:
    """Return where a rank is.

    Args:
        rank: of whom.
        told: of each rank its node, and its place there by the launcher's word, which may number the ranks of a node in any
            order. Both with gaps where some processes are no ranks.
    """
    node = told[rank][0]
    nodes = [each for each, _ in told]
    sizes = Counter(nodes)
    on_node = sorted((place, other) for other, (each, place) in enumerate(told) if each == node)
    local_rank = [other for _, other in on_node].index(rank)
    across = sorted(each for each, size in sizes.items() if size > local_rank)
    return Place(
        local_rank,
        sizes[node],
        across.index(node),
        len(across),
        is_homogeneous=len(set(sizes.values())) == 1,
    )
