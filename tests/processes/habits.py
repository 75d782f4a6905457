"""Habits of training scripts, each a small program that one process runs on whole batches and ranks on their rows of them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import guozhuang as gz

Mine = Callable[[Tensor], Tensor]
Program = Callable[[Any, Any, Mine], object]


@dataclass(frozen=True)
class Habit:
    """A program.

    Attributes:
        make: returns the model.
        train: trains it; what it returns is compared too.
        optimizer: makes the optimizer.
        before: does something to the model before ``prepare``.
    """

    make: Callable[[], nn.Module]
    train: Program
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)
    before: Callable[[nn.Module], object] = lambda m: None


def rows(step: int, num: int = 8) -> Tensor:
    return torch.randn(num, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Net(nn.Module):
    """Layers around two blocks, each wrapped by a function."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda m: m, scale: Tensor | None = None) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(wrap(nn.Linear(4, 4)), nn.Softplus()) for _ in range(2))
        if scale is not None:
            self.scale = nn.Parameter(scale.double())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * (self.scale.sum() + 1 if hasattr(self, "scale") else 1)


def plainly(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(3):
        model(mine(rows(step))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def changing(change: Callable[[Any, list[Any]], object]) -> Program:
    """Training in which something happens to gradients between backward and step."""

    def train(model: Any, optimizer: Any, mine: Mine) -> None:
        for step in range(3):
            model(mine(rows(step))).pow(2).mean().backward()
            change(model, list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()

    return train


def by_sign(model: Any, parameters: list[Any]) -> None:
    for p in parameters:
        p.grad.sign_()


def by_sign_of_averages(model: Any, parameters: list[Any]) -> None:
    with gz.averaged_gradients(model):
        by_sign(model, parameters)


def by_penalty(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(4):
        x = mine(rows(step)).clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        ((slope.norm(dim=1) - 1).pow(2).mean() + (y.mean() if step % 2 else 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_norm_in_loss(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(3):
        squares = [p.pow(2).sum() for p in model.parameters()]
        penalty = sum(each.full_tensor() if hasattr(each, "full_tensor") else each for each in squares)
        (model(mine(rows(step))).pow(2).mean() + 0.1 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_windows(keeps: bool) -> Program:
    """Windows of four micro-batches, of which the last has two; or whose step comes too early."""

    def train(model: Any, optimizer: Any, mine: Mine) -> None:
        for micro in range(6):
            size = min(4, 6 - micro // 4 * 4) if keeps else 4
            with gz.accumulate(model, size) as is_last:
                (model(mine(rows(micro))).pow(2).mean() / size).backward()
            if is_last or micro == 5:
                optimizer.step()
                optimizer.zero_grad()

    return train


def by_empty_batch(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(3):
        x = mine(rows(step, 4))
        if len(x) < 4:  # of several ranks; the first has all samples
            x = rows(step, 4)[: 4 if gz.rank_zero() else 0]
            (model(x).pow(2).sum() / 2).backward()
        else:
            (model(x).pow(2).sum() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_closure(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(2):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(mine(rows(step))).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


class Climber(torch.optim.SGD):
    """An optimizer of the script's own: sharpness-aware, with a norm over all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / norm) for p in parameters]
        for p, move in zip(parameters, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(parameters, moves, strict=True):
            p.sub_(move)
        super().step()


def by_climbing(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(3):

        def closure(step: int = step) -> None:
            optimizer.zero_grad()
            model(mine(rows(step))).pow(2).mean().backward()

        closure()
        optimizer.step(closure)


def by_averages(start: Callable[[Any], Any], update: Callable[[Any, Any], object]) -> Program:
    def train(model: Any, optimizer: Any, mine: Mine) -> Tensor:
        average = start(model)
        for step in range(3):
            model(mine(rows(step))).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                update(average, model)
                found = average(rows(9))
        return found

    return train


def lerp(average: Any, model: Any) -> None:
    for a, b in zip(average.parameters(), model.parameters(), strict=True):
        a.lerp_(b, 0.1)


class Own:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class OwnNet(Net):
    """Returns an object of its own, and keeps a loss in an attribute of a block."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        vars(self.blocks[0])["kept"] = y.pow(4).mean()
        return Own(y.pow(2).mean())


def by_own_outputs(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(3):
        found = model(mine(rows(step)))
        (found.loss + vars(gz.unwrap(model).blocks[0])["kept"]).backward()
        optimizer.step()
        optimizer.zero_grad()


def hooks(hook: Callable[[Tensor], Any]) -> Callable[[nn.Module], None]:
    def before(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_hook(hook)

    return before


def step_in_hooks(model: nn.Module) -> None:
    for p in model.parameters():
        own = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda p, own=own: own.step())


class Experts(Net):
    """Blocks of which each sample takes one; all are called, or the chosen ones alone."""

    def __init__(self, calls_all: bool) -> None:
        super().__init__()
        self.calls_all = calls_all

    def forward(self, x: Tensor) -> Tensor:
        y, chosen = torch.zeros_like(x), (x[:, 3] > 0).long()
        for i, block in enumerate(self.blocks):
            places = (chosen == i).nonzero().squeeze(1)
            if self.calls_all or len(places):
                y = y.index_put((places,), block(self.inp(x[places])))
        return self.out(y)


def by_expert(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(3):
        x = rows(step)
        x[:, 3] = torch.tensor([1.0, -1.0] * 4)  # ranks have the even and the odd rows
        model(mine(x)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_function(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(3):
        named = dict(model.named_parameters())
        torch.func.functional_call(model, named, (mine(rows(step)),)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_own_gradients(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(3):
        parameters = list(model.parameters())
        loss = model(mine(rows(step))).pow(2).mean()
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


class LimitedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.table((x[:, 0].abs() * 4).long().clamp(max=8)) * x)
        return found


def by_replacing(model: Any, optimizer: Any, mine: Mine) -> None:
    plainly(model, optimizer, mine)
    gz.unwrap(model).out = nn.Linear(4, 4).double()
    plainly(model, optimizer, mine)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4)


def channels_last() -> nn.Module:
    parts = [nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 6, 2), nn.ReLU(), nn.Conv2d(6, 3, 1), nn.Flatten()]
    return nn.Sequential(*parts).to(memory_format=torch.channels_last)


def frozen_in_turns(model: Any, optimizer: Any, mine: Mine) -> None:
    for step in range(4):
        for name, p in model.named_parameters():
            if "blocks.1" in name:
                p.requires_grad_(step in (1, 2))
        with contextlib.suppress(StopIteration):
            model(mine(rows(step))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


HABITS: dict[str, Habit] = {
    "a parameter of shape `(1,)`": Habit(lambda: Net(scale=torch.ones(1)), plainly),
    "a parameter of shape `()`": Habit(lambda: Net(scale=torch.ones(())), plainly),
    "a parameter without elements": Habit(lambda: Net(scale=torch.ones(0)), plainly),
    "complex parameters": Habit(Spectral, plainly),
    "channels_last": Habit(channels_last, plainly),
    "weight_norm": Habit(lambda: Net(parametrizations.weight_norm), plainly),
    "spectral_norm": Habit(lambda: Net(parametrizations.spectral_norm), plainly),
    "orthogonal": Habit(lambda: Net(parametrizations.orthogonal), plainly),
    "layers frozen and thawed": Habit(Net, frozen_in_turns),
    "a layer replaced after `prepare`": Habit(Net, by_replacing),
    "a branch or expert for each sample, all called": Habit(lambda: Experts(True), by_expert),
    "the same, only the chosen called": Habit(lambda: Experts(False), by_expert),
    "a rank without samples": Habit(Net, by_empty_batch, sgd),
    "outputs of an own class, losses in attributes": Habit(OwnNet, by_own_outputs),
    "`functional_call` with the model's parameters": Habit(Net, by_function),
    "a penalty on the weights in the loss": Habit(Net, by_norm_in_loss),
    "a gradient penalty (`create_graph=True`)": Habit(Net, by_penalty),
    "`torch.autograd.grad` for the parameters": Habit(Net, by_own_gradients),
    "an embedding with `max_norm`": Habit(LimitedRows, plainly),
    "`gz.accumulate`, the last window shorter": Habit(Net, by_windows(True)),
    "a step inside of a window": Habit(Net, by_windows(False)),
    "`torch.nn.utils.clip_grad_norm_`": Habit(Net, changing(lambda m, ps: nn.utils.clip_grad_norm_(ps, 0.05))),
    "`torch.nn.utils.clip_grad_value_`": Habit(Net, changing(lambda m, ps: nn.utils.clip_grad_value_(ps, 0.002))),
    "gradients changed by hand": Habit(Net, changing(by_sign), sgd),
    "the same inside `gz.averaged_gradients`": Habit(Net, changing(by_sign_of_averages), sgd),
    "hooks that scale or mask a gradient": Habit(Net, plainly, sgd, hooks(lambda g: g * 0.5)),
    "hooks that limit a gradient": Habit(Net, plainly, sgd, hooks(lambda g: g.clamp(-1e-3, 1e-3))),
    "an optimizer stepped in hooks": Habit(Net, plainly, sgd, step_in_hooks),
    "LBFGS": Habit(Net, by_closure, lambda m: torch.optim.LBFGS(m.parameters(), max_iter=4)),
    "LBFGS with `strong_wolfe`": Habit(
        Net, by_closure, lambda m: torch.optim.LBFGS(m.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    ),
    "an own optimizer with a norm of all gradients": Habit(Net, by_climbing, lambda m: Climber(m.parameters(), lr=0.1)),
    "an average of weights by `copy.deepcopy`": Habit(Net, by_averages(copy.deepcopy, lerp)),
    "`AveragedModel`": Habit(
        Net,
        by_averages(
            lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)), lambda a, m: a.update_parameters(m)
        ),
    ),
}
