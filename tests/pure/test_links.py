"""How the races on links are counted."""

from __future__ import annotations

import pytest

links = pytest.importorskip("benchmarks.links")


def test_a_ratio_is_taken_within_a_round() -> None:
    turns = {
        "one": [{"round": number, "samples_per_s": speed} for number, speed in ((0, 10.0), (1, 20.0), (2, 30.0))],
        "other": [{"round": number, "samples_per_s": speed} for number, speed in ((0, 5.0), (2, 10.0))],
    }
    assert links.ratio(turns, "one", "other") == (2.5, 2.0, 3.0)
    assert links.ratio(turns, "other", "one")[0] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert links.ratio(turns, "one", "another") is None
