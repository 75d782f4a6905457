"""DistributedSampler: torch's sequence, epochs that change by themselves, and resume on any number of ranks."""

from __future__ import annotations

import io
import json
import pickle
import tracemalloc
import warnings
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler as TorchSampler

from guozhuang.data import DistributedSampler
from guozhuang.errors import UsageError
from tests.drawing import examples

sizes = st.integers(0, 40)
ranks = st.integers(1, 7)
seeds = st.integers(0, 2**31)
all_ends = st.sampled_from(["pad", "drop", "uneven"])


def every_rank(num_samples: int, num_replicas: int, **options: Any) -> list[DistributedSampler]:
    return [DistributedSampler(range(num_samples), num_replicas, rank, **options) for rank in range(num_replicas)]


def order(num_samples: int, **options: Any) -> list[int]:
    """The epoch's order, as one process sees it."""
    return list(DistributedSampler(range(num_samples), 1, 0, **options))


@examples()
@given(sizes, ranks, st.booleans(), seeds, st.booleans(), st.integers(0, 5))
def test_torchs_own_arguments_give_torchs_own_indices(
    num_samples: int, num_replicas: int, shuffle: bool, seed: int, drop_last: bool, epoch: int
) -> None:
    for rank in range(num_replicas):
        arguments = (range(num_samples), num_replicas, rank, shuffle, seed, drop_last)
        ours, theirs = DistributedSampler(*arguments), TorchSampler(*arguments)
        assert list(ours) == list(theirs)
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs), "set_epoch with the same epoch repeats it, as torch does"
        assert len(ours) == len(theirs)
        assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size)


def test_torchs_indices_over_several_chunks() -> None:
    for num_samples in (4096 * 3, 4096 * 3 + 1, 50_001):
        for rank in range(3):
            ours = DistributedSampler(range(num_samples), 3, rank, seed=5)
            assert list(ours) == list(TorchSampler(range(num_samples), 3, rank, seed=5))


@examples()
@given(sizes, ranks, st.booleans(), all_ends)
def test_union_of_the_ranks(num_samples: int, num_replicas: int, shuffle: bool, ends: str) -> None:
    samplers = every_rank(num_samples, num_replicas, shuffle=shuffle, ends=ends)
    shares = [list(s) for s in samplers]
    assert [len(s) for s in samplers] == [len(share) for share in shares]
    check_union(Counter(i for share in shares for i in share), num_samples, num_replicas, ends, num_samples)
    assert samplers[0].total_size == sum(map(len, shares))
    if ends == "uneven":
        assert len(shares[0]) - len(shares[-1]) <= 1
        assert sorted(map(len, shares), reverse=True) == [len(share) for share in shares]
    else:
        assert len({len(share) for share in shares}) == 1


def check_union(seen: Counter[int], num_samples: int, num_replicas: int, ends: str, rest: int) -> None:
    """``rest``: samples that were left when the last ``num_replicas`` ranks began."""
    if ends == "uneven":
        assert seen == Counter(range(num_samples))
    elif ends == "pad":
        assert set(seen) == set(range(num_samples))
        assert seen.total() == (num_samples + -rest % num_replicas if num_samples else 0)
        assert not seen or max(seen.values()) - min(seen.values()) <= 1
    else:
        assert all(count == 1 for count in seen.values())
        assert seen.total() == num_samples - rest % num_replicas


@examples()
@given(sizes, st.booleans(), st.lists(st.tuples(ranks, st.integers(0, 8), all_ends), min_size=1, max_size=4), st.data())
def test_resume_on_other_numbers_of_ranks(
    num_samples: int, shuffle: bool, stages: list[tuple[int, int, str]], data: st.DataObject
) -> None:
    """Several lives in one epoch, each with its own number of ranks; the last one runs to the end."""
    state: dict[str, Any] | None = None
    epoch = data.draw(st.integers(0, 3))
    seen: list[int] = []
    for number, (num_replicas, num_steps, ends) in enumerate(stages):
        samplers = every_rank(num_samples, num_replicas, shuffle=shuffle, ends=ends, seed=7)
        for sampler in samplers:
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(state)
        last = number == len(stages) - 1
        smallest = samplers[-1].smallest_share()
        rest = num_samples - len(seen)
        passes = [list(islice(s, None if last else min(num_steps, smallest))) for s in samplers]
        if last:
            check_union(Counter(seen) + Counter(i for p in passes for i in p), num_samples, num_replicas, ends, rest)
            for sampler in samplers:
                assert sampler.state_dict() | {"epoch": epoch, "consumed": num_samples} == sampler.state_dict()
        else:
            seen += [index for step in zip(*passes, strict=True) for index in step][: num_samples - len(seen)]
            states = [s.state_dict() for s in samplers]
            assert all(s == states[0] for s in states), "ranks in step have the same state"
            state = json.loads(json.dumps(states[0]))
    wanted = DistributedSampler(range(num_samples), 1, 0, shuffle=shuffle, seed=7)
    wanted.set_epoch(epoch)
    assert seen == list(wanted)[: len(seen)], "what was consumed is a prefix of the one order"


