"""Averaging in the background on real ranks: one round against its formula, and uneven ranks by what rounds must keep."""

from __future__ import annotations

import copy
import logging
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError, WorldError
from guozhuang.exchange.allreduce import AllReduce
from guozhuang.exchange.async_average import AsyncModelAverage, AsyncState
from guozhuang.exchange.warmup import WeightWarmup
from guozhuang.lab.measure import tcp_sent_bytes
from tests.processes.cases import OwnMessages, as_tests, seeded
from tests.ranks import RankError, run_ranks

SHAPES: dict[str, tuple[int, ...]] = {"scale": (), "bias": (3,), "weight": (40, 25)}


def update(name: str, rank: int, step: int) -> Tensor:
    """What the optimizer of a rank does to a parameter in a step."""
    seed = sum(map(ord, name)) * 10_000 + rank * 500 + step
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)) * 0.1 * (1 + rank)


def initial(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(7)
    return {name: nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for name, shape in SHAPES.items()}


@torch.no_grad()
def make_step(
    exchange: AsyncModelAverage, state: AsyncState, weights: dict[str, nn.Parameter], rank: int, step: int
) -> None:
    exchange.before_step(state, step)
    for name, weight in weights.items():
        weight += update(name, rank, step).to(weight.dtype)
    exchange.after_step(state, step)


def wait_for_the_round(state: AsyncState) -> None:
    assert state.lane is not None
    deadline = time.monotonic() + 20
    while not state.lane.has_ended():
        assert time.monotonic() < deadline, "the round did not end"
        time.sleep(0.002)


def assert_equal_bits(weights: dict[str, nn.Parameter], size: int) -> None:
    for name, weight in weights.items():
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, weight.detach())
        for other in everyones:
            assert torch.equal(other, weight.detach()), name


def test_what_cannot_be_is_refused() -> None:
    for options in ({"interval_ms": -1.0}, {"interval_ms": float("inf")}, {"start_step": -1}):
        with pytest.raises(UsageError, match="got"):
            AsyncModelAverage(**options)  # type: ignore[arg-type]


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
        make_step(exchange, state, weights, rank, step)
        for r, theirs in enumerate(ranks):
            for name in SHAPES:
                theirs[name] = theirs[name] + update(name, r, step)
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
    assert_equal_bits(weights, size)
    exchange.close(state)


def hold(state: AsyncState) -> None:
    """Let the round in flight look unfinished until ``release``."""
    if state.lane is not None:
        state.lane.has_ended = lambda: release(state) or False  # type: ignore[method-assign,func-returns-value]


def release(state: AsyncState) -> None:
    if state.lane is not None:
        state.lane.__dict__.pop("has_ended", None)


def uneven(rank: int, size: int, exchange: AsyncModelAverage, num_steps: list[int], pauses_s: list[float]) -> None:
    """Ranks make their own number of steps at their own speed; what all learned is in what they agree on, once."""
    weights = initial(torch.float64)
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    done = [0] * size
    for _ in range(2):  # training goes on after an agreement
        for step in range(done[rank], done[rank] + num_steps[rank]):
            time.sleep(pauses_s[rank])
            make_step(exchange, state, weights, rank, step)
        done = [a + b for a, b in zip(done, num_steps, strict=True)]
        exchange.agree(state)
        assert_equal_bits(weights, size)
        for name, start in initial(torch.float64).items():
            learned = sum(update(name, r, step).double() for r in range(size) for step in range(done[r]))
            torch.testing.assert_close(weights[name].detach(), start.detach() + learned / size, rtol=0, atol=1e-9)
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, state.num_rounds)
    assert len(set(everyones)) == 1, everyones
    assert size == 1 or everyones[0] >= (2 if exchange.interval_ms == 0 else 0)
    exchange.close(state)


def case_a_straggler(rank: int, size: int) -> None:
    uneven(rank, size, AsyncModelAverage(interval_ms=0), [24] * size, [0.004] + [0.001] * (size - 1))


def case_uneven_numbers_of_steps(rank: int, size: int) -> None:
    uneven(rank, size, AsyncModelAverage(interval_ms=3), [3 + 9 * r for r in range(size)], [0.002] * size)


def case_a_rank_without_a_step(rank: int, size: int) -> None:
    uneven(rank, size, AsyncModelAverage(interval_ms=0), [20] * (size - 1) + [0], [0.001] * size)


