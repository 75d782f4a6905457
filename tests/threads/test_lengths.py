"""Ranks whose datasets have different lengths make as many steps as ``ends`` asks, and say so once; shares of a layout."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist
from torch import nn

from guozhuang import DistributedDataParallel
from guozhuang.data import loader, sampler
from guozhuang.errors import UsageError
from guozhuang.registry import registry
from tests.threads.ranks import run_threads

LENGTHS = (10, 7, 9)


def passes(rank: int, size: int, ends: str, shuffle: bool, num_samples: tuple[int, ...]) -> list[list[list[int]]]:
    made = loader(list(range(num_samples[rank])), 2, ends=ends, shuffle=shuffle)  # type: ignore[arg-type]
    steps = len(made)
    found = [[batch.tolist() for batch in made] for _ in range(2)]
    assert all(len(batches) == steps for batches in found)
    return found


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("ends", "steps", "samples"),
    [("pad", [2, 2, 2], [4, 4, 4]), ("drop", [1, 1, 1], [2, 2, 2]), ("uneven", [2, 1, 2], [4, 2, 3])],
)
def test_an_epoch_ends_as_asked(
    ends: str, steps: list[int], samples: list[int], shuffle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "guozhuang"):
        for rank, epochs in enumerate(run_threads(passes, 3, ends, shuffle, LENGTHS)):
            for batches in epochs:
                assert len(batches) == steps[rank]
                got = [index for batch in batches for index in batch]
                assert len(got) == samples[rank] and max(got) < LENGTHS[rank], got
    [record] = caplog.records
    assert f'differ in length; with ends="{ends}"' in record.getMessage()
    assert [line.split() for line in record.getMessage().splitlines()[2:]] == [
        ["rank", str(rank), str(length)] for rank, length in enumerate(LENGTHS)
    ]


def test_equal_lengths_are_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "guozhuang"):
        run_threads(passes, 3, "pad", True, (7, 7, 7))
    assert not caplog.records


def alone(rank: int, size: int) -> int:
    if rank == 0:
        return 0
    return sum(len(batch) for batch in loader(list(range(9)), 2, shuffle=False))


def test_a_loader_of_one_rank_alone_is_told_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampler, "_LENGTHS_S", 0.3)
    with caplog.at_level(logging.WARNING, "guozhuang"):
        assert run_threads(alone, 3) == [0, 3, 3]
    heard = sorted(record.getMessage().partition(" like")[0] for record in caplog.records)
    assert heard == [f"[rank {rank}] rank 0 made no loader" for rank in (1, 2)]


def beside_one_of_its_own(rank: int, size: int) -> list[int]:
    registry.data_share = (0, 1)  # as where the ranks hold one copy of the model together
    own = [loader(list(range(100)), 2, rank=0, num_replicas=1)] if rank == 0 else []
    return [len(made) for made in (*own, loader(list(range(9)), 2, shuffle=False))]


def test_a_loader_for_one_rank_alone_has_the_length_of_its_data_also_where_ranks_share_one_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "data_share", None)
    with caplog.at_level(logging.WARNING, "guozhuang"):
        assert run_threads(beside_one_of_its_own, 2) == [[50, 5], [5]]
    assert not caplog.records


def test_a_layout_that_nobody_applies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrap(rank: int, size: int) -> str:
        with pytest.raises(UsageError, match="prepare does, and it was not called") as raised:
            DistributedDataParallel(nn.Linear(2, 2))
        DistributedDataParallel(nn.Linear(2, 2), process_group=dist.group.WORLD)
        return str(raised.value)

    monkeypatch.setattr(registry, "data_share", (0, 1))  # of --strategy pipeline
    assert all("1 shares of the data" in text for text in run_threads(wrap, 2))
