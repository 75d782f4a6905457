"""Local SGD and what composes with it, on real ranks, against one process that plays all of them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.exchange import AllReduce
from guozhuang.exchange.average import Average
from guozhuang.exchange.diloco import DiLoCo
from guozhuang.exchange.every import Every
from guozhuang.exchange.local_sgd import LocalSGD
from guozhuang.exchange.warmup import WeightWarmup
from guozhuang.exchange.weights import WeightExchange
from guozhuang.lab.measure import tcp_sent_bytes
from tests.processes.cases import (
    as_tests,
    assert_equal_across_ranks,
    mlp,
    said,
    seeded,
    sent_per_step,
)
from tests.ranks import run_ranks

LR = 0.1


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(batch(rank, step)) - 1).square().mean()


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


class Ranks:
    """All ranks in one process: a model and an optimizer each."""

    def __init__(self, size: int, made: type[torch.optim.Optimizer] = torch.optim.SGD, model: nn.Module | None = None):
        self.models = [copy.deepcopy(model or mlp()) for _ in range(size)]
        self.optimizers = [made(m.parameters(), lr=LR) for m in self.models]

    def step(self, step: int, together: bool = False, but: Sequence[int] = ()) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
        if together:
            for same in zip(*[m.parameters() for m in self.models], strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.grad = mean.clone()
        for rank, optimizer in enumerate(self.optimizers):
            if rank not in but:
                optimizer.step()

    @torch.no_grad()
    def average(self) -> None:
        for same in zip(*[m.parameters() for m in self.models], strict=True):
            mean = torch.stack([p.to(torch.promote_types(p.dtype, torch.float32)) for p in same]).mean(0)
            for p in same:
                p.copy_(mean)


def train(
    exchange: WeightExchange[Any],
    state: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: Sequence[int],
    shadows: bool = False,
) -> None:
    """Steps without a wrapper; gradients that the method averages are averaged here."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if exchange.averages_gradients(step):
            for p in model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        exchange.before_step(state, step)
        if not shadows:
            optimizer.step()
        exchange.after_step(state, step)


def assert_near(ours: nn.Module, theirs: nn.Module, atol: float = 1e-6) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def bits(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def case_mean_every_three_steps(rank: int, size: int) -> None:
    for exchange in (LocalSGD(3), Every(3, Average())):
        ours, twin = mlp(), Ranks(size, torch.optim.AdamW)
        optimizer = torch.optim.AdamW(ours.parameters(), lr=LR)
        state = exchange.prepare(named(ours), dist.group.WORLD)
        for step in range(8):
            train(exchange, state, ours, optimizer, rank, [step])
            twin.step(step)
            if step % 3 == 2:
                twin.average()
                assert_equal_across_ranks(ours)
            assert_near(ours, twin.models[rank], atol=1e-5)
        if size > 1:
            assert not torch.equal(bits(ours), bits(twin.models[(rank + 1) % size]))
        exchange.agree(state)
        twin.average()
        assert_equal_across_ranks(ours)
        assert_near(ours, twin.models[rank], atol=1e-5)


def case_with_sgd_every_step_it_is_averaging_gradients(rank: int, size: int) -> None:
    for exchange in (LocalSGD(1), Average()):
        ours, twin = mlp(), Ranks(size)
        optimizer = torch.optim.SGD(ours.parameters(), lr=LR)
        state = exchange.prepare(named(ours), dist.group.WORLD)
        for step in range(6):
            train(exchange, state, ours, optimizer, rank, [step])
            twin.step(step, together=True)
            assert_near(ours, twin.models[0])
            assert_equal_across_ranks(ours)


def case_post_local(rank: int, size: int) -> None:
    for exchange in (LocalSGD(2, start_step=3), WeightWarmup(3, AllReduce(), LocalSGD(2))):
        ours, twin = mlp(), Ranks(size)
        optimizer = torch.optim.SGD(ours.parameters(), lr=LR)
        state = exchange.prepare(named(ours), dist.group.WORLD)
        for step in range(9):
            train(exchange, state, ours, optimizer, rank, [step])
            twin.step(step, together=step < 3)
            if step in (4, 6, 8):
                twin.average()
            assert_near(ours, twin.models[rank])
            if step < 3:
                assert_equal_across_ranks(ours)
        exchange.close(state)


def case_agreement_is_not_made_twice(rank: int, size: int) -> None:
    exchange, ours = LocalSGD(2), mlp()
    state = exchange.prepare(named(ours), dist.group.WORLD)
    train(exchange, state, ours, torch.optim.SGD(ours.parameters(), lr=LR), rank, range(2))
    before = tcp_sent_bytes()
    exchange.agree(state)
    assert tcp_sent_bytes() == before
    assert_equal_across_ranks(ours)


def case_uneven_steps(rank: int, size: int) -> None:
    """Rank 0 has no data after step 3; its weights still count, and become those of all."""
    exchange, ours, twin = LocalSGD(2), mlp(), Ranks(size)
    optimizer = torch.optim.SGD(ours.parameters(), lr=LR)
    state = exchange.prepare(named(ours), dist.group.WORLD)
    for step in range(7):
        ended = rank == 0 and step > 3
        train(exchange, state, ours, optimizer, rank, [step], shadows=ended)
        twin.step(step, but=[0] if step > 3 else [])
        if step % 2 == 1:
            twin.average()
        assert_near(ours, twin.models[rank])
    exchange.agree(state)
    twin.average()
    assert_near(ours, twin.models[rank])
    assert_equal_across_ranks(ours)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.narrow = nn.Parameter(torch.randn(5, 7).to(torch.bfloat16))
            self.plain = nn.Parameter(torch.randn(33, 3))
            self.turned = nn.Parameter(torch.randn(8, 4).t())
            self.precise = nn.Parameter(torch.randn(4, dtype=torch.float64))
            self.pairs = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.number = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.empty(0, 3))