def test_epochs_differ_without_set_epoch_and_are_those_of_set_epoch() -> None:
    sampler, again, torchs = (DistributedSampler(range(50), 2, 1, seed=3) for _ in range(3))
    epochs = [list(sampler) for _ in range(4)]
    assert len({tuple(e) for e in epochs}) == 4
    assert epochs == [list(again) for _ in range(4)], "the same seed gives the same epochs"
    for number, wanted in enumerate(epochs):
        torchs.set_epoch(number)
        assert list(torchs) == wanted
    assert sampler.epoch == 3
    assert list(DistributedSampler(range(50), 2, 1, seed=4)) != epochs[0]


def test_set_epoch_is_followed_by_the_next_by_itself() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    sampler.set_epoch(5)
    list(sampler)
    list(sampler)
    assert sampler.epoch == 6
    sampler.epoch = 2  # as programs for torch's sampler do
    torchs = TorchSampler(range(20), 1, 0)
    torchs.set_epoch(2)
    assert list(sampler) == list(torchs)


def test_pass_left_midway_is_begun_again_and_warned_of_once() -> None:
    sampler = DistributedSampler(range(20), 2, 0)
    first = list(islice(sampler, 1))
    with pytest.warns(UserWarning, match="Epoch 0 was left after 1 samples") as caught:
        whole = list(islice(sampler, 3))
    assert caught[0].filename == __file__
    assert whole[:1] == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(sampler)[:3] == whole
        assert sampler.epoch == 0
        assert list(sampler)[:3] != whole
    assert sampler.epoch == 1


def test_iterator_that_nothing_was_taken_from_changes_nothing() -> None:
    sampler = DistributedSampler(range(9), 1, 0)
    iter(sampler)
    iter(sampler)
    assert list(sampler) == order(9)


def test_ranks_that_stop_at_the_same_step_agree_on_the_next_epoch() -> None:
    samplers = every_rank(7, 2, ends="uneven")
    for sampler in samplers:
        list(islice(sampler, 3))  # all of rank 1's share, but not all of rank 0's
        iter(sampler)
    assert [s.epoch for s in samplers] == [1, 1]


def test_only_the_newest_iterator_counts() -> None:
    sampler = DistributedSampler(range(10), 2, 0)
    old = iter(sampler)
    new = iter(sampler)
    next(new)
    list(old)
    assert sampler.state_dict()["consumed"] == 2
    assert not sampler.state_dict()["finished"]


def test_epoch_is_fixed_by_iter() -> None:
    sampler = DistributedSampler(range(30), 1, 0)
    iterator = iter(sampler)
    sampler.set_epoch(4)
    assert list(iterator) == order(30)
    assert sampler.state_dict() | {"epoch": 4, "consumed": 0, "finished": False} == sampler.state_dict()


def resumed(state: dict[str, Any]) -> DistributedSampler:
    sampler = DistributedSampler(range(10), 1, 0)
    sampler.load_state_dict(state)
    return sampler


def test_rest_of_the_epoch_with_and_without_set_epoch() -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    list(sampler)
    epoch_1 = list(islice(sampler, 4))
    state = sampler.state_dict()
    whole = order_of_epoch(1)
    assert epoch_1 == whole[:4]
    assert list(resumed(state)) == whole[4:]
    told = resumed(state)
    told.set_epoch(1)
    assert list(told) == whole[4:], "set_epoch of the state's epoch still means its rest"
    told.set_epoch(1)
    assert list(told) == whole, "but only once"
    other = resumed(state)
    other.set_epoch(2)
    assert list(other) == order_of_epoch(2)
    on = resumed(state)
    list(on)
    assert list(on) == order_of_epoch(2), "after the rest comes the next epoch"


def test_peek_after_resume_loses_and_repeats_nothing() -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    list(islice(sampler, 4))
    again = resumed(sampler.state_dict())
    next(iter(again))
    with pytest.warns(UserWarning, match="was left"):
        assert list(again) == order(10)[4:]


def order_of_epoch(epoch: int) -> list[int]:
    sampler = DistributedSampler(range(10), 1, 0)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_state_after_the_end_of_an_epoch() -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    list(sampler)
    state = sampler.state_dict()
    assert state["finished"]
    assert list(resumed(state)) == order_of_epoch(1)
    told = resumed(state)
    told.set_epoch(0)
    assert list(told) == [], "epoch 0 has nothing left"
    assert list(told) == order_of_epoch(1)
    told = resumed(state)
    told.set_epoch(1)
    assert list(told) == order_of_epoch(1)


