"""Ranks that make fewer steps than others, or other steps than ranks without data can know of."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

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
from tests.waiting import LIMIT_S, NEVER_S, until


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
    results = run_ranks(left_out, 3, start_step, last, collect_errors=True, group_timeout_s=NEVER_S)
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
    assert ddp.around is not None
    store = ddp.around._steps._store
    with said() as lines, short_patience():
        if rank == 1:  # all others have said that they wait in step 3
            until(lambda: store.check(["waits/0/count"]) and int(store.get("waits/0/count")) >= size - 1)
        train(ddp, optimizer, rank, range(3, 4))
        ddp.eval()
    assert ddp.around.step == 4 and not lines
    assert torch.allclose(flat(ddp), flat(twins(size, 4)[rank]), atol=1e-6)
    # Rank 0 said that it waited in step 3. That means nothing where steps are counted anew.
    ddp.load_exchange_state_dict({"step": 0, "exchange": {}, "weights": {"step": 1, "exchange": {"num_steps": 1}}})
    ddp.agree()
    ddp.around.changed = True
    who_waits = StepsBehind._who_waits

    def noted(self: StepsBehind, *counts: int) -> tuple[dict[int, int], int]:
        found = who_waits(self, *counts)
        store.set(f"looked/{rank}", "")
        return found

    with said() as lines, short_patience(), mock.patch.object(StepsBehind, "_who_waits", noted):
        if rank == 0:
            store.wait([f"looked/{each}" for each in range(1, size)])  # while they waited
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
    # Both at once, and not by the time-out.
    results = run_ranks(accumulate_alone, 2, collect_errors=True, group_timeout_s=NEVER_S)
    assert isinstance(results[1], RankError) and results[1].type_name == UsageError.__name__
    assert isinstance(results[0], RankError) and results[0].exit_code is not None, results[0]


def loses_the_store(rank: int, size: int) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=NEVER_S))  # rank 0 holds the store
    ddp, optimizer = wrapped()
    train(ddp, optimizer, rank, range(1))
    store = store_of(dist.group.WORLD)
    if rank == 0:
        store.wait(["trained"], datetime.timedelta(seconds=NEVER_S))
        store.wait(["waits"], datetime.timedelta(seconds=NEVER_S))
        os._exit(1)
    store.set("trained", "")
    notice = StepsBehind._notice

    def noticing(self: StepsBehind) -> str | None:  # asked while it waits for others
        with contextlib.suppress(RuntimeError):
            store.set("waits", "")
        return notice(self)

    StepsBehind._notice = noticing  # type: ignore[method-assign]
    ddp.eval()


def test_the_store_goes_away_while_ranks_gather() -> None:
    lost = run_ranks(loses_the_store, 2, init=False, collect_errors=True)[1]
    assert isinstance(lost, RankError) and lost.type_name == WorldError.__name__, lost
    assert "[rank 1] the store went away while ranks came to agree on one set of weights" in lost.message
    assert "rank 0's own error" in lost.message


class Counting:
    """A store among threads that counts, for one of them, how often it is asked, and for how many keys."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.num_calls, self.num_asked = store, 0, 0

    def check(self, keys: list[str]) -> bool:
        self.num_calls += 1
        self.num_asked += len(keys)
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_who_waits_for_long_asks_the_store_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "store_of", lambda group: group.store)
    monkeypatch.setattr(steps, "members_of", lambda group: [])
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
                until(lambda: min(each.num_calls for r, each in enumerate(stores) if r not in late) >= 60)
            behind.gather("wait", NEVER_S, 3, "")
        left.append(rank)

    threads = [threading.Thread(target=wait, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(left) == list(range(size))
    # Most looks are at one key, and not at one key for each rank: those would be 16 times as many.
    asked = [(stores[rank].num_asked, stores[rank].num_calls) for rank in range(size) if rank not in late]
    assert all(num_asked < 2 * num_calls for num_asked, num_calls in asked), asked
