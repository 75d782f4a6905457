"""loader: batches that match one process's, and a resume that counts what training has seen, not what was fetched."""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data import DistributedSampler as TorchSampler

from guozhuang.data import DistributedSampler, Loader, loader
from guozhuang.errors import UsageError
from tests.drawing import examples

sizes = st.integers(0, 40)
ranks = st.integers(1, 5)
batch_sizes = st.integers(1, 6)
all_ends = st.sampled_from(["pad", "drop", "uneven"])


class Numbers(IterableDataset[int]):
    """A stream of 0, 1, 2, ...; with ``shift`` it adds the epoch's 100."""

    def __init__(self, num_samples: int, shift: bool = False) -> None:
        self.num_samples = num_samples
        self.epoch = 0
        self.shift = shift

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch * self.shift, 100 * self.epoch * self.shift + self.num_samples))


class CountedNumbers(Numbers):
    def __len__(self) -> int:
        return self.num_samples


class Draws:
    """A sample is what the three random generators of its worker give."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        info = get_worker_info()
        assert info is not None
        return info.id, random.random(), float(np.random.random()), float(torch.rand(()))


def as_lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def every_rank(num_samples: int, num_replicas: int, batch_size: int, **options: Any) -> list[Loader]:
    return [
        loader(range(num_samples), batch_size, rank=rank, num_replicas=num_replicas, **options)
        for rank in range(num_replicas)
    ]


@examples()
@given(st.integers(1, 5), ranks, batch_sizes, st.booleans(), all_ends)
def test_batches_of_the_ranks_make_up_the_batch_of_one_process(
    num_batches: int, num_replicas: int, batch_size: int, shuffle: bool, ends: str
) -> None:
    num_samples = num_batches * num_replicas * batch_size
    single = loader(range(num_samples), num_replicas * batch_size, shuffle=shuffle, rank=0, num_replicas=1)
    loaders = every_rank(num_samples, num_replicas, batch_size, shuffle=shuffle, ends=ends)
    for _epoch in range(2):
        wanted = as_lists(single)
        of_ranks = [as_lists(each) for each in loaders]
        assert len(wanted) == num_batches
        for whole, parts in zip(wanted, zip(*of_ranks, strict=True), strict=True):
            assert [index for row in zip(*parts, strict=True) for index in row] == whole


@examples()
@given(sizes, ranks, batch_sizes, all_ends, st.booleans())
def test_length(num_samples: int, num_replicas: int, batch_size: int, ends: str, drop_last: bool) -> None:
    for each in every_rank(num_samples, num_replicas, batch_size, ends=ends, drop_last=drop_last):
        batches = as_lists(each)
        assert len(each) == len(batches) == len(each.batch_sampler)
        assert all(len(b) == batch_size for b in (batches if drop_last else batches[:-1]))


stages = st.lists(st.tuples(ranks, batch_sizes, st.integers(0, 5), all_ends), min_size=1, max_size=4)


@examples()
@given(sizes, stages, st.booleans())
def test_resume_with_other_ranks_and_batches(
    num_samples: int, lives: list[tuple[int, int, int, str]], stream: bool
) -> None:
    """Each life ends after some steps that every rank could make, the last at the end of the epoch."""
    state: dict[str, Any] | None = None
    seen: Counter[int] = Counter()
    for number, (num_replicas, batch_size, num_steps, ends) in enumerate(lives):
        options: dict[str, Any] = {"ends": ends, "num_replicas": num_replicas}
        if stream:
            data: Any = Numbers(num_samples)
            options |= {"shuffle": False, "stride_stream": True}
        else:
            data = range(num_samples)
        loaders = [loader(data, batch_size, rank=rank, **options) for rank in range(num_replicas)]
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
        rest = num_samples - seen.total()
        if number == len(lives) - 1:
            last = Counter(i for each in loaders for b in each for i in b.tolist())
            if ends == "uneven":
                assert seen + last == Counter(range(num_samples))
            elif ends == "pad":
                assert set(seen + last) == set(range(num_samples))
                assert last.total() == rest + (-rest % num_replicas if rest else 0)
                assert max((seen + last).values(), default=1) - min((seen + last).values(), default=1) <= 1
            else:
                assert max((seen + last).values(), default=1) == 1
                assert last.total() == rest - rest % num_replicas
            assert all(each.state_dict()["finished"] for each in loaders)
            return
        # Stop before the ends, where "pad" and "uneven" differ between ranks: that is for the last life.
        num_steps = min(num_steps, rest // (num_replicas * batch_size))
        seen.update(i for each in loaders for b in islice(each, num_steps) for i in b.tolist())
        states = [each.state_dict() for each in loaders]
        assert all(s == states[0] for s in states)
        state = json.loads(json.dumps(states[0]))
        assert state["consumed"] == seen.total()


@examples()
@given(sizes, ranks, batch_sizes, all_ends)
def test_state_after_any_step_of_rank_0(num_samples: int, num_replicas: int, batch_size: int, ends: str) -> None:
    """Also in the last step, where ranks have smaller batches or none: what others take up is what nobody has seen."""
    loaders = every_rank(num_samples, num_replicas, batch_size, ends=ends)
    for num_steps in range(len(loaders[0]) + 1):
        for each in loaders:
            each.set_epoch(0)
        seen = Counter(i for each in loaders for b in islice(each, num_steps) for i in b.tolist())
        after = loader(range(num_samples), 1, rank=0, num_replicas=1)
        after.load_state_dict(loaders[0].state_dict())
        rest = [i for b in after for i in b.tolist()]
        assert set(seen) | set(rest) == set(range(num_samples))
        assert not set(seen) & set(rest)
        if ends != "uneven":
            assert loaders[-1].state_dict() == loaders[0].state_dict()


@examples()
@given(sizes, ranks, batch_sizes, all_ends, st.integers(0, 45), st.booleans())
def test_stream_gives_what_indices_give(
    num_samples: int, num_replicas: int, batch_size: int, ends: str, start: int, drop_last: bool
) -> None:
    for rank in range(num_replicas):
        options: dict[str, Any] = {"rank": rank, "num_replicas": num_replicas, "ends": ends, "drop_last": drop_last}
        stream = loader(CountedNumbers(num_samples), batch_size, shuffle=False, stride_stream=True, **options)
        indexed = loader(range(num_samples), batch_size, shuffle=False, **options)
        assert len(stream) == len(indexed)
        assert as_lists(stream) == as_lists(indexed)
        stream.load_state_dict(stream.state_dict() | {"consumed": start, "finished": False})
        indexed.load_state_dict(indexed.state_dict() | {"consumed": min(start, num_samples), "finished": False})
        assert as_lists(stream) == as_lists(indexed)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_stream(persistent: bool) -> None:
    options: dict[str, Any] = {"shuffle": False, "rank": 1, "num_replicas": 2}
    wanted = as_lists(loader(range(31), 4, **options))
    stream = loader(
        Numbers(31, shift=True), 4, stride_stream=True, num_workers=2, persistent_workers=persistent, **options
    )
    for epoch in range(2):
        assert as_lists(stream) == [[100 * epoch + i for i in b[:-1]] + [b[-1] + 100 * epoch] for b in wanted]
    steps = iter(stream)
    next(steps)
    state = stream.state_dict()
    del steps
    stream.load_state_dict(state)
    assert as_lists(stream) == [[200 + i for i in b] for b in wanted[1:]]
    assert as_lists(stream)[0] == [300 + i for i in wanted[0]], "the epoch after a resumed one is whole"


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_resume_counts_what_was_handed_out(persistent: bool) -> None:
    def make(num_replicas: int, rank: int, num_workers: int) -> Loader:
        return loader(
            range(50),
            3,
            seed=1,
            num_replicas=num_replicas,
            rank=rank,
            num_workers=num_workers,
            persistent_workers=persistent and num_workers > 0,
            **({"prefetch_factor": 8} if num_workers else {}),
        )

    single = [i for b in make(1, 0, 0) for i in b.tolist()]
    half = make(2, 0, 2)  # fetches all its 9 batches ahead
    steps = iter(half)
    assert [next(steps).tolist() for _ in range(3)] == [single[0:6:2], single[6:12:2], single[12:18:2]]
    state = half.state_dict()
    assert (state["consumed"], state["finished"]) == (18, False)
    assert half.sampler.state_dict() == state
    for num_workers in (0, 1):
        thirds = [make(3, rank, num_workers) for rank in range(3)]
        for each in thirds:
            each.load_state_dict(state)
        rows = [[i for b in each for i in b.tolist()] for each in thirds]
        assert [i for row in zip(*rows, strict=True) for i in row][:32] == single[18:]
    # The loader itself, its workers still busy with what they had fetched.
    half.load_state_dict(state)
    assert [i for b in half for i in b.tolist()] == single[18::2]
    assert len(next(iter(half))) == 3
    assert half.sampler.epoch == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_epochs_advance_by_what_training_saw(num_workers: int) -> None:
    batches = loader(range(12), 3, num_workers=num_workers, rank=0, num_replicas=1)
    first = next(iter(batches)).tolist()  # a worker has fetched the whole epoch by now
    with pytest.warns(UserWarning, match="Epoch 0 was left after 3 samples"):
        again = as_lists(batches)
    assert again[0] == first
    assert as_lists(batches) != again
    assert batches.sampler.epoch == 1
    for _ in islice(batches, 4):  # all, though the end is not asked for
        pass
    iter(batches)
    assert batches.sampler.epoch == 3
    batches.set_epoch(0)
    assert as_lists(batches) == again


def test_loop_that_breaks_at_the_last_whole_batch_is_a_full_epoch() -> None:
    batches = loader(range(7), 2, drop_last=True, rank=0, num_replicas=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in islice(batches, 3):
            pass
        iter(batches)
    assert batches.sampler.epoch == 1


def test_persistent_workers_serve_the_newest_pass_only() -> None:
    batches = loader(range(12), 3, num_workers=1, persistent_workers=True, rank=0, num_replicas=1)
    old = iter(batches)
    kept = next(old).tolist()
    with pytest.warns(UserWarning, match="was left"):
        new = iter(batches)
    with pytest.raises(UsageError, match="a newer one has taken its persistent workers"):
        next(old)
    assert next(new).tolist() == kept
    assert len(as_lists(new)) == 3


@pytest.mark.slow
def test_worker_seeds_differ_by_rank_worker_and_epoch_and_repeat() -> None:
    def draws(rank: int, seed: int = 0) -> list[list[tuple[float, ...]]]:
        each = loader(
            Draws(), 1, num_workers=2, rank=rank, num_replicas=2, seed=seed, collate_fn=lambda batch: batch[0]
        )
        return [list(each) for _epoch in range(2)]

    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    torch.manual_seed(0)  # ranks often start alike; their workers must not
    rank_0 = draws(0)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rank_1 = draws(1)
    assert torch.equal(torch.get_rng_state(), before), "a pass draws nothing from the process's own generator"
    torch.set_rng_state(state[0])
    assert random.getstate() == state[1]
    assert np.random.get_state()[1].tolist() == state[2]  # type: ignore[index, union-attr]
    for generator in (1, 2, 3):
        values = [sample[generator] for epochs in (rank_0, rank_1) for epoch in epochs for sample in epoch]
        assert len(set(values)) == len(values) == 16
    assert {sample[0] for sample in rank_0[0]} == {0, 1}
    torch.manual_seed(123)
    assert draws(0) == rank_0
    assert draws(0, seed=1) != rank_0


def test_num_taken_is_for_loaders_that_fetch_ahead() -> None:
    sampler = DistributedSampler(range(40), 2, 0)
    whole = list(DistributedSampler(range(40), 1, 0))
    loader = iter(DataLoader(range(40), batch_size=3, sampler=sampler, num_workers=1, prefetch_factor=16))
    batch = next(loader)
    assert sampler.state_dict()["finished"], "fetched to the end"
    state = sampler.state_dict(num_taken=3)
    assert (state["consumed"], state["finished"]) == (6, False)
    assert batch.tolist() == whole[:6:2]
    again = DistributedSampler(range(40), 1, 0)
    again.load_state_dict(state)
    assert list(again) == whole[6:]


def test_under_torchs_loader_without_batches_and_with_workers() -> None:
    """torch calls iter() twice there; that must not skip an epoch."""
    sampler = DistributedSampler(range(8), 1, 0)
    loader = DataLoader(range(8), batch_size=None, sampler=sampler, num_workers=1)
    assert list(loader) == list(DistributedSampler(range(8), 1, 0))
    assert sampler.epoch == 0


def test_collate_and_torchs_options_reach_the_workers() -> None:
    made = []
    batches = loader(range(4), 2, shuffle=False, collate_fn=lambda b: tuple(b), rank=0, num_replicas=1)
    assert list(batches) == [(0, 1), (2, 3)]
    with_init = loader(
        range(2), 1, num_workers=1, worker_init_fn=made.append, prefetch_factor=3, rank=0, num_replicas=1
    )
    assert len(list(with_init)) == 2
    assert with_init._batches.prefetch_factor == 3
    assert with_init._batches.timeout == 1800
    assert loader(range(2), num_workers=1, timeout=77, rank=0, num_replicas=1)._batches.timeout == 77
    assert made == []  # it ran in the worker


def test_batch_sampler_shows_the_pass_and_changes_nothing() -> None:
    batches = loader(range(10), 3, rank=0, num_replicas=2)
    assert isinstance(batches.sampler, DistributedSampler)
    assert batches.dataset == range(10)
    for _ in range(2):
        assert list(batches.batch_sampler) == [b.tolist() for b in loader(range(10), 3, rank=0, num_replicas=2)]
    assert batches.state_dict()["consumed"] == 0


def test_world_instead_of_rank() -> None:
    @dataclass(frozen=True)
    class World:
        rank: int
        size: int

    assert as_lists(loader(range(9), 2, world=World(1, 3))) == as_lists(loader(range(9), 2, rank=1, num_replicas=3))
    with pytest.raises(UsageError, match="`world` and rank or num_replicas were both given"):
        loader(range(9), 2, world=World(1, 3), rank=1)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (range(5), {"batch_size": 0}, r"`batch_size` is too small \(got 0\)"),
        (range(5), {"batch_size": "4"}, "`batch_size` is not a whole number"),
        (range(5), {"batch_size": 2, "global_batch_size": 4}, "`batch_size` counts per rank.*both were given"),
        (range(5), {"global_batch_size": 32, "num_replicas": 3, "rank": 0}, "no multiple of.* 3,.*pass 30 or 33"),
        (range(5), {"batch_size": None, "drop_last": True}, "`drop_last` drops a batch that is too small"),
        (range(5), {"num_workers": -1}, "`num_workers` is too small"),
        (range(5), {"rank": 2, "num_replicas": 2}, "`rank` is not within 0 to 1"),
        (range(5), {"ends": "cut"}, "`ends` is not known"),
        (range(5), {"sampler": iter([1, 2])}, "must be an iterable with a length"),
        (range(5), {"sampler": TorchSampler(range(5), 2, 0)}, "divides the data among ranks itself"),
        (range(5), {"sampler": [1], "batch_sampler": [[1]]}, "`sampler` and `batch_sampler` were both given"),
        (range(5), {"batch_sampler": [[1]], "shuffle": True}, "`shuffle=True` was given, and `batch_sampler` decides"),
        (range(5), {"batch_sampler": [[1]], "batch_size": 3}, "`batch_sampler` makes the batches"),
        (range(5), {"generator": torch.Generator()}, "`generator` was given.*seed="),
        (range(5), {"in_order": False, "num_workers": 1}, "`in_order=False` gives batches out of order"),
        (range(5), {"stride_stream": True}, "`stride_stream` is for an IterableDataset"),
        (iter(range(5)), {}, "The dataset has no length"),
        (Numbers(5), {}, "does not say whether each rank.*stride_stream=True"),
        (Numbers(5), {"stride_stream": True}, "cannot be shuffled by index.*shuffle=False"),
        (Numbers(5), {"sharded_stream": True, "stride_stream": True, "shuffle": False}, "does not say whether each"),
        (Numbers(5), {"sharded_stream": True, "shuffle": False, "ends": "drop"}, "the stream decides how many"),
        (Numbers(5), {"stride_stream": True, "shuffle": False, "sampler": [1]}, "A sampler chooses by index"),
    ],
)
def test_wrong_arguments(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader(data, **options)


def test_unknown_option_is_torchs_error() -> None:
    with pytest.raises(TypeError, match="no_such"):
        loader(range(5), no_such=1)


def test_states_of_something_else() -> None:
    state = loader(range(5), rank=0, num_replicas=1).state_dict()
    with pytest.raises(UsageError, match="length=5, but here it is 6"):
        loader(range(6), rank=0, num_replicas=1).load_state_dict(state)
    with pytest.raises(UsageError, match="seed=0, but here it is 1"):
        loader(range(5), seed=1, rank=0, num_replicas=1).load_state_dict(state)
    stream = loader(Numbers(5), shuffle=False, stride_stream=True, rank=0, num_replicas=1)
    with pytest.raises(UsageError, match="lacks"):
        stream.load_state_dict(state)


def test_stream_without_length_has_none() -> None:
    stream = loader(Numbers(5), 2, shuffle=False, stride_stream=True, rank=0, num_replicas=1)
    with pytest.raises(TypeError, match="Numbers has no length"):
        len(stream)


class Drawing(Draws):
    """What a dataset draws of each generator."""

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return (index, torch.rand(()).item(), random.random(), float(np.random.rand()))


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_workers_draw_the_same_for_a_batch_however_it_is_reached(options) -> None:
    def make(num_workers: int, **more: Any) -> Any:
        return loader(Drawing(), 1, num_workers=num_workers, rank=1, num_replicas=2, collate_fn=list, **more)

    whole = list(make(2))
    first, second = make(1), make(3, **options)
    begun = list(islice(first, 2))
    second.load_state_dict(first.state_dict())
    assert begun == whole[:2] and len(whole) > 3
    assert list(second) == whole[2:]
    assert len({draw for batch in whole for row in batch for draw in row[1:]}) == 3 * sum(map(len, whole))
