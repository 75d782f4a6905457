"""A run goes on under any other strategy, on any number of ranks, as one training: ranks that share the model stay equal."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import guozhuang as gz
from guozhuang.checkpoint import run as of_run
from guozhuang.sharding.whole import full_weights
from guozhuang.strategies.table import STRATEGIES
from guozhuang.world.layout import HYBRID, OWN_AXIS
from tests.processes.test_peers import Model, loss_of
from tests.ranks import run_ranks
from tests.waiting import LIMIT_S

STEPS = 2
# Those that keep each rank's optimizer apart, those that share it, and those that divide it.
SOME = ("ddp", "sharded", "diloco", "none", "pipeline")
EVERY = tuple(
    name for name, each in STRATEGIES.items() if each.trains and name != "space"
)  # which divides images alone
DIVIDE = {*OWN_AXIS, HYBRID, "torch-pipeline", "torch-tensor"}
# Ranks train for themselves between two exchanges, and their weights differ.
APART = {"none", "horovod-local-gradients"}


def prepared(name: str, size: int) -> Any:
    torch.manual_seed(3)
    model = Model()
    layout = f"tp={size}" if name == HYBRID else None
    return model, gz.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), name, layout=layout)


def train(pair: Any, name: str, rank: int) -> None:
    generator = torch.Generator().manual_seed(0 if name in DIVIDE else rank)
    for _ in range(STEPS):
        words = torch.randint(0, 50, (12, 8), generator=generator)
        pair.step({"words": words, "answers": words[:, 0] % 2}, loss_of)


def fits(name: str, size: int) -> bool:
    if STRATEGIES[name].one_process:
        return size == 1
    least = 2 if name in ("torch-pipeline", "torch-tensor") else 1
    most = 2 if name in ("sequence", "tensor", "torch-tensor", HYBRID) else 3  # which divide the 4 heads
    return least <= size <= most


def saves(rank: int, size: int, names: tuple[str, ...], folder: str) -> None:
    for name in names:
        of_run._leave()
        gz.init(timeout_s=LIMIT_S)
        _, pair = prepared(name, size)
        train(pair, name, rank)
        gz.save(f"{folder}/{name}-{size}")
        gz.shutdown()


def goes_on(rank: int, size: int, origins: list[str], names: tuple[str, ...], folder: str) -> dict[str, str]:
    """The hash of the weights after some steps from each checkpoint, or what refused it."""
    found: dict[str, str] = {}
    notes: list[str] = []
    logging.getLogger("guozhuang").addFilter(lambda record: notes.append(record.getMessage()) or True)
    for name in names:
        of_run._leave()
        gz.init(timeout_s=LIMIT_S)
        model, pair = prepared(name, size)
        for origin in origins:
            key = f"{origin} to {name}-{size}"
            notes.clear()
            try:
                assert gz.restore(f"{folder}/{origin}") is not None
            except gz.errors.UsageError as error:
                found[key] = str(error)
                continue
            is_said = any("all ranks go on with those of rank 0" in note for note in notes)
            train(pair, name, rank)
            pair[0].state_dict()  # makes weights equal that are exchanged now and then
            text = b"".join(w.cpu().contiguous().numpy().tobytes() for _, w in sorted(full_weights(model).items()))
            found[key] = hashlib.sha256(text).hexdigest()[:12] + (" said" if is_said and rank == 0 else "")
            if size > 1:
                dist.barrier()
        gz.shutdown()
    return found


def check(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    into: tuple[int, ...],
    folder: Path,
    into_names: tuple[str, ...] | None = None,
) -> dict[str, list[str]]:
    """What each rank found, by the pair of strategies with their numbers of ranks: saved on ``sizes``, restored on ``into``.

    ``into_names`` are the strategies that go on; None: ``names``.
    """
    env = {"GUOZHUANG_SERVERS": None}
    origins = []
    for size in sizes:
        chosen = tuple(name for name in names if fits(name, size))
        run_ranks(saves, size, chosen, str(folder), init=False, env=env, timeout_s=10 * LIMIT_S)
        origins += [f"{name}-{size}" for name in chosen]
    whole: dict[str, list[str]] = {}
    for size in into:
        chosen = tuple(name for name in into_names or names if fits(name, size))
        found = run_ranks(goes_on, size, origins, chosen, str(folder), init=False, env=env, timeout_s=10 * LIMIT_S)
        whole |= {key: [each[key] for each in found] for key in found[0]}
    return whole


def differing(whole: dict[str, list[str]]) -> list[str]:
    found = []
    for key, texts in whole.items():
        name = key.partition(" to ")[2].rpartition("-")[0]
        if len({text.removesuffix(" said") for text in texts}) > 1 and name not in APART:
            found.append(f"{key}: {texts}")
    return found


@pytest.mark.slow
def test_replicas_stay_equal_whatever_the_strategy_was(tmp_path: Path) -> None:
    whole = check(SOME, (1, 2), (1, 2), tmp_path)
    assert not differing(whole)
    said = {key for key, texts in whole.items() if texts[0].endswith(" said")}
    assert said == {
        f"{a}-2 to {b}-{n}"
        for a, into in (("diloco", ("ddp", "sharded", "pipeline")), ("none", ("ddp", "sharded", "pipeline", "diloco")))
        for b in into
        for n in (1, 2)
    }


def check_all_pairs(folder: Path, into: int, part: int = 0, num_parts: int = 1) -> None:
    """From every strategy on 1, 2 and 3 ranks into every ``num_parts``-th one on ``into`` ranks."""
    whole = check(EVERY, (1, 2, 3), (into,), folder, EVERY[part::num_parts])
    assert not differing(whole)
    refused = {key: texts for key, texts in whole.items() if " " in texts[0].removesuffix(" said")}
    assert not refused


@pytest.mark.slow
@pytest.mark.timeout(30 * 60)
class TestAllPairs:
    """Methods rather than cases of one function, which shards do not divide: all of these take 25 minutes."""

    def test_into_one_rank(self, tmp_path: Path) -> None:
        check_all_pairs(tmp_path, 1)

    def test_into_two_ranks(self, tmp_path: Path) -> None:
        check_all_pairs(tmp_path, 2, 0, 2)

    def test_into_two_ranks_other_half(self, tmp_path: Path) -> None:
        check_all_pairs(tmp_path, 2, 1, 2)

    def test_into_three_ranks(self, tmp_path: Path) -> None:
        check_all_pairs(tmp_path, 3, 0, 3)

    def test_into_three_ranks_second_third(self, tmp_path: Path) -> None:
        check_all_pairs(tmp_path, 3, 1, 3)

    def test_into_three_ranks_last_third(self, tmp_path: Path) -> None:
        check_all_pairs(tmp_path, 3, 2, 3)
