"""Hooks of the script on parameters, which see the gradient of one rank: linear ones are right, the rest is named."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.errors import UsageError
from guozhuang.gradients.script_hooks import ScriptHooks
from guozhuang.script.accumulate import accumulate
from guozhuang.sharding import shard
from guozhuang.strategies.prepared import PreparedDDP
from tests.threads.ranks import run_threads

STRATEGIES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "ddp": lambda m, o: (PreparedDDP(m), o),
    "drop-in": lambda m, o: (DistributedDataParallel(m), o),
    "sharded": shard,
}
MASK = torch.tensor([[1.0, 0.0, 2.0]]).double()

LINEAR: dict[str, Callable[[Tensor], Any]] = {
    "a scale": lambda g: g * 0.5,
    "a mask": lambda g: g * MASK if g.dim() == 2 else None,
    "a scale in place": lambda g: g.mul_(0.5),
    "nothing": lambda g: None,
    "rows exchanged": lambda g: g.flip(0),
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "a limit": lambda g: g.clamp(-0.01, 0.01),
    "a limit in place": lambda g: ([g.clamp_(-0.01, 0.01)], None)[1],
    "a sign": torch.sign,
    "unit length": lambda g: g / g.norm(),
    "a shift": lambda g: g + 0.1,
    "its positive part": torch.relu,
    "the largest ones": lambda g: g * (g.abs() >= g.abs().max()),
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()


def rows(step: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trains(rank: int, size: int, strategy: str, hook: Callable[[Tensor], Any], comes: str, plain: nn.Module) -> None:
    both = []
    for is_alone in (True, False):
        model: Any = copy.deepcopy(plain)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        inside, mine = model, slice(None) if is_alone else slice(rank, None, size)
        if not is_alone:
            model, optimizer = STRATEGIES[strategy](model, optimizer)
        for step in range(4):
            if step == (0 if comes == "before" else 2):
                handles = [p.register_hook(hook) for p in inside.parameters()]
            model(rows(step)[mine]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        assert not any(p._backward_hooks for p in inside.parameters())
        both.append([p.detach() for p in inside.parameters()])
    torch.testing.assert_close(both[1], both[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("comes", ["before", "later"])
@pytest.mark.parametrize("hook", LINEAR)
def test_linear_hooks_are_equal_to_one_process(hook: str, comes: str, strategy: str) -> None:
    run_threads(trains, 2, strategy, LINEAR[hook], comes, model_of())


def is_named(rank: int, size: int, strategy: str, hook: Callable[[Tensor], Any], plain: nn.Module) -> None:
    model: Any = copy.deepcopy(plain)
    model, optimizer = STRATEGIES[strategy](model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(rows(rank)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    next(p for name, p in model.named_parameters() if name.endswith("2.weight")).register_hook(hook)
    expected = pytest.raises(UsageError, match=r"a hook changes the gradient of 2\.weight.*averaged_gradients")
    with contextlib.nullcontext() if strategy == "drop-in" else expected:
        for step in range(2):
            model(rows(step)).mean().backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hook", OTHERS)
def test_other_hooks_are_named_before_a_step(hook: str, strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "guozhuang"):
        run_threads(is_named, 2, strategy, OTHERS[hook], model_of())
    said = [record for record in caplog.records if "a hook changes the gradient of 2.weight" in record.message]
    assert len(said) == (2 if strategy == "drop-in" else 0)  # once on each rank


def calls(rank: int, size: int, plain: nn.Module) -> None:
    model = PreparedDDP(copy.deepcopy(plain))
    seen: list[Any] = []
    weight = model.module[2].weight
    weight.register_hook(lambda g: seen.append(g.clone()))
    hook = weight.register_hook(lambda g: seen.append("changed") or g * 2)
    for _ in range(3):
        model(rows(rank)).mean().backward()
    assert sum(isinstance(each, Tensor) for each in seen) == 3  # one that looks is called once in a backward
    assert sum(isinstance(each, str) for each in seen) == 3 + 2  # one that changes is tried once
    hook.remove()
    bound = weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    with model.no_sync(), pytest.raises(UsageError, match="a hook changes the gradient"):
        model(rows(rank)).mean().backward()
    bound.remove()


def test_hooks_that_look_are_called_once_and_those_that_change_are_tried_once() -> None:
    run_threads(calls, 2, model_of())


def clamps_alone(rank: int, size: int, plain: nn.Module) -> None:
    trains(rank, size, "ddp", OTHERS["a limit"], "before", plain)


def test_one_rank_may_have_any_hook() -> None:
    run_threads(clamps_alone, 1, model_of())


def steps_in_backward(rank: int, size: int, strategy: str, plain: nn.Module) -> None:
    model: Any = copy.deepcopy(plain)
    inside = list(model.parameters())
    model, _ = STRATEGIES[strategy](model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [p.detach().clone() for p in inside]
    for parameter in inside:
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda p, own=own: own.step())
    with pytest.raises(UsageError, match=r"optimizer\.step\(\) came in backward.*2\.(weight|bias) is this rank's own"):
        model(rows(rank)).mean().backward()
    assert all(torch.equal(p.detach(), q) for p, q in zip(inside, before, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_that_steps_in_a_hook_is_refused(strategy: str) -> None:
    run_threads(steps_in_backward, 2, strategy, model_of())


# ---- steps whose gradients nothing has averaged ---------------------------------------------------------------------------


def by_hand(rank: int, size: int, plain: nn.Module) -> None:
    model = PreparedDDP(copy.deepcopy(plain))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(3):
        model(rows(step)).mean().backward()
        for p in parameters:
            p.grad = p.grad * 0.5  # made of an average
        model(rows(rank)).detach()  # a forward for something else
        optimizer.step()
        optimizer.zero_grad()
    with model.no_sync():  # its own gradients on purpose
        model(rows(rank)).mean().backward()
    optimizer.step()
    for p, gradient in zip(parameters, torch.autograd.grad(model(rows(rank)).mean(), parameters), strict=True):
        p.grad = gradient
    with pytest.raises(UsageError, match=r"gradients of no backward of this model.*loss\.backward\(\)"):
        optimizer.step()


def test_gradients_of_autograd_grad_are_refused_where_backward_averages() -> None:
    run_threads(by_hand, 2, model_of())


def window(rank: int, size: int, plain: nn.Module) -> None:
    model = DistributedDataParallel(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for is_whole in (True, False):
        for micro in range(2 if is_whole else 1):
            with accumulate(model, 2) as is_last:
                model(rows(micro)).mean().backward()
            assert is_last == (micro == 1)
            other.step()
        if is_whole:
            optimizer.step()
    with pytest.raises(UsageError, match=r"optimizer\.step\(\) came after micro-batch 1 of 2"):
        optimizer.step()


def test_a_step_inside_of_a_window_is_refused_for_the_class_too() -> None:
    run_threads(window, 2, model_of())


@pytest.mark.parametrize("given", [(0,), (1,), (0, 1), ()], ids=str)
@pytest.mark.parametrize("num_parameters", [1, 2])
def test_each_gradient_and_each_optimizer_counts(num_parameters: int, given: tuple[int, ...]) -> None:
    named = [(f"p{i}", nn.Parameter(torch.ones(2))) for i in range(num_parameters)]
    other = nn.Parameter(torch.ones(2))  # of no model that is averaged; an optimizer may have it first
    optimizers = [torch.optim.SGD([other, *(p for _, p in named)], lr=0.1) for _ in range(2)]
    watch = ScriptHooks(named, lambda: True, 0, num_passes=lambda: 0)
    watch.look()
    for i in given:
        if i < num_parameters:
            named[i][1].grad = torch.ones(2)
    is_refused = any(p.grad is not None for _, p in named)
    for optimizer in optimizers:  # a step of one tells nothing of another's
        with pytest.raises(UsageError, match="gradients of no backward") if is_refused else contextlib.nullcontext():
            optimizer.step()
    for optimizer in optimizers:
        optimizer.step()  # no forward has come since
    watch.look()
    for _, parameter in named:
        parameter.grad = torch.zeros(2)  # as zero_grad(set_to_none=False) leaves it
    optimizers[0].step()


def overflows(rank: int, size: int, strategy: str, plain: nn.Module) -> None:
    model: Any = copy.deepcopy(plain)
    model, optimizer = STRATEGIES[strategy](model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[bool] = []
    weight, bias = (p for name, p in model.named_parameters() if ".2." in f".{name}")
    looking = weight.register_hook(lambda g: seen.append(bool(g.isfinite().all())))
    halving = weight.register_hook(lambda g: g * 0.5)
    masking = bias.register_hook(lambda g: g.masked_fill(torch.tensor([True, False, True]), 0))
    for factor in (float("inf"), 1.0, 1.0):  # as a scale of the loss that is too large at first
        (model(rows(rank)).sum() * factor).backward()
        optimizer.zero_grad()
    assert seen == [False, True, True]
    looking.remove()
    halving.remove()
    masking.remove()
    for makes_numbers in (lambda g: g.clamp(-1e-3, 1e-3), lambda g: g.nan_to_num(0.0, 0.0, 0.0)):
        hook = bias.register_hook(makes_numbers)
        with pytest.raises(UsageError, match=r"a hook changes the gradient of 2\.bias"):
            (model(rows(rank)).sum() * float("inf")).backward()
        hook.remove()


@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
def test_hooks_are_not_judged_by_a_gradient_that_has_overflowed(strategy: str) -> None:
    run_threads(overflows, 2, strategy, model_of())
