"""Bagua's load-balancing samplers, against orders that follow from its definition."""

from __future__ import annotations

from typing import Any

import pytest

from guozhuang.compat.bagua.torch_api.contrib import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from guozhuang.errors import UsageError

COMPLEXITIES = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def _sampler(num: int, rank: int, **options: Any) -> LoadBalancingDistributedSampler:
    return LoadBalancingDistributedSampler(COMPLEXITIES, lambda each: each, num, rank, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shuffle": False}, [[1, 6, 9, 4, 7], [3, 0, 2, 8, 5]]),
        ({}, [[6, 4, 9, 7, 1], [0, 8, 2, 5, 3]]),
        ({"seed": 3}, [[7, 1, 6, 9, 4], [5, 3, 0, 2, 8]]),
        ({"random_level": 1}, [[2, 6, 3, 4, 1], [8, 0, 7, 5, 9]]),
        ({}, [[0, 5, 4, 1], [9, 1, 8, 3], [2, 3, 7, 6]]),
        ({"drop_last": True}, [[4, 0, 1], [8, 9, 3], [7, 2, 6]]),
    ],
)
def test_each_rank_has_its_place_in_chunks_of_like_complexity(options: Any, expected: list[list[int]]) -> None:
    found = [_sampler(len(expected), rank, **options) for rank in range(len(expected))]
    assert [list(sampler) for sampler in found] == expected
    assert [len(sampler) for sampler in found] == [len(each) for each in expected]


def test_an_epoch_has_an_order_of_its_own() -> None:
    sampler = _sampler(2, 0)
    sampler.set_epoch(1)
    assert list(sampler) == [4, 9, 1, 7, 6]


def test_without_shuffling_complexity_rises() -> None:
    sampler = LoadBalancingDistributedSampler(range(9, -1, -1), lambda each: each, 1, 0, shuffle=False)
    assert [sampler.dataset[i] for i in sampler] == list(range(10))


def _of_sum(indices: list[int], limit: int = 12) -> list[list[int]]:
    """Batches whose complexities sum up to the limit at most."""
    batches: list[list[int]] = [[]]
    for i in indices:
        if batches[-1] and sum(COMPLEXITIES[j] for j in (*batches[-1], i)) > limit:
            batches.append([])
        batches[-1].append(i)
    return batches


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_have_equally_many_batches(size: int, drop_last: bool) -> None:
    for epoch in range(4):
        own, found = [], []
        for rank in range(size):
            sampler = _sampler(size, rank)
            batches = LoadBalancingDistributedBatchSampler(sampler, _of_sum, drop_last)
            batches.set_epoch(epoch)
            own.append(_of_sum(list(sampler)))
            found.append(list(batches))
            assert len(batches) == len(found[-1])
        num = (min if drop_last else max)(len(each) for each in own)
        assert found == [(each * num)[:num] for each in own]


def test_batches_of_growing_size() -> None:
    def growing(indices: list[int]) -> list[list[int]]:
        return [indices[n * (n - 1) // 2 :][:n] for n in range(1, 6)]

    sampler = LoadBalancingDistributedSampler(range(15), lambda each: each, 1, 0)
    assert [len(batch) for batch in LoadBalancingDistributedBatchSampler(sampler, growing)] == [1, 2, 3, 4, 5]


def test_bad_input() -> None:
    for rank in (2, -1):
        with pytest.raises(ValueError, match="rank is a number"):
            _sampler(2, rank)
    for level in (1.5, -0.1):
        with pytest.raises(ValueError, match="random_level"):
            _sampler(2, 0, random_level=level)
    with pytest.raises(UsageError, match="empty"):
        LoadBalancingDistributedSampler([], len, 1, 0)
    with pytest.raises(UsageError, match="drop_last"):
        LoadBalancingDistributedBatchSampler(_sampler(2, 0, drop_last=True), _of_sum)
    with pytest.raises(UsageError, match="LoadBalancingDistributedSampler"):
        LoadBalancingDistributedBatchSampler([1], _of_sum)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no batch"):
        LoadBalancingDistributedBatchSampler(_sampler(2, 0), lambda indices: [])
