"""Optimizers that need whole matrices, divided among ranks: each matrix has one owner, and steps as on one process to the bit.

Every case runs on ranks that are threads, where weights travel, and over shared memory, where they exist once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import guozhuang as gz
from guozhuang.errors import UsageError
from guozhuang.exchange.allreduce import AllReduce
from guozhuang.registry import registry
from guozhuang.sharding import ShardedOptimizer, clip_grad_norm_, shard
from tests.processes.cases import (
    assert_equal_across_ranks,
    names_of_cases,
    results_of_cases,
    seeded,
    twin_of,
)
from tests.threads.ranks import run_threads

STEPS = 4


class Shampoo(Optimizer):
    """Preconditions a tensor along each of its dims by the inverse root of a sum of products (Gupta et al. 2018).

    Its state holds lists of matrices and a plain number, and it counts its own steps: nothing of it has the weight's shape.
    """

    whole_tensors = True

    def __init__(self, parameters: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})
        self.num_steps = 0

    @staticmethod
    def step_cost(parameter: Tensor, group: dict[str, Any]) -> float:
        return float(sum(size**3 for size in parameter.shape) + parameter.numel())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, sides=[1e-4 * torch.eye(size) for size in p.shape])
                state["count"] += 1
                update = p.grad
                for dim, side in enumerate(state["sides"]):
                    rows = p.grad.movedim(dim, 0).reshape(p.shape[dim], -1)
                    side.add_(rows @ rows.T)
                    values, vectors = torch.linalg.eigh(side)
                    root = vectors * values.clamp(min=1e-6) ** (-0.5 / p.dim()) @ vectors.T
                    update = torch.tensordot(root, update.movedim(dim, 0), 1).movedim(0, dim)
                p.add_(update, alpha=-group["lr"])


class Net(nn.Module):
    """Matrices of several sizes, one in other memory order, a convolution, a number, and one parameter that is often unused."""

    def __init__(self) -> None:
        super().__init__()
        self.convolved = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList([nn.Linear(5, 37), nn.Linear(37, 11), nn.Linear(11, 11), nn.Linear(11, 7)])
        self.turned = nn.Parameter(torch.randn(9, 4).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.idle = nn.Parameter(torch.randn(4, 4))


def net() -> Net:
    with seeded(3):
        return Net()


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """As users combine them; Muon with two groups."""
    some = matrices(model)
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": some[:2]}, {"params": some[2:], "lr": 0.01, "adjust_lr_fn": "match_rms_adamw"}]
    return [torch.optim.Muon(groups, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


KINDS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "muon and adamw": muon_and_adamw,
    "adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.05)],
    "adafactor foreach": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.05, foreach=True)],
    "shampoo": lambda model: [Shampoo(model.parameters())],
}


def give_gradients(model: nn.Module, rank: int, num_ranks: int, step: int, with_idle: bool = False) -> None:
    """Give the rank gradients whose mean is exact, also if each is divided before the sum; rank -1: give the mean.

    They are small multiples of the number of ranks.
    """
    draw = torch.Generator().manual_seed(step)
    for p in model.parameters():
        mean = torch.randint(-4, 5, p.shape, generator=draw).float()
        others = [num_ranks * torch.randint(-4, 5, p.shape, generator=draw).float() for _ in range(num_ranks - 1)]
        of_ranks = [*others, num_ranks * mean - sum(others, torch.zeros(p.shape))]
        p.grad = torch.empty_like(p).copy_(mean if rank < 0 else of_ranks[rank])
    if not with_idle:
        model.idle.grad = None


class Both:
    """A divided model, and the twin that one process steps with the mean gradients."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        bare = net()
        self.twin = twin_of(bare)
        self.twin_optimizers = KINDS[kind](self.twin)
        self.model, self.optimizers = shard(bare, KINDS[kind](bare), **options)

    def give(self, step: int, **options: Any) -> None:
        give_gradients(self.model, self.rank, self.num_ranks, step, **options)
        give_gradients(self.twin, -1, self.num_ranks, step, **options)

    def update(self) -> None:
        for optimizer in (*self.optimizers, *self.twin_optimizers):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.give(step, with_idle=step > 1)
            self.update()

    def check(self) -> None:
        for (name, found), (_, expected) in zip(
            self.model.named_parameters(), self.twin.named_parameters(), strict=True
        ):
            assert torch.equal(found, expected), f"{name}: {(found - expected).abs().max()}"
            assert found.stride() == expected.stride()
        assert_equal_across_ranks(self.model)
        for ours, theirs in zip(self.optimizers, self.twin_optimizers, strict=True):
            assert_same_state(ours.state_dict(), theirs.state_dict())


