"""Averaging in the background on ranks: one round against its formula, and uneven ranks by what rounds must keep."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange.allreduce import AllReduce
from guozhuang.exchange.async_average import AsyncModelAverage, AsyncState
from guozhuang.exchange.warmup import WeightWarmup
from tests.processes.cases import as_tests, assert_equal_across_ranks, assert_equal_everywhere, mlp
from tests.threads.twins import SHAPES, initial, loss_of, push, train, update, wrapped
from tests.waiting import LIMIT_S


def wait_for_the_round(state: AsyncState) -> None:
    assert state.lane is not None
    deadline = time.monotonic() + LIMIT_S
    while not state.lane.has_ended():
        assert time.monotonic() < deadline, "the round did not end"
        time.sleep(0.002)


def test_the_first_steps_average_gradients() -> None:
    exchange = AsyncModelAverage(start_step=3)
    assert [exchange.averages_gradients(step) for step in (0, 2, 3, 100)] == [True, True, False, False]
    assert not exchange.in_step


def case_rounds_are_as_the_formula_says(rank: int, size: int) -> None:
    """A round is begun after step 0, ends while step 2 is made, is applied after it, and the next one begins there."""
    exchange, weights = AsyncModelAverage(interval_ms=0), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    ranks = [{name: p.detach().clone() for name, p in initial().items()} for _ in range(size)]
    copies: list[dict[str, Tensor]] = []
    for step in range(7):
        if state.lane is not None and step in (2, 4):
            wait_for_the_round(state)
        if step in (1, 3, 5, 6):
            hold(state)
        push(exchange, state, weights, rank, [step])
        for r, theirs in enumerate(ranks):
            for name in SHAPES:
                theirs[name] = theirs[name] + update(name, SHAPES[name], r, step)
        if size > 1 and step in (2, 4):
            for name in SHAPES:
                total = sum(each[name] for each in copies)
                for r, theirs in enumerate(ranks):
                    theirs[name] = theirs[name] + (total / size - copies[r][name])  # type: ignore[operator]
        if step in (0, 2, 4):
            copies = [dict(each) for each in ranks]
        for name, weight in weights.items():
            exact = {"rtol": 0, "atol": 0} if size <= 2 else {"rtol": 1e-6, "atol": 1e-6}
            torch.testing.assert_close(weight.detach(), ranks[rank][name], **exact)
    release(state)
    assert state.num_rounds == (3 if size > 1 else 0)
    exchange.agree(state)
    assert state.num_rounds >= (3 if size > 1 else 0) and not (state.lane is not None and state.lane.in_flight)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.detach(), sum(each[name] for each in ranks) / size, rtol=1e-5, atol=1e-6)
    assert_equal_bits(weights)
    exchange.close(state)


def assert_equal_bits(weights: dict[str, nn.Parameter]) -> None:
    for each in weights.values():
        assert_equal_everywhere(each)


def hold(state: AsyncState) -> None:
    """Let the round in flight look unfinished until ``release``."""
    if state.lane is not None:
        state.lane.has_ended = lambda: release(state) or False  # type: ignore[method-assign,func-returns-value]


def release(state: AsyncState) -> None:
    if state.lane is not None:
        state.lane.__dict__.pop("has_ended", None)


def uneven(rank: int, size: int, exchange: AsyncModelAverage, num_steps: list[int], waits: list[int]) -> None:
    """Ranks make their own number of steps at their own speed; what all learned is in what they agree on, once.

    A rank waits before each so many-th step (0: before none) until the round in flight has ended.
    """
    weights = initial(torch.float64)
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    done = [0] * size
    for _ in range(2):  # training goes on after an agreement
        for step in range(done[rank], done[rank] + num_steps[rank]):
            if waits[rank] and step % waits[rank] == 0 and state.lane is not None and state.lane.in_flight:
                wait_for_the_round(state)
            push(exchange, state, weights, rank, [step])
        done = [a + b for a, b in zip(done, num_steps, strict=True)]
        exchange.agree(state)
        assert_equal_bits(weights)
        for name, start in initial(torch.float64).items():
            learned = sum(update(name, SHAPES[name], r, step).double() for r in range(size) for step in range(done[r]))
            torch.testing.assert_close(weights[name].detach(), start.detach() + learned / size, rtol=0, atol=1e-9)
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, state.num_rounds)
    assert len(set(everyones)) == 1, everyones
    assert size == 1 or everyones[0] >= (2 if exchange.interval_ms == 0 else 0)
    exchange.close(state)


def case_uneven_ranks(rank: int, size: int) -> None:
    """A straggler, other numbers of steps, a rank without a step, and no round that is due."""
    uneven(rank, size, AsyncModelAverage(interval_ms=0), [24] * size, [1] + [4] * (size - 1))
    uneven(rank, size, AsyncModelAverage(interval_ms=3), [3 + 9 * r for r in range(size)], [2] * size)
    uneven(rank, size, AsyncModelAverage(interval_ms=0), [20] * (size - 1) + [0], [4] * size)
    uneven(rank, size, AsyncModelAverage(interval_ms=1e7), [5 + r for r in range(size)], [0] * size)


def case_ranks_begin_rounds_at_most_one_apart(rank: int, size: int) -> None:
    """The first rank begins a round and comes to agree; the others had none due."""
    exchange, weights = AsyncModelAverage(interval_ms=0 if rank == 0 else 1e7), initial(torch.float64)
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    for step in range(3):
        push(exchange, state, weights, rank, [step])
    assert state.num_rounds == (1 if rank == 0 and size > 1 else 0)
    exchange.agree(state)
    assert state.num_rounds >= (1 if size > 1 else 0)
    assert_equal_bits(weights)
    for name, start in initial(torch.float64).items():
        learned = sum(update(name, SHAPES[name], r, step).double() for r in range(size) for step in range(3)) / size
        torch.testing.assert_close(weights[name].detach(), start.detach() + learned, rtol=0, atol=1e-9)


def case_who_waits_to_agree_takes_part_in_rounds(rank: int, size: int) -> None:
    """A rank that came first follows the others before they come."""
    if size == 1:
        return
    exchange, weights = AsyncModelAverage(interval_ms=1), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    if rank != 0:
        deadline, step = time.monotonic() + LIMIT_S, 0
        while state.num_rounds < 4:  # of which the first rank began all but by itself
            assert time.monotonic() < deadline, state.num_rounds
            time.sleep(0.002)
            push(exchange, state, weights, rank, [step])
            step += 1
    exchange.agree(state)
    assert state.num_rounds >= 4
    assert_equal_bits(weights)


def case_weights_that_were_loaded_are_not_moved_by_an_old_round(rank: int, size: int) -> None:
    exchange, weights = AsyncModelAverage(interval_ms=0), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    for step in range(3):
        push(exchange, state, weights, rank, [step])
    exchange.agree(state)
    saved = copy.deepcopy((exchange.state_dict(state), {name: w.detach() for name, w in weights.items()}))
    assert saved[0] == {}
    push(exchange, state, weights, rank, [3])
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[1][name])
    exchange.load_state_dict(state, saved[0])
    if state.lane is not None and state.lane.in_flight:
        wait_for_the_round(state)
    slow = copy.copy(exchange)
    object.__setattr__(slow, "interval_ms", 1e7)
    slow.after_step(state, 4)
    for name, weight in weights.items():
        assert torch.equal(weight.detach(), saved[1][name])
    slow.agree(state)
    with pytest.raises(UsageError, match="keeps no state"):
        exchange.load_state_dict(state, {"round": 1})


def case_the_first_steps_begin_no_round(rank: int, size: int) -> None:
    exchange, weights = AsyncModelAverage(interval_ms=0, start_step=2), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    counts = []
    for step in range(3):
        push(exchange, state, weights, rank, [step])
        counts.append(state.num_rounds)
    assert counts == ([0, 0, 1] if size > 1 else [0, 0, 0])
    exchange.agree(state)


def case_nobody_needs_the_others_to_train(rank: int, size: int) -> None:
    ddp, optimizer = wrapped(AsyncModelAverage(interval_ms=2))
    train(ddp, optimizer, rank, range(60 + 7 * rank))
    ddp.eval()
    assert loss_of(ddp, rank, 0).item() < 0.6 * loss_of(mlp(), rank, 0).item(), "the number of rounds is chance"
    assert_equal_across_ranks(ddp.module)


def case_a_rank_whose_data_ends_while_gradients_are_averaged(rank: int, size: int) -> None:
    model = nn.Linear(4, 3)
    for exchange in (
        AsyncModelAverage(interval_ms=1, start_step=4),
        WeightWarmup(4, AllReduce(), AsyncModelAverage(interval_ms=1)),
    ):
        ddp = DistributedDataParallel(copy.deepcopy(model))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.use_weight_exchange(exchange, optimizer)
        with ddp.join():
            for _ in range(2 if rank == size - 1 else 8):
                optimizer.zero_grad()
                ddp(torch.randn(4, 4)).square().mean().backward()
                optimizer.step()
        assert ddp.around is not None and ddp.around.step == (8 if rank < size - 1 else 4 if size > 1 else 2)
        assert_equal_across_ranks(ddp.module)


test_cases = as_tests(globals(), (2, 3), slow=(1, 4, 5, 8), on="threads")
