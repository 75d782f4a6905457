"""Exchanges of weights among processes: the bytes that they send, and who is named when ranks are lost or late."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from guozhuang.errors import WorldError
from guozhuang.exchange import AllReduce
from guozhuang.exchange.async_average import AsyncModelAverage
from guozhuang.exchange.average import Average
from guozhuang.exchange.codecs.dithering import Dithering
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.decentralized import Decentralized
from guozhuang.exchange.diloco import DiLoCo
from guozhuang.exchange.every import Every
from guozhuang.exchange.local_sgd import LocalSGD
from guozhuang.exchange.low_precision_decentralized import LowPrecisionDecentralized
from guozhuang.exchange.weight_hierarchical import WeightHierarchical
from guozhuang.exchange.weights import WeightExchange
from guozhuang.watch.waits import waits
from tests.processes.cases import assert_equal_across_ranks, mlp, sent_in, sent_per_step
from tests.processes.expiring import expires_soon
from tests.ranks import RankError, run_ranks
from tests.threads.test_async_average import wait_for_the_round
from tests.threads.twins import initial, members, named, push
from tests.waiting import EXPIRES_S, NEVER_S

KERNEL = pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel tells")


def large() -> nn.Module:
    return nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])


SENDING: tuple[WeightExchange[Any], ...] = (
    LocalSGD(2),
    Every(4, Average()),
    Decentralized(),
    Decentralized("shift_one"),
    LowPrecisionDecentralized(every=2),
    DiLoCo(4, num_fragments=2),
    DiLoCo(4, num_fragments=2, codec=MinMax8()),
    DiLoCo(4, num_fragments=2, codec=Dithering(4)),
)


def counted(rank: int, size: int) -> list[tuple[float, float | None]]:
    """For each method, bytes per step and what it says; over whole turns, in which each rank sits out as often as others."""
    model = large()
    num_elements, found, states = sum(p.numel() for p in model.parameters()), [], []  # a closed socket is not counted
    for exchange in SENDING:
        state = exchange.prepare(named(model), dist.group.WORLD)
        states.append(state)
        push(exchange, state, {}, -1, range(4))
        exchange.before_step(state, 4)

        def take_step(step: int, exchange: Any = exchange, state: Any = state) -> None:
            exchange.after_step(state, step + 4)
            exchange.before_step(state, step + 5)

        found.append((sent_in(take_step, 4 * size), exchange.traffic(num_elements, 4, size)))
    return found


@KERNEL
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_sends_what_it_says(size: int) -> None:
    for found in run_ranks(counted, size):
        for exchange, (sent, said) in zip(SENDING, found, strict=True):
            least = 0.99 if isinstance(exchange, DiLoCo) else 1.0  # fragments are not quite equal
            assert said is not None and least * said <= sent + 1 and sent <= said * 1.02 + 4096, (exchange, sent, said)


def counted_rounds(rank: int, size: int) -> tuple[float, float]:
    """Bytes of one round, and of the all-reduce that it is."""
    exchange, weight = AsyncModelAverage(interval_ms=0), nn.Parameter(torch.randn(200_000))
    state = exchange.prepare([("w", weight)], dist.group.WORLD)

    def make_round(step: int) -> None:
        exchange.after_step(state, step)
        wait_for_the_round(state)

    make_round(0)
    return sent_in(lambda step: make_round(1 + step), 5), 2 * (size - 1) * 800_000 / size


@KERNEL
@pytest.mark.parametrize("size", [2, 4])
def test_a_round_sends_an_all_reduce(size: int) -> None:
    for sent, said in run_ranks(counted_rounds, size):
        assert said <= sent + 1 and sent <= said * 1.02 + 2048


def counted_between_nodes(rank: int, size: int, layout: str, outer: WeightExchange[Any]) -> tuple[float, float]:
    model = large()
    sent = sent_per_step(WeightHierarchical(AllReduce(), outer, tuple(layout)), named(model), 4)
    dist.barrier()  # a rank that leaves takes its sockets, and what they have counted, from the others
    return sent, float(sum(p.numel() for p in model.parameters()))


@KERNEL
@pytest.mark.parametrize("layout", ["aaab", *(pytest.param(each, marks=pytest.mark.slow) for each in ("aabb", "abcd"))])
def test_leaders_send_what_outer_says_and_their_node_the_weights_once_a_round(layout: str) -> None:
    outer = LocalSGD(2)
    for rank, (sent, n) in enumerate(run_ranks(counted_between_nodes, 4, layout, outer)):
        here = next(ranks for ranks in members(layout) if rank in ranks)
        between = outer.traffic(int(n), 4, len(members(layout))) if rank == here[0] else 0
        # A broadcast inside a node of two is one message; of three, two, sent by the first or by one each.
        least = {1: 0, 2: 1, 3: 1}[len(here)] if rank == here[0] else 0
        most = {1: 0, 2: 1, 3: 2}[len(here)] if rank == here[0] else len(here) - 2
        assert between + least * 4 * n / 2 <= sent <= between + most * 4 * n / 2 + 20_000, (layout, rank)


# ---- ranks that are lost or late

WAITING: dict[str, WeightExchange[Any]] = {  # by whom the error names
    "other ranks (1)": Decentralized(),
    "rank 1, whose turn": Decentralized("shift_one"),
    "rank 1, a neighbour": LowPrecisionDecentralized(),
    "the outer step with the other ranks (1)": DiLoCo(2, overlap_steps=1),
}


def misses_one(rank: int, size: int) -> list[str]:
    """Rank 1 makes no second step, and stays until rank 0 has noticed for each method."""
    store, prepared = dist.distributed_c10d._get_default_store(), []
    for exchange in WAITING.values():
        weights = initial()
        state: Any = exchange.prepare(list(weights.items()), dist.group.WORLD)
        push(exchange, state, weights, rank, [0])
        exchange.before_step(state, 1)
        prepared.append((exchange, state))
    if rank == 1:
        while not store.check(["noticed"]):
            time.sleep(0.05)
        return []
    expires_soon()
    # Gloo takes the limit of sends and receives from when the group was made.
    soon = datetime.timedelta(seconds=EXPIRES_S)
    waits.for_work = lambda work: work.wait(soon)  # type: ignore[method-assign]
    texts = []
    for exchange, state in prepared:
        with pytest.raises(WorldError) as caught:
            for step in range(1, 4):
                exchange.after_step(state, step)
                exchange.before_step(state, step + 1)
        texts.append(str(caught.value))
    store.set("noticed", "")
    return texts


@pytest.mark.slow
def test_who_did_not_come_is_named() -> None:
    found = run_ranks(misses_one, 2)[0]
    for text, who in zip(found, WAITING, strict=True):
        assert "[rank 0]" in text and who in text, text


def one_is_killed(rank: int, size: int) -> str:
    exchange, weights = AsyncModelAverage(interval_ms=1), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    dist.barrier()  # all have connected
    push(exchange, state, weights, rank, range(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step = 3
    with pytest.raises(WorldError) as caught:
        while True:
            push(exchange, state, weights, rank, [step])
            step += 1
            time.sleep(0.002)
    return str(caught.value)


def test_a_dead_peer_is_raised_at_a_step() -> None:
    # Nobody waits for the time-out of the group.
    found = run_ranks(one_is_killed, 3, collect_errors=True, group_timeout_s=NEVER_S)
    assert isinstance(found[1], RankError)
    for rank in (0, 2):
        assert not isinstance(found[rank], RankError), found[rank]
        assert f"[rank {rank}] averaging weights with the other ranks" in found[rank], found[rank]


def one_does_not_agree(rank: int, size: int) -> str:
    exchange, weights = AsyncModelAverage(interval_ms=1), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    push(exchange, state, weights, rank, range(3))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        while not store.check(["noticed/0", "noticed/2"]):
            time.sleep(0.05)
        return ""
    expires_soon()
    with pytest.raises(WorldError) as caught:
        exchange.agree(state)
    store.set(f"noticed/{rank}", "")
    return str(caught.value)


def test_who_does_not_come_to_agree_is_named() -> None:
    found = run_ranks(one_does_not_agree, 3, collect_errors=True)
    for rank in (0, 2):
        assert not isinstance(found[rank], RankError), found[rank]
    # The other one may have heard of it when the first gave up.
    said = [found[rank] for rank in (0, 2)]
    assert any("ranks [1] did not come to agree" in text and f"limit {EXPIRES_S:g} s" in text for text in said), found


def closes_with_a_round_under_way(rank: int, size: int) -> int:
    exchange, weights = AsyncModelAverage(interval_ms=0 if rank == 0 else 1e7), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    dist.barrier()  # all have connected
    push(exchange, state, weights, rank, [0])
    num_rounds = state.num_rounds
    exchange.close(state)
    return num_rounds


def test_closing_waits_for_nobody() -> None:
    assert run_ranks(closes_with_a_round_under_way, 3, group_timeout_s=NEVER_S) == [1, 0, 0]


def steps_go_on_while_a_fragment_travels(rank: int, size: int) -> None:
    """Rank 0 sends, and makes a step more, before the others come to send theirs."""
    for codec in (None, MinMax8()):
        exchange, model = DiLoCo(3, overlap_steps=2, codec=codec), mlp()
        state = exchange.prepare(named(model), dist.group.WORLD)
        first = 4 if rank == 0 else 2
        push(exchange, state, dict(named(model)), rank, range(first))
        dist.barrier()
        push(exchange, state, dict(named(model)), rank, range(first, 5))
        exchange.agree(state)
        assert_equal_across_ranks(model)


@pytest.mark.parametrize("size", [2, 3])
def test_steps_go_on_while_a_fragment_travels(size: int) -> None:
    run_ranks(steps_go_on_while_a_fragment_travels, size)
