"""Ranks that make fewer steps than others, or other steps than ranks without data can know of."""

from __future__ import annotations

import datetime
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from guozhuang.errors import MismatchError, UsageError, WorldError
from guozhuang.groups.agreement import store_of
from guozhuang.weights import steps
from guozhuang.weights.steps import StepsBehind
from tests.processes.cases import as_tests, assert_equal_everywhere, flat, said
from tests.processes.mean_of_two import (
    batch,
    train,
    twins,
    wrapped,
)
from tests.ranks import RankError, run_ranks
from tests.waiting import LIMIT_S, NEVER_S


@contextmanager
def short_patience() -> Iterator[None]:
    """Who waits in a step tells it soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "_PATIENCE_S", 0.2)
        yield


def left_out(rank: int, size: int, start_step: int, last: int) -> None:
    """Rank 1 leaves out the last step; all ranks then come to the evaluation."""
    ddp, optimizer = wrapped(start_step)
    with short_patience():
        for step in range(last + 1):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            if not (rank == 1 and step == last):
                optimizer.step()
        ddp.eval()


@pytest.mark.parametrize(
    ("start_step", "last"), [(0, 3), (3, 2)], ids=["in which they exchange", "at whose end they compare"]
)
def test_a_step_is_left_out_in_which_others_wait(start_step: int, last: int) -> None:
    """Far below the time-out, on the rank that is behind and on those that wait for it."""
    results = run_ranks(left_out, 3, start_step, last, collect_errors=True, timeout_s=LIMIT_S)
    behind = results[1]
    assert isinstance(behind, RankError) and behind.type_name == WorldError.__name__, behind
    assert f"rank 1 came to agree on one set of weights after {last} optimizer steps" in behind.message
    assert re.search(rf"rank [02] in step {last}[ ,]", behind.message) and "left out optimizer.step()" in behind.message
    assert "GradScaler with a fused optimizer" in behind.message
    for other in (results[0], results[2]):
        assert (
            isinstance(other, RankError)
            and other.type_name == WorldError.__name__
            and "rank 1 came to agree" in other.message
        ), other


def case_a_step_is_left_out_in_which_nobody_waits(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(5 - (rank == 1)))
    with pytest.raises(MismatchError, match="different numbers of optimizer steps") as raised:
        ddp.eval()
    for each in range(size):
        assert re.search(rf"{each} +{5 - (each == 1)}", str(raised.value)), raised.value


def case_a_slow_rank_is_not_behind(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(3))
    if rank == 1:
        time.sleep(0.8)
    with said() as lines, short_patience():
        train(ddp, optimizer, rank, range(3, 4))
        ddp.eval()
    assert ddp.around is not None and ddp.around.step == 4 and not lines
    assert torch.allclose(flat(ddp), flat(twins(size, 4)[rank]), atol=1e-6)
    # Rank 0 said that it waited in step 3. That means nothing where steps are counted anew.
    ddp.load_exchange_state_dict({"step": 0, "exchange": {}, "weights": {"step": 1, "exchange": {"num_steps": 1}}})
    ddp.agree()
    ddp.around.changed = True
    if rank == 0:
        time.sleep(0.6)
    with said() as lines, short_patience():
        ddp.agree()
    assert ddp.around.step == 1 and not lines


def case_accumulation_in_a_join(rank: int, size: int) -> None:
    ddp, optimizer = wrapped(start_step=1)
    with ddp.join():
        for step in range(3 + 2 * rank):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            with ddp.no_sync():
                (nn.functional.mse_loss(ddp(x[:4]), y[:4]) / 2).backward()
            (nn.functional.mse_loss(ddp(x[4:]), y[4:]) / 2).backward()
            optimizer.step()
    assert ddp.around is not None and ddp.around.step == 3 + 2 * (size - 1)
    assert_equal_everywhere(flat(ddp))


def case_accumulation_in_a_join_without_no_sync(rank: int, size: int) -> None:
    for averages in (0, 3):
        ddp, optimizer = wrapped(start_step=averages)
        x, _ = batch(rank, 0)
        with pytest.raises(UsageError, match=r"second forward came before optimizer.step.*no_sync"), ddp.join():
            ddp(x).sum().backward()
            ddp(x).sum().backward()
            optimizer.step()


def case_steps_in_a_join_of_which_nobody_hears(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    x, _ = batch(rank, 0)
    with pytest.raises(UsageError, match="without a synchronized forward"), ddp.join(), ddp.no_sync():
        ddp(x).sum().backward()
        optimizer.step()


def case_accumulation_in_a_join_that_ends_early(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    x, _ = batch(rank, 0)
    with ddp.join(throw_on_early_termination=True):
        ddp(x).sum().backward()
        ddp(x).sum().backward()
        optimizer.step()


test_cases = as_tests(
    globals(),
    (2,),
    slow=(3,),
    not_slow=[  # a third rank makes a difference
        case_a_step_is_left_out_in_which_nobody_waits,
        case_accumulation_in_a_join,
    ],
)


def accumulate_alone(rank: int, size: int) -> None:
    ddp, optimizer = wrapped()
    x, _ = batch(rank, 0)
    with ddp.join():
        for _ in range(rank):
            ddp(x).sum().backward()
            ddp(x).sum().backward()
            optimizer.step()


def test_accumulation_without_no_sync_while_another_rank_has_no_data() -> None:
    results = run_ranks(accumulate_alone, 2, collect_errors=True)
    assert isinstance(results[1], RankError) and results[1].type_name == UsageError.__name__
    assert isinstance(results[0], RankError)


def loses_the_store(rank: int, size: int) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=NEVER_S))  # rank 0 holds the store
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(1))
    store = store_of(dist.group.WORLD)
    if rank == 0:
        store.wait(["trained"], datetime.timedelta(seconds=NEVER_S))
        time.sleep(0.3)  # most often rank 1 waits by then; if not, it finds no store
        os._exit(1)
    store.set("trained", "")
    ddp.eval()


def test_the_store_goes_away_while_ranks_gather() -> None:
    lost = run_ranks(loses_the_store, 2, init=False, collect_errors=True)[1]
    assert isinstance(lost, RankError) and lost.type_name == WorldError.__name__, lost
    assert "[rank 1] the store went away while ranks came to agree on one set of weights" in lost.message
    assert "rank 0's own error" in lost.message


class Counting:
    """A store among threads that counts, for one of them, the keys that it is asked for."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.num_asked = store, 0

    def check(self, keys: list[str]) -> bool:
        self.num_asked += len(keys)
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_who_waits_for_long_asks_the_store_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "store_of", lambda group: group.store)
    monkeypatch.setattr(steps, "next_part", lambda store, *_: store)  # a part of a store is no object of Python
    monkeypatch.setattr(steps, "_PATIENCE_S", 0.1)
    shared, size, late = dist.HashStore(), 16, {0, 5}
    stores = [Counting(shared) for _ in range(size)]
    left = []

    def wait(rank: int) -> None:
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size, store=stores[rank])
        behind = StepsBehind(group)
        for turn in range(3):
            if rank in late and turn == 1:
                time.sleep(1.0)
            behind.gather("wait", 20.0, 3, "")
        left.append(rank)

    threads = [threading.Thread(target=wait, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(left) == list(range(size))
    # Looks at one key, in pauses that grow, and not at one key for each rank: those would be 16 times as many.
    asked = [stores[rank].num_asked for rank in range(size) if rank not in late]
    assert max(asked) < 160, asked
