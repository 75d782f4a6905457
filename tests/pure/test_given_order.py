"""Loaders over orders that the user gives: samplers, batch samplers, batches as items, streams that share themselves."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from guozhuang import loader
from guozhuang.errors import UsageError

NUM_SAMPLES = 23


class Shuffled:
    """A sampler as people write them: it draws while it is iterated, from a global generator."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        left = list(range(NUM_SAMPLES))
        while left:
            yield left.pop(self.draw(len(left)))


class Counting:
    """Its order depends on how often it was iterated in this process, which no other process repeats."""

    def __init__(self) -> None:
        self.times = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter([(place * 5 + self.times) % NUM_SAMPLES for place in range(NUM_SAMPLES)])


class ByEpoch(Counting):
    """It takes its order from ``set_epoch``, as many libraries' samplers do."""

    def set_epoch(self, epoch: int) -> None:
        self.times = epoch * 3


def weighted() -> Any:
    return WeightedRandomSampler(torch.arange(1.0, NUM_SAMPLES + 1).tolist(), NUM_SAMPLES, generator=torch.Generator())


SAMPLERS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(range(NUM_SAMPLES)),
    "torch": lambda: RandomSampler(range(NUM_SAMPLES)),
    "weighted": weighted,
    "subset": lambda: SubsetRandomSampler(range(0, NUM_SAMPLES, 2)),
    "python": lambda: Shuffled(random.randrange),
    "numpy": lambda: Shuffled(lambda n: int(np.random.randint(n))),
    "set_epoch": ByEpoch,
}


def turns(loaders: list[Any], num_steps: int | None = None) -> list[Any]:
    """The samples of all ranks in the order of the epoch: step by step, and of a step place by place."""
    found = []
    for step in itertools.islice(zip(*loaders, strict=True), num_steps):
        found += [int(x) for place in itertools.zip_longest(*(batch.tolist() for batch in step)) for x in place]
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_share_a_samplers_order_and_resume_on_others(name: str) -> None:
    def ranks(num_replicas: int, batch_size: int) -> list[Any]:
        return [
            loader(
                range(NUM_SAMPLES), batch_size, sampler=SAMPLERS[name](), rank=r, num_replicas=num_replicas, ends="drop"
            )
            for r in range(num_replicas)
        ]

    alone = ranks(1, 1)
    orders = [turns(alone), turns(alone)]
    assert name == "list" or orders[0] != orders[1], "another order in each epoch"
    random.seed(99)  # another process
    torch.manual_seed(99)
    first = ranks(3, 2)
    begun = turns(first, 2)
    assert begun == orders[0][:12]
    state = first[0].state_dict()
    assert all(each.state_dict() == state for each in first)
    second = ranks(2, 1)
    for each in second:
        each.load_state_dict(state)
    rest = turns(second)
    assert begun + rest == orders[0][: 12 + len(rest)] and len(rest) >= len(orders[0]) - 13
    assert turns(second) == orders[1][: len(orders[1]) // 2 * 2]


def test_global_generators_are_left_as_they_were() -> None:
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    turns([loader(range(NUM_SAMPLES), sampler=SAMPLERS[name](), rank=0, num_replicas=1) for name in ("torch", "numpy")])
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


def test_an_order_that_does_not_repeat_is_found_at_a_resume() -> None:
    first = loader(range(NUM_SAMPLES), 2, sampler=Counting(), rank=0, num_replicas=1)
    turns([first], 3)
    used = Counting()
    used.times = 4
    second = loader(range(NUM_SAMPLES), 2, sampler=used, rank=0, num_replicas=1)
    second.load_state_dict(first.state_dict())
    with pytest.raises(UsageError, match="gives epoch 0 another order than in the run that was saved"):
        next(iter(second))
    second.set_epoch(1)
    assert next(iter(second)).tolist()
    with pytest.raises(UsageError, match="length was 23 when the loader was made, and it yielded 22"):
        short = loader(range(NUM_SAMPLES), sampler=sized(22, says=23), rank=0, num_replicas=1)
        next(iter(short))


def sized(yields: int, says: int) -> Any:
    class Sized(Counting):
        def __len__(self) -> int:
            return says

        def __iter__(self) -> Iterator[int]:
            return iter(range(yields))

    return Sized()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_samplers_and_items_that_are_batches(num_workers: int) -> None:
    def batches(rank: int, **options: Any) -> Any:
        return loader(range(NUM_SAMPLES), rank=rank, num_replicas=2, num_workers=num_workers, **options)

    sampler = BatchSampler(RandomSampler(range(NUM_SAMPLES)), 4, drop_last=False)
    ranks = [batches(r, batch_sampler=sampler) for r in range(2)]
    assert len(ranks[0]) == 3
    found = [[batch.tolist() for batch in each] for each in ranks]
    assert sorted(x for each in found for batch in each for x in batch) == list(range(NUM_SAMPLES))
    again = batches(1, batch_sampler=BatchSampler(RandomSampler(range(NUM_SAMPLES)), 4, drop_last=False))
    seen = iter(again)
    assert next(seen).tolist() == found[1][0]
    state = again.state_dict()
    assert state["consumed"] == 2
    del seen
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == found[1][1:]

    whole = batches(1, batch_size=None, shuffle=False)
    assert len(whole) == 12 and list(whole) == [*range(1, NUM_SAMPLES, 2), 0]


def test_global_batch_size_keeps_the_batches_of_one_process() -> None:
    alone = [sorted(batch.tolist()) for batch in loader(range(64), global_batch_size=16, rank=0, num_replicas=1)]
    for num_ranks in (2, 4):
        ranks = [loader(range(64), global_batch_size=16, rank=r, num_replicas=num_ranks) for r in range(num_ranks)]
        assert [sorted(x for b in step for x in b.tolist()) for step in zip(*ranks, strict=True)] == alone


class OwnShares(IterableDataset[int]):
    """A stream that divides itself between ranks and workers."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.epoch = rank, num_ranks, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        first = self.rank * num_workers + worker
        return iter(range(1000 * self.epoch + first, 1000 * self.epoch + 40, self.num_ranks * num_workers))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_that_share_themselves(num_workers: int) -> None:
    def of(rank: int, num_ranks: int = 2, batch_size: int | None = 3) -> Any:
        return loader(
            OwnShares(rank, num_ranks),
            batch_size,
            shuffle=False,
            sharded_stream=True,
            num_workers=num_workers,
            rank=rank,
            num_replicas=num_ranks,
        )

    ranks = [of(0), of(1)]
    epochs = [[[b.tolist() for b in each] for each in ranks] for _ in range(2)]
    assert sorted(x for each in epochs[0] for b in each for x in b) == list(range(40))
    assert sorted(x for each in epochs[1] for b in each for x in b) == list(range(1000, 1040))
    begun = of(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = [b.tolist() for b in itertools.islice(begun, 3)]
    resumed = of(1)
    resumed.load_state_dict(begun.state_dict())
    assert first + [b.tolist() for b in resumed] == epochs[0][1]
    assert [b.tolist() for b in resumed] == epochs[1][1]
    with pytest.raises(UsageError, match=r"holds only with num_replicas=2, as it was saved \(got 1\)"):
        of(0, 1).load_state_dict(begun.state_dict())
    with pytest.raises(UsageError, match=r"batch_size=3, as it was saved \(got 4\)"):
        of(1, 2, 4).load_state_dict(begun.state_dict())
    assert [int(x) for x in of(1, batch_size=None)] and of(1, batch_size=None).batch_size is None
