"""Decentralized averaging on real ranks, against a few lines that do the same to the weights of all ranks in one process."""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError, WorldError
from guozhuang.exchange.async_average import AsyncModelAverage
from guozhuang.exchange.codecs.dithering import Dithering
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.decentralized import Decentralized, partner
from guozhuang.exchange.low_precision_decentralized import LowPrecisionDecentralized, RingState
from guozhuang.exchange.weights import WeightExchange
from tests.processes.cases import OwnMessages, as_tests, seeded, sent_in
from tests.pure.test_codecs import bagua_uint8
from tests.ranks import run_ranks

SHAPES: dict[str, tuple[int, ...]] = {"scale": (), "bias": (3,), "weight": (40, 25), "empty": (0, 2)}
METHODS: tuple[WeightExchange[Any], ...] = (
    Decentralized(),
    Decentralized(every=3),
    Decentralized("shift_one"),
    LowPrecisionDecentralized(),
    LowPrecisionDecentralized(every=2, codec=Dithering(bits=4)),
)


def update(name: str, rank: int, step: int) -> Tensor:
    """What the optimizer of a rank does to a parameter in a step."""
    seed = sum(map(ord, name)) * 10_000 + rank * 100 + step
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)) * 0.1 * (1 + rank)


def initial(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> dict[str, nn.Parameter]:
    with seeded(7):
        named = {}
        for i, (name, shape) in enumerate(SHAPES.items()):
            named[name] = nn.Parameter(torch.randn(shape).to(dtypes[i % len(dtypes)]))
    named["weight"].data = named["weight"].data.t().contiguous().t()  # not contiguous
    return named


@torch.no_grad()
def train(exchange: WeightExchange[Any], state: Any, weights: dict[str, nn.Parameter], rank: int, steps: range) -> None:
    for step in steps:
        exchange.before_step(state, step)
        for name, weight in weights.items():
            weight += update(name, rank, step).to(weight.dtype)
        exchange.after_step(state, step)


def model_of_decentralized(size: int, num_steps: int, exchange: Decentralized) -> list[dict[str, Tensor]]:
    """The weights of all ranks after so many steps."""
    ranks = [{name: p.detach().clone() for name, p in initial().items()} for _ in range(size)]
    for step in range(num_steps):
        if step > 0 and step % exchange.every == 0:
            old = [dict(each) for each in ranks]
            for rank in range(size):
                for name in SHAPES:
                    if exchange.peers == "all":
                        ranks[rank][name] = sum(each[name] for each in old) / size  # type: ignore[assignment]
                    elif (other := partner(step // exchange.every, rank, size)) is not None:
                        ranks[rank][name] = (old[rank][name] + old[other][name]) / 2
        for rank in range(size):
            for name in SHAPES:
                ranks[rank][name] = ranks[rank][name] + update(name, rank, step)
    return ranks


def assert_equal_bits(weights: dict[str, nn.Parameter], size: int) -> None:
    for name, weight in weights.items():
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, weight.detach())
        for other in everyones:
            assert torch.equal(other, weight.detach()), name


@pytest.mark.parametrize("size", range(1, 10))
def test_partners_are_each_others_and_all_meet(size: int) -> None:
    met: dict[int, list[int | None]] = {rank: [] for rank in range(size)}
    for turn in range(2 * size):
        for rank in range(size):
            if size == 1:
                continue
            other = partner(turn, rank, size)
            met[rank].append(other)
            assert other != rank and (other is None or partner(turn, other, size) == rank)
            if size % 2 == 0:  # as Bagua states it
                half = (size + 1) // 2
                theirs = ((turn + rank) % half) + half if rank < size / 2 else (rank - size // 2 - turn) % (size // 2)
                assert other == theirs
    for rank, others in met.items():
        if size % 2:
            assert all(others.count(other) == 2 for other in range(size) if other != rank) or size == 1
            assert others.count(None) == (2 if size > 1 else 0)
        else:
            assert set(others) == (set(range(size // 2, size)) if rank < size // 2 else set(range(size // 2)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Decentralized("ring"),  # type: ignore[arg-type]
        lambda: Decentralized(every=0),
        lambda: LowPrecisionDecentralized(every=0),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="got"):
        make()


def case_every_step_is_as_the_formula_says(rank: int, size: int) -> None:
    for exchange in (
        Decentralized(),
        Decentralized(every=3),
        Decentralized("shift_one"),
        Decentralized("shift_one", 2),
    ):
        weights = initial()
        state = exchange.prepare(list(weights.items()), dist.group.WORLD)
        for step in range(8):
            train(exchange, state, weights, rank, range(step, step + 1))
            theirs = model_of_decentralized(size, step + 1, exchange)[rank]
            exact = exchange.peers == "shift_one" or size <= 2
            for name, weight in weights.items():
                torch.testing.assert_close(
                    weight.detach(), theirs[name], rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6
                )
        exchange.agree(state)
        everyones = model_of_decentralized(size, 8, exchange)
        for name, weight in weights.items():
            mean = sum(each[name] for each in everyones) / size
            torch.testing.assert_close(weight.detach(), mean, rtol=1e-5, atol=1e-6)
        exchange.close(state)


def case_both_of_a_pair_hold_equal_bits(rank: int, size: int) -> None:
    exchange, weights = Decentralized("shift_one"), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    for step in range(4):
        train(exchange, state, weights, rank, range(step, step + 1))
        exchange.before_step(state, step + 1)
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, weights["weight"].detach())
        other = partner(step + 1, rank, size) if size > 1 else None
        assert other is None or torch.equal(everyones[other], weights["weight"].detach())


class BaguasRing:
    """The formula, in numpy, for all ranks at once; the order of operations is the method's."""

    def __init__(self, size: int, x: np.ndarray) -> None:
        self.size = size
        self.own, self.left, self.right = ([x.copy() for _ in range(size)] for _ in range(3))

    def exchange(self, xs: list[np.ndarray]) -> list[np.ndarray]:
        f, codes = np.float32, []
        for x, w, left, right in zip(xs, self.own, self.left, self.right, strict=True):
            t = (left + right - f(2) * w) / f(3) + (x - w)
            plain = x.astype(np.float64) + left / 3 + right / 3 - 5 * w.astype(np.float64) / 3
            np.testing.assert_allclose(t, plain, atol=1e-5)
            codes.append(bagua_uint8(t))
        for r in range(self.size):
            self.own[r] = self.own[r] + codes[r]
            self.left[r] = self.left[r] + codes[r - 1]
            self.right[r] = self.right[r] + codes[(r + 1) % self.size]
        return [w.copy() for w in self.own]


def together(values: dict[str, Tensor] | dict[str, nn.Parameter]) -> np.ndarray:
    return torch.cat([values[name].detach().reshape(-1) for name in SHAPES]).numpy().copy()


def case_low_precision_is_baguas(rank: int, size: int) -> None:
    if size == 1:
        return
    for every in (1, 2):
        exchange, weights = LowPrecisionDecentralized(every=every), initial()
        state = exchange.prepare(list(weights.items()), dist.group.WORLD)
        xs = [together(weights) for _ in range(size)]
        ring = BaguasRing(size, xs[0])
        for step in range(9):
            train(exchange, state, weights, rank, range(step, step + 1))
            xs = [x + together({name: update(name, r, step) for name in SHAPES}) for r, x in enumerate(xs)]
            if step % every == 0:
                xs = ring.exchange(xs)
            np.testing.assert_array_equal(together(weights), xs[rank])
        assert_ring(state, size)


def assert_ring(state: RingState, size: int) -> None:
    """My W is my right neighbour's L and my left neighbour's R, bit for bit."""
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, state.replicas)
    for r, mine in enumerate(everyones):
        for flat in range(len(mine["own"])):
            assert torch.equal(mine["own"][flat], everyones[(r + 1) % size]["left"][flat])
            assert torch.equal(mine["own"][flat], everyones[r - 1]["right"][flat])


def case_the_ring_holds_for_long_and_with_random_codes(rank: int, size: int) -> None:
    if size == 1:
        return
    for codec in (MinMax8(), Dithering(bits=4)):
        exchange, weights = LowPrecisionDecentralized(codec=codec), initial()
        state = exchange.prepare(list(weights.items()), dist.group.WORLD)
        train(exchange, state, weights, rank, range(40))
        assert_ring(state, size)
        assert not torch.equal(state.replicas["own"][0], state.replicas["left"][0])
        exchange.agree(state)
        assert_ring(state, size)


def case_low_precision_evens_out(rank: int, size: int) -> None:
    """Without updates all weights come near the mean of where they stood; the sum is kept to what codes lose."""
    exchange, weights = LowPrecisionDecentralized(), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    train(exchange, state, weights, rank, range(1))
    before = weights["weight"].detach().clone()
    dist.all_reduce(before)
    for step in range(1, 60):
        exchange.before_step(state, step)
        exchange.after_step(state, step)
    torch.testing.assert_close(weights["weight"].detach(), before / size, rtol=0, atol=0.01)


def case_agreement_is_bit_for_bit_and_training_goes_on(rank: int, size: int) -> None:
    dtypes = (torch.float64, torch.float16, torch.float32, torch.bfloat16)
    for exchange in METHODS:
        weights = initial(dtypes)
        state = exchange.prepare(list(weights.items()), dist.group.WORLD)
        for begin in (0, 4, 5):  # also after a single step, and with an exchange under way
            train(exchange, state, weights, rank, range(begin, begin + 4 if begin == 0 else begin + 1))
            exchange.agree(state)
            assert_equal_bits(weights, size)
        assert all(weight.isfinite().all() for weight in weights.values())
        exchange.close(state)


def case_complex_weights(rank: int, size: int) -> None:
    for exchange in METHODS[:4]:
        weight = nn.Parameter(torch.zeros(30, dtype=torch.complex64))
        state = exchange.prepare([("c", weight)], dist.group.WORLD)
        with torch.no_grad():
            weight += torch.linspace(0, 1, 30) * (1 + 2j) * rank
        exchange.after_step(state, 2)
        exchange.agree(state)
        mean = torch.linspace(0, 1, 30) * (1 + 2j) * (size - 1) / 2
        torch.testing.assert_close(weight.detach(), mean, rtol=0.01, atol=0.01 * size)


def case_resumed_is_exact(rank: int, size: int) -> None:
    """After an agreement, and for the ring also without one."""
    for exchange in METHODS:
        for agrees in (True, False) if isinstance(exchange, LowPrecisionDecentralized) else (True,):
            weights = initial()
            state = exchange.prepare(list(weights.items()), dist.group.WORLD)
            train(exchange, state, weights, rank, range(5))
            if agrees:
                exchange.agree(state)
            saved = copy.deepcopy((exchange.state_dict(state), {name: w.detach() for name, w in weights.items()}))
            train(exchange, state, weights, rank, range(5, 9))
            exchange.before_step(state, 9)

            again = initial()
            fresh = exchange.prepare(list(again.items()), dist.group.WORLD)
            train(exchange, fresh, again, rank, range(2))  # something is under way when the checkpoint comes
            with torch.no_grad():
                for name, weight in again.items():
                    weight.copy_(saved[1][name])
            exchange.load_state_dict(fresh, saved[0])
            train(exchange, fresh, again, rank, range(5, 9))
            exchange.before_step(fresh, 9)
            for name in weights:
                assert torch.equal(weights[name], again[name]), (exchange, agrees, name)


def case_other_checkpoints_are_refused(rank: int, size: int) -> None:
    exchange, weights = LowPrecisionDecentralized(), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    train(exchange, state, weights, rank, range(2))
    saved = exchange.state_dict(state)
    with pytest.raises(UsageError, match="not saved by this method"):
        exchange.load_state_dict(state, {})
    with pytest.raises(UsageError, match="keeps no state"):
        Decentralized().load_state_dict(Decentralized().prepare(list(weights.items()), dist.group.WORLD), saved)
    if size > 1:
        with pytest.raises(UsageError, match="ring of 77 ranks"):
            exchange.load_state_dict(state, {**saved, "ranks": 77})
        del saved["replicas"]["left"]["bias"]
        with pytest.raises(UsageError, match="bias"):
            exchange.load_state_dict(state, saved)


def case_what_is_not_finite_is_said_once_and_not_hidden(rank: int, size: int) -> None:
    if size == 1:
        return
    handler = OwnMessages()
    seen = handler.texts
    for exchange in (Decentralized(), Decentralized("shift_one"), LowPrecisionDecentralized()):
        weights = initial()
        state = exchange.prepare(list(weights.items()), dist.group.WORLD)
        train(exchange, state, weights, rank, range(1))
        logging.getLogger("guozhuang").addHandler(handler)
        seen.clear()
        exchange.before_step(state, 1)
        if rank == size - 1:
            weights["bias"].data[1] = float("nan")
        exchange.after_step(state, 1)
        exchange.before_step(state, 2)
        if rank == size - 1:
            assert "'bias'" in seen[0] and "NaN or infinity" in seen[0] and f"rank {rank}" in seen[0], seen
            assert len(seen) == 1 and "step 1" in seen[0]
        else:
            assert not seen
        train(exchange, state, weights, rank, range(3, 3 + 2 * size))
        exchange.before_step(state, 3 + 2 * size)
        assert weights["bias"].isnan().any(), exchange  # it has come round to all
        assert len(seen) <= 1
        exchange.agree(state)
        logging.getLogger("guozhuang").removeHandler(handler)


def case_what_is_not_finite_is_said_where_ranks_agree(rank: int, size: int) -> None:
    if size == 1:
        return
    handler = OwnMessages()
    seen = handler.texts
    for exchange in (Decentralized(every=8), LowPrecisionDecentralized(every=8), AsyncModelAverage(interval_ms=1e7)):
        weights = initial()
        state = exchange.prepare(list(weights.items()), dist.group.WORLD)
        if rank == size - 1:
            weights["bias"].data[1] = float("nan")
        logging.getLogger("guozhuang").addHandler(handler)
        seen.clear()
        exchange.agree(state)
        logging.getLogger("guozhuang").removeHandler(handler)
        assert weights["bias"].isnan().any()
        assert len(seen) == (rank == size - 1) and all("'bias'" in text for text in seen), (exchange, seen)


def case_narrow_weights_do_not_overflow_and_equal_ones_stay(rank: int, size: int) -> None:
    for exchange in (Decentralized(), Decentralized("shift_one"), AsyncModelAverage(interval_ms=0)):
        for dtype in (torch.float16, torch.bfloat16):
            weight = nn.Parameter(torch.tensor([40000.0, 1.2345, -3.3333, 0.0007]).to(dtype))
            start = weight.detach().clone()
            state = exchange.prepare([("w", weight)], dist.group.WORLD)
            for step in range(4):
                exchange.before_step(state, step)
                exchange.after_step(state, step)
            exchange.agree(state)
            assert torch.equal(weight.detach(), start), (exchange, weight)


def case_evaluation_in_inference_mode(rank: int, size: int) -> None:
    for exchange in (LowPrecisionDecentralized(), AsyncModelAverage(interval_ms=0)):
        ddp = DistributedDataParallel(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.use_weight_exchange(exchange, optimizer)
        for loads in (False, True, False):
            for _ in range(3):
                optimizer.zero_grad()
                ddp(torch.randn(4, 4)).square().mean().backward()
                optimizer.step()
            if loads:
                ddp.load_state_dict({name: t.detach().clone() for name, t in ddp.named_parameters()})
            with torch.inference_mode():
                ddp.eval()
            ddp.train()


def case_a_rank_without_data_shadows(rank: int, size: int) -> None:
    """Rank 0 has two steps, the others six; it takes part in all."""
    for exchange in METHODS:
        weights = initial()
        state = exchange.prepare(list(weights.items()), dist.group.WORLD)
        train(exchange, state, weights, rank, range(2))
        for step in range(2, 6):
            if rank == 0:
                exchange.before_step(state, step)
                exchange.after_step(state, step)
            else:
                train(exchange, state, weights, rank, range(step, step + 1))
        exchange.agree(state)
        assert_equal_bits(weights, size)


def case_other_collectives_do_not_disturb(rank: int, size: int) -> None:
    exchange, weights = Decentralized("shift_one"), initial()
    state = exchange.prepare(list(weights.items()), dist.group.WORLD)
    for step in range(5):
        train(exchange, state, weights, rank, range(step, step + 1))
        if rank == step % size:
            time.sleep(0.01)
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones[0] == size
    theirs = model_of_decentralized(size, 5, exchange)[rank]
    for name, weight in weights.items():
        assert torch.equal(weight.detach(), theirs[name])


def case_ddp_trains_with_it(rank: int, size: int) -> None:
    """Several parameter groups, accumulation and uneven inputs; about as good as with all gradients."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    test = torch.randn(256, 10, generator=torch.Generator().manual_seed(99_999))
    for exchange in (None, Decentralized(), Decentralized("shift_one"), LowPrecisionDecentralized()):
        ddp = DistributedDataParallel(copy.deepcopy(model))
        first, second = ddp.module[0].parameters(), ddp.module[2].parameters()  # type: ignore[index]
        optimizer = torch.optim.SGD([{"params": first}, {"params": second, "lr": 0.01}], lr=0.02)
        if exchange is not None:
            ddp.use_weight_exchange(exchange, optimizer)
        with ddp.join():
            for step in range(60 + rank):
                x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step * size + rank))
                with ddp.no_sync():
                    (ddp(x[:8]) - x[:8].sum(1, keepdim=True)).square().mean().backward()
                (ddp(x[8:]) - x[8:].sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ddp.eval()
        with torch.no_grad():
            loss = float((ddp(test) - test.sum(1, keepdim=True)).square().mean())
        if exchange is None:
            plain = loss
            continue
        assert loss < 1.3 * plain + 0.05, (exchange, loss, plain)  # 10 at the start
        assert_equal_bits(dict(ddp.module.named_parameters()), size)


test_cases = as_tests(globals(), (1, 2, 3, 4), slow=(5, 8), on="threads")


SENDING = (Decentralized(), Decentralized("shift_one"), LowPrecisionDecentralized(every=2))


def counted(rank: int, size: int) -> list[tuple[float, float]]:
    """For each method, bytes per step and what it says; over whole turns, in which each rank sits out as often as others."""
    found, states = [], []  # what a method opened stays open: closed sockets are not counted
    for exchange in SENDING:
        weight = nn.Parameter(torch.randn(200_000))
        state = exchange.prepare([("w", weight)], dist.group.WORLD)
        states.append(state)
        for step in range(2):
            exchange.before_step(state, step)
            exchange.after_step(state, step)
        exchange.before_step(state, 2)

        def take_step(step: int, exchange: Any = exchange, state: Any = state) -> None:
            exchange.after_step(state, step + 2)
            exchange.before_step(state, step + 3)

        sent, said = sent_in(take_step, 2 * size), exchange.traffic(weight.numel(), 4, size)
        assert said is not None
        found.append((sent, said))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel tells")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_is_sent_is_what_is_said(size: int) -> None:
    for found in run_ranks(counted, size):
        for exchange, (sent, said) in zip(SENDING, found, strict=True):
            assert said <= sent + 1 and sent <= said * 1.02 + 2048, exchange  # headers of messages, and the barrier


def misses_one(rank: int, size: int) -> list[str]:
    """Rank 1 makes no second step, and stays until rank 0 has noticed for each method."""
    store, prepared = dist.distributed_c10d._get_default_store(), []
    for exchange in (Decentralized(), Decentralized("shift_one"), LowPrecisionDecentralized()):
        weights = initial()
        state: Any = exchange.prepare(list(weights.items()), dist.group.WORLD)
        train(exchange, state, weights, rank, range(1))
        exchange.before_step(state, 1)
        prepared.append((exchange, state))
    if rank == 1:
        while not store.check(["noticed"]):
            time.sleep(0.05)
        return []
    texts = []
    for exchange, state in prepared:
        with pytest.raises(WorldError) as caught:
            for step in range(1, 4):
                exchange.after_step(state, step)
                exchange.before_step(state, step + 1)
        texts.append(str(caught.value))
    store.set("noticed", "")
    return texts


def test_who_did_not_come_is_named() -> None:
    found = run_ranks(misses_one, 2, group_timeout_s=2.0)[0]
    for text, who in zip(found, ("other ranks (1)", "rank 1, whose turn", "rank 1, a neighbour"), strict=True):
        assert "[rank 0]" in text and who in text, text