def assert_same_state(found: Any, expected: Any) -> None:
    """Equal to the last bit, with the same strides, at any depth."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, dict):
        assert list(found) == sorted(expected, key=lambda key: (isinstance(key, int) and key) or 0)
    if isinstance(expected, dict | list | tuple):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same_state(found[key], expected[key])
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and found.stride() == expected.stride() and torch.equal(found, expected)
    else:
        assert found == expected


def case_every_step_is_that_of_one_process_to_the_bit(rank: int, world_size: int) -> None:
    for kind in KINDS:
        both = Both(kind)
        assert all(isinstance(each, ShardedOptimizer) for each in both.optimizers)
        for step in range(STEPS):
            both.train([step])
            both.check()


def case_schedules_clipping_and_a_grad_scaler_act_as_ever(rank: int, world_size: int) -> None:
    both = Both("muon and adamw")
    schedules = [StepLR(each, 2, 0.5) for each in (*both.optimizers, *both.twin_optimizers)]
    scaler, twins = (torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100) for _ in range(2))
    for each in (scaler, twins):
        each.scale(torch.ones(()))
    norms: list[Tensor] = []
    for step in range(STEPS):
        both.give(step)
        if step == 1 and rank == world_size - 1:  # one rank only
            both.model.turned.grad.data[0, 0] = float("inf")
        if step == 1:
            both.twin.turned.grad[0, 0] = float("inf")
        for its, optimizers, model in (
            (scaler, both.optimizers, both.model),
            (twins, both.twin_optimizers, both.twin),
        ):
            for optimizer in optimizers:
                its.unscale_(optimizer)
            clip = clip_grad_norm_ if its is scaler else nn.utils.clip_grad_norm_
            if step == 2:  # so far above the norm that rounding makes no difference
                norms.append(clip(model.parameters(), 1e9))
            for optimizer in optimizers:
                its.step(optimizer)
                optimizer.zero_grad()
            its.update()
        if step == 2:
            torch.testing.assert_close(norms[0], norms[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for schedule in schedules:
                schedule.step()
        assert both.optimizers[0].param_groups[1]["lr"] == both.twin_optimizers[0].param_groups[1]["lr"]
        both.check()


def case_groups_are_added_frozen_and_closures_called(rank: int, world_size: int) -> None:
    bare = net()
    twin = twin_of(bare)
    made: list[Any] = [Shampoo(list(each.layers.parameters())) for each in (bare, twin)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, made[0] = shard(bare, made[0])
    for step in range(5):
        if step == 2:
            for model, optimizer in zip((bare, twin), made, strict=True):
                optimizer.add_param_group({"params": [model.turned, model.convolved.weight], "lr": 0.01})
        for model in (bare, twin):
            model.layers[1].requires_grad_(step != 3)
        for model, optimizer, of in ((bare, made[0], rank), (twin, made[1], -1)):

            def closure(model: Net = model, of: int = of, step: int = step) -> float:
                give_gradients(model, of, world_size, step)
                return 2.5

            if optimizer is made[0]:
                assert optimizer.step(closure) == 2.5
            else:
                closure()
                if step == 3:
                    for p in model.layers[1].parameters():
                        p.grad = None
                optimizer.step()
            optimizer.zero_grad()
        for (name, found), (_, expected) in zip(bare.named_parameters(), twin.named_parameters(), strict=True):
            assert torch.equal(found, expected), (step, name)
    assert made[0].inner.num_steps == made[1].num_steps == 5
    assert_same_state(made[0].state_dict(), made[1].state_dict())


def case_there_may_be_fewer_matrices_than_ranks(rank: int, world_size: int) -> None:
    for make in (
        lambda p: torch.optim.Muon(p, lr=0.02),
        lambda p: torch.optim.Adafactor(p),
        lambda p: Shampoo(p),
    ):
        with seeded(5):
            bare = nn.Linear(7, 13, bias=False)
        twin = twin_of(bare)
        other = make(twin.parameters())
        model, optimizer = shard(bare, make(bare.parameters()))
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            twin.weight.grad = torch.randint(-4, 5, (13, 7), generator=draw).float()
            model.weight.grad = twin.weight.grad * (world_size if rank == 0 else 0)
            optimizer.step()
            other.step()
        assert torch.equal(model.weight, twin.weight)
        assert_same_state(optimizer.state_dict(), other.state_dict())
        assert len(optimizer.carrier.weights) == (rank == 0)


def case_an_exchange_may_average(rank: int, world_size: int) -> None:
    for kind in ("muon and adamw", "shampoo"):
        both = Both(kind, exchange=AllReduce())
        both.train(range(STEPS))
        both.check()


def case_a_whole_state_is_loaded_before_and_after(rank: int, world_size: int) -> None:
    for kind in ("muon and adamw", "shampoo"):
        trained = Both(kind)
        trained.train(range(2))
        saved = [copy.deepcopy(each.state_dict()) for each in trained.twin_optimizers]
        for before in (False, True):
            model = twin_of(trained.twin)
            optimizers = KINDS[kind](model)
            if before:
                for each, state in zip(optimizers, copy.deepcopy(saved), strict=True):
                    each.load_state_dict(state)
            model, made = shard(model, optimizers)
            if not before:
                for each, state in zip(made, copy.deepcopy(saved), strict=True):
                    each.load_state_dict(state)
            going_on = copy.copy(trained)
            going_on.twin = twin_of(trained.twin)
            going_on.twin_optimizers = KINDS[kind](going_on.twin)
            for each, state in zip(going_on.twin_optimizers, copy.deepcopy(saved), strict=True):
                each.load_state_dict(state)
            going_on.model, going_on.optimizers = model, made
            going_on.train(range(2, 4))
            going_on.check()


def saved_once(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """A checkpoint holds the model once, and brings it and all optimizers back."""
    state = gz.TrainingState()
    shared, own, _ = state.capture(everywhere=True)
    shared, own = copy.deepcopy((shared, own))
    assert sum("/parameters/" in key for key in shared.tensors) == len(list(model.parameters()))
    before = copy.deepcopy([model.state_dict(), *(each.state_dict() for each in optimizers)])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state.check(shared.state, own.state)
    state.restore(shared.state, own.state, own.state, state.about())
    assert_same_state(dict(model.state_dict()), dict(before[0]))
    assert_same_state([each.state_dict() for each in optimizers], before[1:])
    registry.clear()
    gz.TrainingState.forget()


def case_prepare_takes_several_optimizers(rank: int, world_size: int) -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        return model(rows[rank * 8 // world_size : (rank + 1) * 8 // world_size]).pow(2).mean()

    trained = []
    for strategy in ("ddp", "sharded"):
        with seeded(4):
            model: nn.Module = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 8))
        pair = gz.prepare(model, muon_and_adamw(model), strategy)
        model, (muon, adamw) = pair
        assert isinstance(muon, ShardedOptimizer) == (strategy == "sharded")
        for step in range(3):
            loss_of(model, step).backward()
            for each in (muon, adamw):
                each.step()
            for each in (muon, adamw):
                each.zero_grad()
        loss = pair.step(3, loss_of)
        trained.append((loss, *(p.detach().clone() for p in model.parameters())))
        assert len(muon.state_dict()["state"]) == len(adamw.state_dict()["state"]) == 2
        saved_once(model, (muon, adamw))
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)  # Muon computes in bfloat16
    with seeded(4):
        model = nn.Linear(5, 9)
    for strategy in ("qadam", "diloco", "sharded-weights"):
        with pytest.raises(UsageError, match=f"strategy {strategy} takes a model together with its one optimizer"):
            gz.prepare(model, muon_and_adamw(model), strategy)


def case_a_parameter_belongs_to_one_optimizer(rank: int, world_size: int) -> None:
    model = net()
    some = matrices(model)
    optimizers = [torch.optim.Muon(some), torch.optim.AdamW(model.parameters())]
    with pytest.raises(UsageError, match=r"two of the optimizers hold idle, layers\.0\.weight.*"):
        shard(model, optimizers)
    with pytest.warns(UserWarning, match="in no group of the optimizer"):
        shard(model, optimizers[:1])


NAMES = names_of_cases(globals())
NOT_IN_THREADS = (  # filters of warnings, one world for a process
    "case_prepare_takes_several_optimizers",
    "case_a_parameter_belongs_to_one_optimizer",
    "case_groups_are_added_frozen_and_closures_called",
    "case_schedules_clipping_and_a_grad_scaler_act_as_ever",
)
RESULTS = {
    "shm, 2": results_of_cases(__name__, 2, NAMES, backend="shm"),
    "gloo, 3": results_of_cases(__name__, 3, NAMES, backend="gloo"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", ["shm, 2", pytest.param("gloo, 3", marks=pytest.mark.slow)])
def test_cases(group: str, name: str) -> None:
    RESULTS[group](name)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_IN_THREADS])
@pytest.mark.parametrize("num_ranks", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_cases_on_threads(num_ranks: int, name: str) -> None:
    run_threads(globals()[name], num_ranks)


def states_after(rank: int, world_size: int, kind: str, saved: Any, steps: range) -> Any:
    """Train as one of ``world_size`` ranks, from a saved state if there is one, and return the state."""
    model = net()
    optimizers: Any = KINDS[kind](model)
    if world_size > 1:
        model, optimizers = shard(model, optimizers)
    if saved:
        model.load_state_dict(saved["model"])
        for each, state in zip(optimizers, copy.deepcopy(saved["optimizers"]), strict=True):
            each.load_state_dict(state)
    for step in steps:
        give_gradients(model, rank if world_size > 1 else -1, max(world_size, 2), step, with_idle=step > 1)
        for each in optimizers:
            each.step()
            each.zero_grad()
    return copy.deepcopy({"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "foreach" not in kind])
def test_a_state_goes_on_with_another_number_of_ranks(kind: str) -> None:
    def means(world_size: int, steps: range, saved: Any) -> Any:
        """What one process has with the means that ``world_size`` ranks got."""
        model = net()
        optimizers = KINDS[kind](model)
        if saved:
            model.load_state_dict(saved["model"])
            for each, state in zip(optimizers, copy.deepcopy(saved["optimizers"]), strict=True):
                each.load_state_dict(state)
        for step in steps:
            give_gradients(model, -1, world_size, step, with_idle=step > 1)
            for each in optimizers:
                each.step()
                each.zero_grad()
        return {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}

    on_three = run_threads(states_after, 3, kind, None, range(3))[1]
    alone = means(3, range(3), None)
    assert_same_state(on_three, alone)
    on_two = run_threads(states_after, 2, kind, on_three, range(3, 5))[0]
    alone = means(2, range(3, 5), alone)
    assert_same_state(on_two, alone)
    assert_same_state(means(2, range(5, 6), on_two), means(2, range(5, 6), alone))