@torch.no_grad()
def push(model: nn.Module, rank: int, step: int) -> None:
    """An inner step that every process can make for any rank."""
    random = torch.Generator().manual_seed(100 * step + rank)
    for p in model.parameters():
        p += torch.randn(p.shape, generator=random, dtype=torch.complex64 if p.is_complex() else torch.float32).to(p)


def case_every_dtype_and_shape(rank: int, size: int) -> None:
    exchange, ours = LocalSGD(1), Mixed()
    state = exchange.prepare(named(ours), dist.group.WORLD)
    exchange.before_step(state, 0)
    push(ours, rank, 0)
    exchange.after_step(state, 0)
    others = [Mixed() for _ in range(size)]
    for other, twin in enumerate(others):
        push(twin, other, 0)
    for name, p in ours.named_parameters():
        same = [dict(twin.named_parameters())[name].detach() for twin in others]
        dtype = torch.promote_types(p.dtype, torch.float32)
        mean = sum(q.to(dtype) for q in same) / size
        assert isinstance(mean, Tensor)
        if p.dtype == torch.bfloat16:
            assert torch.equal(p, mean.to(p.dtype))
        else:
            torch.testing.assert_close(p.detach(), mean)


def case_what_is_not_finite_is_said(rank: int, size: int) -> None:
    if size == 1:
        return
    exchange, ours = LocalSGD(1), mlp()
    state = exchange.prepare(named(ours), dist.group.WORLD)
    exchange.before_step(state, 0)
    if rank == size - 1:
        with torch.no_grad():
            ours[2].weight[0, 1] = torch.nan
    with said() as texts:
        exchange.after_step(state, 0)
    assert bool(ours[2].weight[0, 1].isnan()) and int(bits(ours).isnan().sum()) == 1
    if rank == size - 1:
        assert "'2.weight'" in texts[0] and f"rank {rank}" in texts[0] and "NaN" in texts[0], texts
    else:
        assert not texts