def case_no_round_is_due(rank: int, size: int) -> None:
    uneven(rank, size, AsyncModelAverage(interval_ms=1e7), [5 + r for r in range(size)], [0.0] * size)


def case_ranks_begin_rounds_at_most_one_apart(rank: int, size: int) -> None:
    """The first rank begins a round and comes to agree; the others had none due."""
    exchange, weights = AsyncModelAverage(interval_ms=0 if rank == 0 else 1e7), initial(torch.float64)
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    for step in range(3):
        make_step(exchange, state, weights, rank, step)
    assert state.num_rounds == (1 if rank == 0 and size > 1 else 0)
    exchange.agree(state)
    assert state.num_rounds >= (1 if size > 1 else 0)
    assert_equal_bits(weights, size)
    for name, start in initial(torch.float64).items():
        learned = sum(update(name, r, step).double() for r in range(size) for step in range(3)) / size
        torch.testing.assert_close(weights[name].detach(), start.detach() + learned, rtol=0, atol=1e-9)


def case_who_waits_to_agree_takes_part_in_rounds(rank: int, size: int) -> None:
    """A rank that came first follows the others before they come."""
    if size == 1:
        return
    exchange, weights = AsyncModelAverage(interval_ms=1), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    if rank != 0:
        deadline, step = time.monotonic() + 15, 0
        while state.num_rounds < 4:  # of which the first rank began all but by itself
            assert time.monotonic() < deadline, state.num_rounds
            time.sleep(0.002)
            make_step(exchange, state, weights, rank, step)
            step += 1
    exchange.agree(state)
    assert state.num_rounds >= 4
    assert_equal_bits(weights, size)


def case_narrow_dtypes(rank: int, size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.complex64):
        exchange, weights = AsyncModelAverage(interval_ms=0), initial(dtype)
        state = exchange.prepare(list(weights.items()), dist.group.WORLD)
        for step in range(6):
            make_step(exchange, state, weights, rank, step)
        exchange.agree(state)
        assert_equal_bits(weights, size)
        for name, start in initial(dtype).items():
            learned = sum(update(name, r, step) for r in range(size) for step in range(6)) / size
            rough = 0.1 if dtype == torch.bfloat16 else 0.01
            wanted = (start.detach().to(torch.complex64).real + learned).float()
            torch.testing.assert_close(weights[name].detach().to(torch.complex64).real, wanted, rtol=rough, atol=rough)


def case_what_is_not_finite_is_said(rank: int, size: int) -> None:
    if size == 1:
        return
    handler = OwnMessages()
    seen = handler.texts
    logging.getLogger("guozhuang").addHandler(handler)
    exchange, weights = AsyncModelAverage(interval_ms=0), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    if rank == size - 1:
        weights["bias"].data[1] = float("inf")
    make_step(exchange, state, weights, rank, 0)
    wait_for_the_round(state)
    if rank == size - 1:
        assert len(seen) == 1 and "'bias'" in seen[0] and "NaN or infinity" in seen[0] and f"rank {rank}" in seen[0]
    else:
        assert not seen
    exchange.agree(state)
    logging.getLogger("guozhuang").removeHandler(handler)
    assert not weights["bias"].isfinite().all() and weights["weight"].isfinite().all()


def case_weights_that_were_loaded_are_not_moved_by_an_old_round(rank: int, size: int) -> None:
    exchange, weights = AsyncModelAverage(interval_ms=0), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    for step in range(3):
        make_step(exchange, state, weights, rank, step)
    exchange.agree(state)
    saved = copy.deepcopy((exchange.state_dict(state), {name: w.detach() for name, w in weights.items()}))
    assert saved[0] == {}
    make_step(exchange, state, weights, rank, 3)
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
        make_step(exchange, state, weights, rank, step)
        counts.append(state.num_rounds)
    assert counts == ([0, 0, 1] if size > 1 else [0, 0, 0])
    exchange.agree(state)


