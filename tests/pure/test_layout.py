"""Layouts: what a text and a strategy ask for, which ranks lie where, and what is refused."""

import itertools

import pytest

from guozhuang.errors import UsageError
from guozhuang.world.layout import AXES, Layout


@pytest.mark.parametrize(("text", "strategy", "num_ranks", "found"), [
    (None, "pipeline", 4, Layout(pp=4)),
    (None, "tensor", 3, Layout(tp=3)),
    (None, "space", 2, Layout(space=2)),
    ("", "sequence", 2, Layout(sequence=2)),
    (None, "ddp", 4, Layout(dp=4)),
    ("dp=2", "pipeline", 4, Layout(pp=2, dp=2)),
    ("tp=2", "sharded", 8, Layout(dp=4, tp=2)),
    ("pp=2, tp=2, dp=auto", "hybrid", 8, Layout(pp=2, dp=2, tp=2)),
    ("pp=auto,tp=2", "hybrid", 8, Layout(pp=4, tp=2)),
    ("pp=2,tp=2", "hybrid", 4, Layout(pp=2, tp=2)),
    ("dp=auto,tp=2", "hybrid", 2, Layout(tp=2)),
])  # fmt: skip
def test_a_layout_is_read(text: str | None, strategy: str, num_ranks: int, found: Layout) -> None:
    assert Layout.parse(text, strategy, num_ranks) == found
    assert Layout.parse(str(found), "hybrid", num_ranks) == found


@pytest.mark.parametrize(("text", "strategy", "num_ranks", "why"), [
    (None, "hybrid", 4, "needs a layout"),
    ("pp=2,tp=2", "hybrid", 8, "does not fit the world of 8 ranks .* add dp=auto, or start 4 ranks"),
    ("pp=3,dp=auto", "hybrid", 4, "start a multiple of 3 ranks"),
    ("pp=2,dp=3", "hybrid", 4, "start 6 ranks"),
    ("tp=2,dp=1", "hybrid", 4, "start 2 ranks"),
    ("dp=3", "tensor", 4, "start a multiple of 3"),
    ("tp=2", "pipeline", 4, "along pp only .* --strategy hybrid"),
    ("pipe=2", "hybrid", 2, "no such axis .*pipe=2.* axes: pp, dp"),
    ("pp=2,pp=2", "hybrid", 4, "pp twice"),
    ("pp", "hybrid", 2, "a number of ranks, or auto"),
    ("pp=0", "hybrid", 2, "a number of ranks, or auto"),
    ("pp=-1", "hybrid", 2, "a number of ranks, or auto"),
    ("pp=auto,dp=auto", "hybrid", 2, "one axis open at most"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(text: str | None, strategy: str, num_ranks: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Layout.parse(text, strategy, num_ranks)


def test_neighbours_along_the_innermost_axis_are_next_to_each_other() -> None:
    layout = Layout(pp=2, dp=3, tp=2)
    assert layout.coordinate(7) == {"pp": 1, "dp": 0, "space": 0, "sequence": 0, "tp": 1}
    assert layout.ranks_along(("tp",), 6) == (6, 7)
    assert layout.ranks_along(("pp",), 3) == (3, 9)
    assert layout.ranks_along(("dp",), 7) == (7, 9, 11)
    assert layout.ranks_along(("pp", "space", "sequence", "tp"), 3) == (2, 3, 8, 9)


def test_peers_along_some_axes_agree_on_all_others() -> None:
    layout = Layout(pp=2, dp=2, space=2, tp=3)
    for axes in itertools.chain.from_iterable(itertools.combinations(AXES, n) for n in range(len(AXES) + 1)):
        groups = {layout.ranks_along(axes, rank) for rank in range(layout.size)}
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(layout.size))
        for ranks in groups:
            places = [layout.coordinate(rank) for rank in ranks]
            assert all({place[axis] for place in places} == {places[0][axis]} for axis in AXES if axis not in axes)