def case_warm_up_before_diloco_starts_it_from_the_weights_of_then(rank: int, size: int) -> None:
    exchange = WeightWarmup(3, AllReduce(), DiLoCo(2))
    ours, theirs = mlp(), mlp()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=LR) for m in (ours, theirs))
    state = exchange.prepare(named(ours), dist.group.WORLD)
    train(exchange, state, ours, optimizer, rank, range(2))
    assert exchange.state_dict(state) == {}
    train(exchange, state, ours, optimizer, rank, range(2, 3))
    exchange.agree(state)
    theirs.load_state_dict(ours.state_dict())
    alone = DiLoCo(2)
    its = alone.prepare(named(theirs), dist.group.WORLD)
    train(exchange, state, ours, optimizer, rank, range(3, 8))
    for step in range(3, 8):
        other.zero_grad()
        loss_of(theirs, rank, step).backward()
        alone.before_step(its, step - 3)
        other.step()
        alone.after_step(its, step - 3)
    assert_near(ours, theirs)
    exchange.agree(state)
    saved = exchange.state_dict(state)
    fresh = exchange.prepare(named(ours), dist.group.WORLD)
    exchange.load_state_dict(fresh, saved)
    kept = exchange.state_dict(fresh)["then"]
    assert all(torch.equal(kept[key][n], v) for key in ("global", "momentum") for n, v in saved["then"][key].items())
    with pytest.raises(UsageError, match="no state of this warm-up"):
        exchange.load_state_dict(fresh, {"global": {}})
    with pytest.raises(UsageError, match="keeps no state"):
        LocalSGD(2).load_state_dict(LocalSGD(2).prepare(named(ours), dist.group.WORLD), saved)


def case_under_the_wrapper(rank: int, size: int) -> None:
    """Accumulation, a warm-up and uneven inputs; evaluation and ``state_dict`` see one set of weights."""
    for start_step in (0, 2):
        ddp, twin = DistributedDataParallel(mlp()), Ranks(size)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
        ddp.use_weight_exchange(LocalSGD(2, start_step=start_step), optimizer)
        for step in range(5):
            optimizer.zero_grad()
            with ddp.no_sync():
                (loss_of(ddp, rank, step) / 2).backward()
            (loss_of(ddp, rank, step) / 2).backward()
            optimizer.step()
            twin.step(step, together=step < start_step)
            if step >= start_step and (step + 1 - start_step) % 2 == 0:
                twin.average()
            assert_near(ddp.module, twin.models[rank])
        ddp.eval()
        twin.average()
        assert_near(ddp.module, twin.models[rank])
        assert_equal_across_ranks(ddp.module)
        ddp.train()
        with ddp.join():
            for step in range(5, 7 + rank):
                optimizer.zero_grad()
                loss_of(ddp, rank, step).backward()
                optimizer.step()
        assert_equal_across_ranks(ddp.module)


def case_a_rank_that_shadowed_averaged_gradients_takes_the_weights_of_one_that_stepped(rank: int, size: int) -> None:
    """One weight, raised by 1 in each step."""
    exchanges = (LocalSGD(4, start_step=1000), LocalSGD(50, start_step=6), WeightWarmup(6, AllReduce(), LocalSGD(3)))
    for exchange, held in zip(exchanges, (10.0, None, None), strict=True):
        ddp = DistributedDataParallel(Raised())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        ddp.use_weight_exchange(exchange, optimizer)
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(2 if rank == 0 else 10):
                optimizer.zero_grad()
                (-ddp(torch.ones(1))).sum().backward()
                optimizer.step()
        assert_equal_across_ranks(ddp.module)
        if size > 1:
            # After step 6 rank 0 holds 6, too; it then takes part with that, while the others make 4 more steps.
            assert ddp.module.weight.item() == pytest.approx(held or 10 - 4 / size, abs=1e-5), exchange


class Raised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def case_weights_of_two_dtypes_that_are_not_finite_are_said_once_each(rank: int, size: int) -> None:
    if size == 1:
        return
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    state = Average().prepare(named(model), dist.group.WORLD)
    if rank == 0:
        model.a.data[0] = float("nan")
    with said() as texts:
        for step in range(3):
            Average().before_step(state, step)
            Average().after_step(state, step)
    assert len(texts) == 1 and "'a'" in texts[0], texts


test_cases = as_tests(globals(), (3,), slow=(1, 2, 4, 8))


def counted(rank: int, size: int) -> list[tuple[float, float | None]]:
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
    num_elements, found = sum(p.numel() for p in model.parameters()), []
    for exchange in (LocalSGD(2), Every(4, Average())):
        found.append((sent_per_step(exchange, named(model), 4), exchange.traffic(num_elements, 4, size)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel tells")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_it_sends_what_it_says(num_ranks: int) -> None:
    for found in run_ranks(counted, num_ranks):
        for sent, told in found:
            assert told is not None and told <= sent <= told * 1.02 + 4096