def case_ddp_trains_with_it(rank: int, size: int) -> None:
    with seeded(0):
        model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    test = torch.randn(256, 10, generator=torch.Generator().manual_seed(99_999))

    def run(ddp: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        for step in range(num_steps):
            x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step * size + rank))
            (ddp(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for start_step, joins in ((0, False), (5, True)):
        ddp = DistributedDataParallel(copy.deepcopy(model))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
        ddp.use_weight_exchange(AsyncModelAverage(interval_ms=2, start_step=start_step), optimizer)
        if joins:
            with ddp.join():
                run(ddp, optimizer, 60 + 3 * rank)
        else:
            run(ddp, optimizer, 60 + 7 * rank)  # nobody needs the others
        ddp.eval()
        with torch.no_grad():
            loss = float((ddp(test) - test.sum(1, keepdim=True)).square().mean())
        assert loss < 2, (
            start_step,
            joins,
            loss,
        )  # 10 at the start; the number of rounds is chance
        assert_equal_bits(dict(ddp.module.named_parameters()), size)


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
        assert_equal_bits(dict(ddp.module.named_parameters()), size)


test_cases = as_tests(globals(), (2, 3), slow=(1, 4, 5, 8))


def counted(rank: int, size: int) -> tuple[float, float]:
    """Bytes of one round, and of the all-reduce that it is."""
    exchange, weight = AsyncModelAverage(interval_ms=0), nn.Parameter(torch.randn(200_000))
    state = exchange.prepare([("w", weight)], dist.group.WORLD)
    exchange.after_step(state, 0)
    wait_for_the_round(state) if size > 1 else None
    dist.barrier()
    before, num_rounds = tcp_sent_bytes(), 5
    for step in range(num_rounds):
        exchange.after_step(state, 1 + step)
        wait_for_the_round(state) if size > 1 else None
    dist.barrier()
    after = tcp_sent_bytes()
    assert before is not None and after is not None
    assert exchange.traffic(200_000, 4, size) == (0.0 if size == 1 else None)
    return (after - before) / num_rounds, 2 * (size - 1) * 800_000 / size


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel tells")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_round_sends_an_all_reduce(size: int) -> None:
    for sent, said in run_ranks(counted, size):
        assert said <= sent + 1 and sent <= said * 1.02 + 2048


def one_is_killed(rank: int, size: int) -> tuple[float, str]:
    exchange, weights = AsyncModelAverage(interval_ms=1), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    for step in range(3):
        make_step(exchange, state, weights, rank, step)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    killed_s = time.monotonic()
    with pytest.raises(WorldError) as caught:
        for step in range(3, 2000):
            make_step(exchange, state, weights, rank, step)
            time.sleep(0.002)
    return time.monotonic() - killed_s, str(caught.value)


def test_a_dead_peer_is_raised_at_a_step() -> None:
    found = run_ranks(one_is_killed, 3, collect_errors=True, group_timeout_s=10.0)
    assert isinstance(found[1], RankError)
    for rank in (0, 2):
        assert not isinstance(found[rank], RankError), found[rank]
        took_s, text = found[rank]
        assert took_s < 12.0 and f"[rank {rank}] averaging weights with the other ranks" in text, text


def one_does_not_agree(rank: int, size: int) -> str:
    exchange, weights = AsyncModelAverage(interval_ms=1), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    for step in range(3):
        make_step(exchange, state, weights, rank, step)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        while not store.check(["noticed/0", "noticed/2"]):
            time.sleep(0.05)
        return ""
    with pytest.raises(WorldError) as caught:
        exchange.agree(state)
    store.set(f"noticed/{rank}", "")
    return str(caught.value)


def test_who_does_not_come_to_agree_is_named() -> None:
    found = run_ranks(one_does_not_agree, 3, collect_errors=True, group_timeout_s=2.0)
    for rank in (0, 2):
        assert not isinstance(found[rank], RankError), found[rank]
    # The other one may have heard of it when the first gave up.
    assert any("ranks [1] did not come to agree" in found[rank] and "limit 2 s" in found[rank] for rank in (0, 2)), (
        found
    )


def closes_with_a_round_under_way(rank: int, size: int) -> int:
    exchange, weights = AsyncModelAverage(interval_ms=0 if rank == 0 else 1e7), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    make_step(exchange, state, weights, rank, 0)
    num_rounds = state.num_rounds
    exchange.close(state)
    return num_rounds


def test_closing_waits_for_nobody() -> None:
    began_s = time.monotonic()
    assert run_ranks(closes_with_a_round_under_way, 3, group_timeout_s=60.0, timeout_s=50.0) == [1, 0, 0]
    assert time.monotonic() - began_s < 40
