"""Who is where in a group over several nodes, and how tensors are cut for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guozhuang.groups.hierarchical.nodes import Nodes, part_of, pieces_of


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    nodes = Nodes.of("baabb", rank=4)
    assert nodes.members == ((0, 3, 4), (1, 2))
    assert (nodes.node, nodes.local_rank, nodes.here, nodes.num_lanes, nodes.lane) == (0, 2, (0, 3, 4), 2, None)
    assert nodes.peers_of_lane(1) == (3, 2)
    assert (nodes.is_even, nodes.is_flat) == (False, False)
    assert Nodes.of("abc", 1).is_flat and Nodes.of("abc", 1).is_even
    assert Nodes.of("abba", 0).is_even


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_rank_sees_the_same_nodes_and_every_lane_has_one_rank_of_each(identities: list[str]) -> None:
    views = [Nodes.of(identities, rank) for rank in range(len(identities))]
    assert len({view.members for view in views}) == 1
    assert sorted(rank for ranks in views[0].members for rank in ranks) == list(range(len(identities)))
    for view in views:
        assert view.size == len(identities)
        assert identities[view.here[0]] == identities[view.rank] == identities[view.here[view.local_rank]]
        assert view.lane is None or view.rank in view.peers_of_lane(view.lane)
    for lane in range(views[0].num_lanes):
        peers = views[0].peers_of_lane(lane)
        assert [views[rank].node for rank in peers] == list(range(len(views[0].members)))
        assert [views[rank].lane for rank in peers] == [lane] * len(peers)


@given(st.integers(0, 100), st.integers(1, 9))
def test_parts_and_pieces_cover_everything_once(num_elements: int, num: int) -> None:
    parts = [part_of(lane, num_elements, num) for lane in range(num)]
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(num_elements))
    longest = max(end - begin for begin, end in parts)
    # What the inside collective pads: every part but the last ones has the same length, and none is longer.
    assert longest == -(-num_elements // num)
    pieces = pieces_of(num_elements, num)
    assert [i for begin, end in pieces for i in range(begin, end)] == list(range(num_elements))
    assert all(end - begin <= num for begin, end in pieces)