def test_state_after_the_last_sample_but_before_the_end_was_seen() -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    list(islice(sampler, 10))
    state = sampler.state_dict()
    assert (state["consumed"], state["finished"]) == (10, False)
    again = resumed(state)
    assert list(again) == []
    assert list(again) == order_of_epoch(1)


def test_state_is_kept_by_a_loaded_sampler() -> None:
    sampler = DistributedSampler(range(10), 2, 0)
    list(islice(sampler, 2))
    state = sampler.state_dict()
    assert resumed(state).state_dict() == state


def test_state_is_small_and_saves_anywhere() -> None:
    sampler = DistributedSampler(range(100_000), 2, 1)
    list(islice(sampler, 10))
    state = sampler.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 200
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


def test_pickle_is_small_and_goes_on() -> None:
    sampler = DistributedSampler(range(100_000), 2, 1)
    iterator = iter(sampler)
    taken = [next(iterator) for _ in range(10)]
    pickled = pickle.dumps(sampler)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)
    assert copy.state_dict() == sampler.state_dict()
    resumed_copy = DistributedSampler(range(100_000), 2, 1)
    resumed_copy.load_state_dict(copy.state_dict())
    assert taken + list(resumed_copy) == list(DistributedSampler(range(100_000), 2, 1))


def test_memory_does_not_grow_with_python_objects() -> None:
    assert next(iter(DistributedSampler(range(10**15), 4, 3, shuffle=False))) == 3
    sampler = DistributedSampler(range(1_000_000), 1, 0)
    tracemalloc.start()
    try:
        held = iter(sampler)
        for _ in islice(held, 10_000):
            pass
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # as a list: 36 MB
    finally:
        tracemalloc.stop()


def test_ranks_come_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = DistributedSampler(range(5))
    assert (alone.num_replicas, alone.rank) == (1, 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    found = DistributedSampler(range(5))
    assert (found.num_replicas, found.rank) == (4, 2)
    told = DistributedSampler(range(5), 3, 1)
    assert (told.num_replicas, told.rank) == (3, 1)


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((range(5), 2, 2), {}, r"`rank` is not within 0 to 1 .*got 2"),
        ((range(5), 2, -1), {}, r"`rank` is not within 0 to 1 .*got -1"),
        ((range(5), None, 1), {}, r"`rank` is not within 0 to 0"),
        ((range(5), 0, 0), {}, r"`num_replicas` is too small \(got 0\)"),
        ((range(5), 2.0, 0), {}, r"`num_replicas` is not a whole number"),
        ((range(5), 2, 0), {"seed": "x"}, r"`seed` is not a whole number"),
        ((range(5), 2, 0), {"ends": "cut"}, r"`ends` is not known \(got 'cut'\)"),
        ((range(5), 2, 0), {"ends": "pad", "drop_last": True}, r'`drop_last=True` means ends="drop"'),
        ((range(5), 2, 0), {"ends": "uneven", "drop_last": True}, r'`drop_last=True` means ends="drop"'),
        ((NoLength(), 2, 0), {}, r"The dataset has no length.*NoLength"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DistributedSampler(*arguments, **options)


def test_drop_last_and_ends_drop_agree() -> None:
    for sampler in (
        DistributedSampler(range(5), 2, 0, drop_last=True),
        DistributedSampler(range(5), 2, 0, ends="drop"),
    ):
        assert (sampler.ends, sampler.drop_last, len(sampler)) == ("drop", True, 2)
    assert DistributedSampler(range(5), 2, 0, drop_last=True, ends="drop").drop_last


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, "saved with length=11, but here it is 10"),
        ({"seed": 1}, "saved with seed=1, but here it is 0"),
        ({"shuffle": False}, "saved with shuffle=False, but here it is True"),
        ({"consumed": 11}, r"counts more samples than the dataset has \(10\)"),
        ({"consumed": -1}, "`consumed` is too small"),
        ({"epoch": "one"}, "`epoch` is not a whole number"),
        ({"stream": True}, r"unknown entries \['stream'\]"),
    ],
)
def test_state_of_something_else(change: dict[str, Any], message: str) -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    before = sampler.state_dict()
    with pytest.raises(UsageError, match=message):
        sampler.load_state_dict(before | change)
    assert sampler.state_dict() == before, "a refused state changes nothing"


def test_state_that_is_none() -> None:
    with pytest.raises(UsageError, match="lacks"):
        DistributedSampler(range(10), 1, 0).load_state_dict({"epoch": 1})
    with pytest.raises(UsageError, match="not a mapping"):
        DistributedSampler(range(10), 1, 0).load_state_dict(3)  # type: ignore[arg-type]


def test_dataset_that_changes_its_length() -> None:
    data = [1, 2, 3]
    sampler = DistributedSampler(data, 1, 0)
    data.append(4)
    with pytest.raises(UsageError, match="had 3 samples when the sampler was made"):
        list(sampler)
