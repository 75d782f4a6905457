"""How a batch is divided by shares, and how measured speeds become parts: pure functions, by tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.data.shares import BatchParts, choose, divide

positive = st.floats(1e-3, 1e3)


@pytest.mark.parametrize(
    ("num_samples", "shares", "parts"),
    [
        (32, [1, 1], [16, 16]),
        (32, [3, 1], [24, 8]),
        (32, [2, 1], [21, 11]),
        (7, [1, 1], [4, 3]),  # equal remainders: the lower rank
        (10, [1, 1, 1], [4, 3, 3]),
        (2, [3, 1], [2, 0]),
        (5, [0.2, 0.3], [2, 3]),
        (0, [3, 1], [0, 0]),
    ],
)
def test_a_batch_is_divided_by_the_largest_remainder(num_samples: int, shares: list[float], parts: list[int]) -> None:
    assert divide(num_samples, shares) == parts


@given(st.lists(positive, min_size=1, max_size=9), st.integers(0, 500))
def test_parts_are_within_one_sample_of_their_shares(shares: list[float], num_samples: int) -> None:
    parts = divide(num_samples, shares)
    assert sum(parts) == num_samples
    for part, share in zip(parts, shares, strict=True):
        assert abs(part - num_samples * share / sum(shares)) < 1.0 + 1e-6
    if num_samples >= len(shares):
        assert min(divide(num_samples, shares, least=1)) >= 1 and sum(divide(num_samples, shares, 1)) == num_samples


# The parts, seconds per sample of each rank, whether the last decision was near a change: the new parts, and whether near one.
DECISIONS: list[tuple[str, list[int], list[float], bool, list[int], bool]] = [
    ("half as fast", [16, 16], [1, 2], False, [21, 11], False),
    ("as fast again", [21, 11], [1, 1], False, [16, 16], False),
    ("equal", [16, 16], [1, 1], False, [16, 16], False),
    ("noise", [16, 16], [1, 1.05], True, [16, 16], False),
    ("a little", [16, 16], [1, 1.15], False, [16, 16], True),
    ("a little again", [16, 16], [1, 1.15], True, [17, 15], False),
    ("stopped nearly", [16, 16], [1, 1000], False, [31, 1], False),
    ("one sample each", [1, 1], [1, 9], True, [1, 1], False),
    ("three", [10, 10, 10], [1, 1, 2], False, [12, 12, 6], False),
    ("no time was measured", [16, 16], [0.0, 1], True, [16, 16], False),
    ("not a number", [16, 16], [float("nan"), 1], True, [16, 16], False),
]


@pytest.mark.parametrize(
    ("sizes", "sample_s", "was_near", "wanted", "is_near"),
    [row[1:] for row in DECISIONS],
    ids=[row[0] for row in DECISIONS],
)
def test_speeds_decide(
    sizes: list[int], sample_s: list[float], was_near: bool, wanted: list[int], is_near: bool
) -> None:
    assert choose(sizes, sample_s, was_near) == (wanted, is_near)


@given(st.lists(positive, min_size=2, max_size=6), st.integers(1, 40))
def test_a_decision_is_kept(sample_s: list[float], per_rank: int) -> None:
    """With times in proportion to samples one change is enough: the next decision changes nothing, and no rank has 0."""
    sizes = divide(per_rank * len(sample_s), [1] * len(sample_s))
    found, _ = choose(sizes, sample_s, True)
    assert min(found) >= 1 and sum(found) == sum(sizes) and choose(found, sample_s, True) == (found, False)


@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.3])
def test_two_decisions_are_enough_for_a_rank_at_half_speed(fixed: float) -> None:
    """Also with a part of a step that does not depend on samples: two decisions come within 5 % of the best parts."""

    def step_s(sizes: list[int]) -> list[float]:
        return [slow * (fixed * 32 + (1 - fixed) * size) for slow, size in zip((1, 2), sizes, strict=True)]

    sizes, best, is_near = [32, 32], min(max(step_s([n, 64 - n])) for n in range(1, 64)), False
    for _ in range(2):
        sizes, is_near = choose(sizes, [s / n for s, n in zip(step_s(sizes), sizes, strict=True)], is_near)
    assert max(step_s(sizes)) <= 1.05 * best


def test_a_change_holds_from_its_batch_on() -> None:
    parts = BatchParts([6, 2], 0, 1)
    parts.sizes = (5, 3)
    parts._from.append((4, parts.sizes))
    assert [list(parts.of(number, 8)) for number in (0, 3, 4, 9)] == [[6, 2], [6, 2], [5, 3], [5, 3]]
    assert parts.of(5, 4) == [3, 1] and parts.weight(4, 100) == 1.25
    parts.begin_pass()
    assert list(parts.of(0, 8)) == [5, 3]
