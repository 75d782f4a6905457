"""LARS and LAMB: a plain reference, whole norms wherever parameters are divided, and the schedule for large batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR, SequentialLR

import guozhuang as gz
from guozhuang.errors import UsageError
from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.division import disown, divide, part, whole
from guozhuang.sharding import clip_grad_norm_, shard
from guozhuang.world.layout import Layout
from tests.processes.cases import assert_equal_across_ranks, seeded, twin_of
from tests.processes.test_sharding_whole import assert_same_state
from tests.ranks import run_ranks
from tests.threads.ranks import run_threads

LR, DECAY = 0.02, 0.1


def plain(kind: str, weight: Tensor, gradients: list[Tensor], layerwise: bool) -> Tensor:
    """The formula of the paper, one element after the other of what it says, in float64."""
    w, decay = weight.double(), DECAY if layerwise else 0.0
    m = v = torch.zeros_like(w)
    for step, g in enumerate(gradients, 1):
        g = g.double()
        if kind == "lars":
            ratio = 0.001 * w.norm() / (g.norm() + decay * w.norm() + 1e-8) if layerwise and w.norm() > 0 else 1.0
            m = 0.9 * m + LR * ratio * (g + decay * w)
            w = w - m
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            u = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + decay * w
            w = w - LR * (w.norm() / u.norm() if layerwise and w.norm() > 0 else 1.0) * u
    return w


KINDS: dict[str, Callable[..., Optimizer]] = {
    "lars": lambda p: gz.optim.LARS(p, lr=LR, weight_decay=DECAY),
    "lamb": lambda p: gz.optim.LAMB(p, lr=LR, weight_decay=DECAY),
}


def net() -> nn.Module:
    with seeded(3):
        model = nn.Sequential(nn.Linear(9, 40), nn.LayerNorm(40), nn.Conv1d(3, 5, 2), nn.Linear(40, 7))
        model.zeros = nn.Parameter(torch.zeros(3, 4))
        return model


def gradient(p: Tensor, step: int, number: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + number))


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_that_of_the_paper(kind: str) -> None:
    model = net()
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    groups = [{"params": parameters[:3], "layerwise": True}, {"params": parameters[3:7]}]
    optimizer = KINDS[kind]([*groups, {"params": parameters[7:], "layerwise": False}])
    for step in range(5):
        if step == 3:  # goes on from a state
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = KINDS[kind]([*groups, {"params": parameters[7:]}])
            optimizer.load_state_dict(saved)
        for i, p in enumerate(parameters):
            p.grad = gradient(p, step, i)
        assert optimizer.step(lambda: 1.5) == 1.5
    for i, (p, first) in enumerate(zip(parameters, before, strict=True)):
        layerwise = i < 3 or (i < 7 and p.dim() > 1)
        expected = plain(kind, first, [gradient(p, step, i) for step in range(5)], layerwise)
        torch.testing.assert_close(p.double(), expected, rtol=1e-6, atol=1e-6)


def test_what_is_not_a_step_is_refused() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UsageError, match=r"momentum must be at least 0 and less than 1.*1\.5"):
        gz.optim.LARS([p], lr=0.1, momentum=1.5)
    with pytest.raises(UsageError, match=r"betas\[1\] must be"):
        gz.optim.LAMB([p], betas=(0.9, 1.0))
    optimizer = gz.optim.LAMB([p])
    p.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(UsageError, match="LAMB takes dense gradients"):
        optimizer.step()


class Both:
    """A model that is divided by ``sharded``, and its twin on one process."""

    def __init__(self, rank: int, world_size: int, kind: str, **options: Any) -> None:
        self.rank, self.world_size = rank, world_size
        bare = net()
        self.twin = twin_of(bare)
        self.twin_optimizer = KINDS[kind](self.twin.parameters())
        self.model, self.optimizer = shard(bare, KINDS[kind](bare.parameters()), **options)

    def train(self, steps: range) -> None:
        for step in steps:
            for i, (p, q) in enumerate(zip(self.model.parameters(), self.twin.parameters(), strict=True)):
                p.grad = gradient(p, step, 10 * i + self.rank)
                q.grad = sum(gradient(p, step, 10 * i + rank) for rank in range(self.world_size)) / self.world_size
                if i == 3 and step == 0:
                    p.grad = q.grad = None
            if step == 1:
                clip_grad_norm_(self.model.parameters(), 3.0)
                nn.utils.clip_grad_norm_(self.twin.parameters(), 3.0)
            for optimizer in (self.optimizer, self.twin_optimizer):
                optimizer.step()
                optimizer.zero_grad()

    def check(self) -> None:
        for p, q in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        assert_equal_across_ranks(self.model)


def under_sharded(rank: int, world_size: int) -> None:
    for kind in KINDS:
        both = Both(rank, world_size, kind)
        both.train(range(3))
        both.check()
        saved = copy.deepcopy(both.optimizer.state_dict())
        assert saved["state"].keys() == both.twin_optimizer.state_dict()["state"].keys()
        again = Both(rank, world_size, kind)
        again.model.load_state_dict(both.model.state_dict())
        again.optimizer.load_state_dict(copy.deepcopy(saved))
        assert_same_state(again.optimizer.state_dict(), saved)
        again.twin, again.twin_optimizer = both.twin, both.twin_optimizer
        again.train(range(3, 5))
        again.check()


@pytest.mark.parametrize("num_ranks", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_sharded_knows_norms_of_whole_parameters(num_ranks: int) -> None:
    run_threads(under_sharded, num_ranks)


@pytest.mark.slow
def test_sharded_knows_them_where_weights_exist_once() -> None:
    run_ranks(under_sharded, 2, backend="shm")


def under_a_layout(rank: int, world_size: int, kind: str) -> None:
    axes = make_axes(Layout(pp=2, tp=2))
    tp, pp = axes.group("tp"), axes.group("pp")
    model = net()
    twin = twin_of(model)
    divisions = []
    for i, p in enumerate(model.parameters()):
        if p.dim() > 1:
            rows = p.shape[0] // 2 + 1
            divide(p, 0, ((0, rows),) if axes.index("tp") == 0 else ((rows, p.shape[0]),), tp)
        disown(p, (i % 2,) if i else (0, 1), pp)
        divisions.append(p._guozhuang_division)
    ours, theirs = KINDS[kind](model.parameters()), KINDS[kind](twin.parameters())
    for step in range(3):
        for i, (p, q) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
            q.grad = gradient(q, step, i)
            p.grad = part(q.grad, divisions[i]).clone() if divisions[i].is_owned else None
        ours.step()
        theirs.step()
    for p, q, division in zip(model.parameters(), twin.parameters(), divisions, strict=True):
        torch.testing.assert_close(whole(p, division), q.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_knows_norms_of_whole_parameters(kind: str) -> None:
    run_threads(under_a_layout, 4, kind)


# ---- the schedule -----------------------------------------------------------------------------------------------------------


def rates(make: Callable[[Optimizer], Any], steps: int, lr: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]}], lr=lr)
    schedule = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_the_rate_rises_to_the_scaled_one_and_others_decay_from_there() -> None:
    def linear(optimizer: Optimizer) -> Any:
        return gz.optim.ScaledWarmupLR(optimizer, 256, 32, warmup_steps=4)

    assert rates(linear, 6) == pytest.approx([0.1, 0.275, 0.45, 0.625, 0.8, 0.8])
    square = rates(lambda o: gz.optim.ScaledWarmupLR(o, 2048, 32, rule="sqrt"), 3)
    assert square == pytest.approx([0.8, 0.8, 0.8])
    then = rates(lambda o: SequentialLR(o, [linear(o), CosineAnnealingLR(o, 4)], milestones=[4]), 9)
    assert then[:4] == pytest.approx([0.1, 0.275, 0.45, 0.625]) and then[4] == pytest.approx(0.8)
    assert then[6] == pytest.approx(0.4) and then[8] == pytest.approx(0.0)
    both = rates(lambda o: ChainedScheduler([linear(o), LinearLR(o, 1.0, 0.5, total_iters=8)]), 9)
    assert both[8] == pytest.approx(0.4) and both[4] == pytest.approx(0.6)


def test_the_schedule_goes_on_from_its_state() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = gz.optim.ScaledWarmupLR(optimizer, 64, 32, warmup_steps=4)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    again = gz.optim.ScaledWarmupLR(other, 64, 32, warmup_steps=4)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    found = []
    for _ in range(3):
        found.append(other.param_groups[0]["lr"])
        other.step()
        again.step()
    assert found == pytest.approx([0.15, 0.175, 0.2])
    with pytest.raises(UsageError, match=r"no such rule.*cubic"):
        gz.optim.ScaledWarmupLR(other, 64, 32, rule="cubic")
    with pytest.raises(UsageError, match="batch_size=0"):
        gz.optim.ScaledWarmupLR(other, 0, 32)
