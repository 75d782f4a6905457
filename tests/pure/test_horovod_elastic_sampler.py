"""``ElasticSampler``: no sample of an epoch is lost or comes twice, whatever ranks come and go."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.compat.horovod.torch.elastic import sampler as module
from guozhuang.compat.horovod.torch.elastic.sampler import ElasticSampler
from tests.drawing import examples


class Ranks:
    """All ranks' samplers in one process."""

    def __init__(self, num_samples: int, num_ranks: int, shuffle: bool = True, seed: int = 0) -> None:
        self._data, self._shuffle, self._seed = range(num_samples), shuffle, seed
        self.samplers: list[ElasticSampler] = []
        self.become(num_ranks)

    def become(self, num_ranks: int) -> None:
        """Another number of ranks; new ones take over where the first one is, as ``TorchState.sync`` does."""
        state = self.samplers[0].state_dict() if self.samplers else None
        kept, self.samplers = self.samplers, []
        for rank in range(num_ranks):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "size", lambda: num_ranks)
                patch.setattr(module, "rank", lambda rank=rank: rank)
                sampler = kept[rank] if rank < len(kept) else ElasticSampler(self._data, self._shuffle, self._seed)
                if state is not None:
                    sampler.load_state_dict(state)
                else:
                    sampler.reset()
            self.samplers.append(sampler)

    def batches(self, size: int, limit: int) -> Iterator[list[int]]:
        """What all ranks see in each of the next steps."""
        lists = [list(sampler) for sampler in self.samplers]
        assert {len(each) for each in lists} == {len(self.samplers[0])}
        steps = range(0, len(lists[0]), size)[:limit]
        for number, begin in enumerate(steps):
            seen = [index for each in lists for index in each[begin : begin + size]]
            for sampler in self.samplers:
                sampler.record_batch(number, size)
            yield seen


@examples(200)
@given(
    num_samples=st.integers(0, 60),
    sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 5)), min_size=1, max_size=6),
    last=st.integers(1, 7),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_an_epoch_is_seen_once(
    num_samples: int, sizes: list[tuple[int, int]], last: int, batch_size: int, shuffle: bool, epoch: int
) -> None:
    ranks = Ranks(num_samples, sizes[0][0], shuffle)
    for sampler in ranks.samplers:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "size", lambda: sizes[0][0])
            patch.setattr(module, "rank", lambda sampler=sampler: sampler.rank)
            sampler.set_epoch(epoch)
    seen: Counter[int] = Counter()
    padding = 0
    for num_ranks, num_batches in [*sizes, (last, 10**6)]:
        ranks.become(num_ranks)
        first = ranks.samplers[0]
        left = len(first.remaining_indices)
        assert first.total_size == first.num_samples * num_ranks >= left
        if first.total_size and num_batches * batch_size >= first.num_samples:
            padding += first.total_size - left  # it is seen to its end
        for batch in ranks.batches(batch_size, num_batches):
            seen.update(batch)
        assert first.processed_num <= num_samples
    assert set(seen) == set(range(num_samples)), "none is lost"
    assert sum(seen.values()) == num_samples + padding, "none comes twice but to fill up the last batch"
    assert ranks.samplers[0].processed_num == num_samples
    ranks.become(last)
    assert list(ranks.samplers[0]) == []


def test_the_order_is_that_of_python_and_strided() -> None:
    ranks = Ranks(10, 2, shuffle=True, seed=7)
    order = list(range(10))
    random.Random(7).shuffle(order)
    assert [list(sampler) for sampler in ranks.samplers] == [order[0::2], order[1::2]]
    assert ranks.samplers[0].remaining_indices == order
    assert [list(sampler) for sampler in Ranks(5, 2, shuffle=False).samplers] == [[0, 2, 4], [1, 3, 0]]


def test_fewer_samples_than_ranks_are_repeated() -> None:
    ranks = Ranks(2, 5, shuffle=False)
    assert [list(sampler) for sampler in ranks.samplers] == [[0], [1], [0], [1], [0]]
    assert [len(sampler) for sampler in ranks.samplers] == [1] * 5
    list(ranks.batches(4, 10))  # the batch has one sample of the four it was said to have
    assert ranks.samplers[0].processed_num == 2


def test_another_epoch_has_another_order_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "size", lambda: 1)
    monkeypatch.setattr(module, "rank", lambda: 0)
    sampler = ElasticSampler(range(50), seed=1)
    first = list(sampler)
    sampler.record_batch(0, 20)
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 20}
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "processed_num": 0}
    assert sorted(sampler) == list(range(50)) and list(sampler) != first
    sampler.load_state_dict({"epoch": 0, "processed_num": 20})
    assert list(sampler) == first[20:]
