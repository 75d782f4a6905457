"""The script of a program, as one process runs it, and what it finds; outcomes.py runs it on ranks and compares."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree

import guozhuang as gz
from tests.threads.grammar import Program
from tests.threads.grown import ROWS, TARGETS, TOKENS, WIDTH, Grown, halved, loss_of, y_of
from tests.threads.ranks import GENERATOR

MICRO = 2


@dataclass
class Found:
    """What a process has found: losses of its own rows, what is the same on all, weights after each step, and how it ended."""

    losses: list[Tensor] = field(default_factory=list)
    alike: dict[str, Any] = field(default_factory=dict)
    trail: list[dict[str, Tensor]] = field(default_factory=list)
    error: str = ""
    is_refusal: bool = False
    has_ended: bool = False


class Alone:
    """One process with whole batches; what ranks do otherwise, they override.

    Args:
        program: what is run.
        seed: of torch's generator when the training begins; None: it is left alone, as ranks must that are threads.
    """

    def __init__(self, program: Program, seed: int | None = None) -> None:
        self.program, self.place, self.copies, self.seed = program, 0, 1, seed

    def mine(self, x: Tensor) -> Tensor:
        return x[self.place :: self.copies]

    def prepare(self, model: Any, optimizers: list[Any]) -> tuple[Any, list[Any]]:
        return model, optimizers

    def whole(self, tensor: Any) -> Tensor:
        return tensor.detach().clone()  # type: ignore[no-any-return]

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """What is compared where a later step was refused."""
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def rows(program: Program, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    shape = (ROWS, TOKENS) if program.has_tokens else (ROWS,)
    x = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(*shape, TARGETS, generator=generator, dtype=torch.float64)


def made(program: Program) -> nn.Module:
    with GENERATOR:
        torch.manual_seed(program.number)
        return Grown(program).double()


# ---- the script


def optimizers_of(program: Program, model: nn.Module) -> list[Any]:
    how, named = program.habits["optimizers"], list(model.named_parameters())
    all_, head = [p for _, p in named], [p for n, p in named if n.startswith("head")]
    if how in ("two", "two in turns"):
        return [stepper(program, all_[::2]), torch.optim.SGD(all_[1::2], lr=0.05, momentum=0.9)]
    if how == "two groups":
        rest = [p for n, p in named if not n.startswith("head")]
        return [stepper(program, [{"params": rest}, {"params": head, "lr": 0.01, "weight_decay": 0.1}])]
    if how == "a group added later":
        return [stepper(program, [p for n, p in named if not n.startswith("head")])]
    return [stepper(program, all_)]


def stepper(program: Program, parameters: Any) -> torch.optim.Optimizer:
    """An optimizer; what is divided by is never as small as rounding."""
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3),
        "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3, amsgrad=True, weight_decay=0.01),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, momentum=0.5, centered=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3),
        "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
        "lamb": lambda p: gz.optim.LAMB(p, lr=0.01, eps=1e-3),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    }
    return kinds[program.stepper](parameters)


def read(norm: Tensor) -> Tensor:
    """A number that a script may log."""
    return torch.tensor(float(norm), dtype=torch.float64)


class Script:
    """A training script with the habits of a program.

    Args:
        program: says which.
        models: models to begin with, equal ones; a script that goes on from a state takes the second one.
        bench: how it is run.
        found: is filled.
    """

    def __init__(self, program: Program, models: list[nn.Module], bench: Alone, found: Found) -> None:
        self.program, self.models, self.bench, self.found = program, list(models), bench, found
        self.does = program.habits
        self.begin()

    def begin(self, state: Any = None, of_optimizers: Any = ()) -> None:
        plain = self.models.pop(0)
        if state is not None:
            plain.load_state_dict(state)
        if self.does["freezes"] == "parts before prepare":
            plain.parts[0].requires_grad_(False)  # type: ignore[union-attr, index]
        if self.program.hooks == "of a parameter":
            plain.head.weight.register_hook(halved)  # type: ignore[union-attr]
        optimizers = optimizers_of(self.program, plain)
        for optimizer, saved in zip(optimizers, of_optimizers, strict=False):
            optimizer.load_state_dict(saved)
        self.model, self.optimizers = self.bench.prepare(plain, optimizers)
        self.module: Any = gz.unwrap(self.model)
        self.schedulers = []
        if self.does["changes"] == "the rate by a scheduler":
            self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in self.optimizers]

    def run(self) -> None:
        if self.bench.seed is not None:
            torch.manual_seed(self.bench.seed)
        average, kept = self.average(), None
        for step in range(self.program.num_steps):
            self.before(step)
            if self.does["skips"] == "a batch" and step == 1:
                continue
            if self.does["optimizers"] == "a closure":
                self.optimizers[0].step(lambda step=step: self.closure(step))
            elif self.gradients(step):
                self.clip(step)
                self.step(step)
            self.zero()
            self.found.trail.append(self.bench.weights(self.model))
            self.after(step)
            if average is not None:
                self.update(average)
            if self.does["saves"] == "and goes on" and step == 1:
                states = [self.wholes(each.state_dict()) for each in self.optimizers]
                self.begin(self.state(), states)
            elif self.does["saves"] == "and goes back" and step == 0:
                kept = copy.deepcopy(self.model.state_dict())
            elif self.does["saves"] == "and goes back" and step == 1:
                self.model.load_state_dict(kept)
        self.evaluate("the end", self.model)
        if average is not None:
            self.evaluate("the average", average)
        self.save("at the end")

    # ---- gradients

    def before(self, step: int) -> None:
        if self.does["freezes"] == "parts in turns":
            for name, p in self.model.named_parameters():
                if "parts.0." in name:
                    p.requires_grad_(step in (1, 2))
        if self.does["freezes"] == "the head from the second step" and step == 1:
            self.module.head.requires_grad_(False)
        if self.does["optimizers"] == "a group added later" and step == 1:
            self.optimizers[0].add_param_group({"params": list(self.module.head.parameters()), "lr": 0.02})

    def closure(self, step: int) -> Tensor:
        self.zero()
        loss = self.backward(step)
        if self.program.strategy == "the class" and self.bench.copies > 1:  # as PyTorch's, it does not average losses
            return gz.reduce(loss)  # type: ignore[no-any-return]
        return loss

    def gradients(self, step: int) -> bool:
        """Compute the gradients of a step; False if the script thinks better of it."""
        if self.does["skips"] == "a backward" and step == 1:
            x, target = map(self.bench.mine, rows(self.program, step))
            self.found.losses.append(loss_of(self.model, self.module, x, target).detach())
            return False
        how = self.does["accumulates"]
        if how == "in gz.accumulate":
            for micro in gz.accumulate(self.model, MICRO):
                self.backward(step, micro, MICRO)
        elif how == "in windows of gz.accumulate":
            for micro in range(MICRO):
                with gz.accumulate(self.model, MICRO):
                    self.backward(step, micro, MICRO)
        elif how != "none":
            for micro in range(MICRO):
                is_held = how == "in no_sync" and micro + 1 < MICRO and hasattr(self.model, "no_sync")
                with self.model.no_sync() if is_held else contextlib.nullcontext():
                    self.backward(step, micro, MICRO)
        else:
            self.backward(step)
        return True

    def backward(self, step: int, micro: int = 0, num: int = 1) -> Tensor:
        x, target = map(self.bench.mine, rows(self.program, step, micro))
        kind = self.does["loss"]
        if kind == "with a slope":
            x.requires_grad_()
            y = y_of(self.model(x))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = (y - target).pow(2).mean() + 0.1 * slope.pow(2).mean()
        elif kind == "by functional_call":
            named = dict(self.model.named_parameters())
            y = y_of(torch.func.functional_call(self.model, named, (x,)))
            loss = (y - target).pow(2).mean()
        else:
            loss = loss_of(self.model, self.module, x, target)
        if kind == "of two forwards":
            loss = loss + loss_of(self.model, self.module, -x, target)
        if kind == "with a penalty on weights":
            squares: list[Any] = [p.pow(2).sum() for p in self.model.parameters()]
            loss = loss + 0.01 * sum(each.full_tensor() if hasattr(each, "full_tensor") else each for each in squares)
        if kind == "in two backwards":
            (loss / num).backward(retain_graph=True)
        (loss / num).backward()
        self.found.losses.append(loss.detach())
        if self.does["evaluates"] == "inside of a window" and micro == 0:
            self.evaluate(f"step {step}, inside", self.model)
        return loss

    def clip(self, step: int) -> None:
        how, parameters = self.does["clips"], [p for p in self.model.parameters() if p.requires_grad]
        norms = self.found.alike.setdefault("norms", [])
        if how == "by gz.clip_grad_norm_":
            norms.append(read(gz.clip_grad_norm_(parameters, 0.05)))
        elif how == "by clip_grad_norm_":
            found: Any = nn.utils.clip_grad_norm_(parameters, 0.05)
            norms.append(read(found.full_tensor() if hasattr(found, "full_tensor") else found))
        elif how == "by clip_grad_value_":
            nn.utils.clip_grad_value_(parameters, 0.002)
        elif how == "groups":
            half = len(parameters) // 2
            norms += [read(gz.clip_grad_norm_(some, 0.03)) for some in (parameters[:half], parameters[half:])]
        elif how == "by hand":
            for p in parameters:
                if p.grad is not None:
                    p.grad.clamp_(-0.003, 0.003)
        elif how == "averaged gradients by hand":
            with gz.averaged_gradients(self.model):
                for p in parameters:
                    if p.grad is not None:
                        p.grad.mul_(0.7).clamp_(-0.003, 0.003)
        if self.does["skips"] == "gradients after clipping" and step == 1:
            self.model.zero_grad()

    # ---- steps, and what is done after them

    def step(self, step: int) -> None:
        if self.does["skips"] == "a step" and step == 1:
            return
        in_turns = self.does["optimizers"] == "two in turns"
        for each in self.optimizers[step % 2 :: 2] if in_turns else self.optimizers:
            each.step()

    def zero(self) -> None:
        if self.does["optimizers"] == "a group added later":
            self.model.zero_grad()
        for each in self.optimizers:
            each.zero_grad(set_to_none=self.does["changes"] != "zeroed gradients kept")

    def after(self, step: int) -> None:
        for each in self.schedulers:
            each.step()
        if self.does["changes"] == "the rate" and step == 1:
            for group in self.optimizers[0].param_groups:
                group["lr"] *= 0.5
        elif self.does["changes"] == "weights after the step":
            with torch.no_grad():
                for p in self.model.parameters():
                    p.clamp_(-0.4, 0.4)
        if self.does["evaluates"] in ("after steps", "in inference_mode"):
            self.evaluate(f"step {step}", self.model)
        elif self.does["evaluates"] == "without eval()":
            with torch.no_grad():
                x, target = map(self.bench.mine, rows(self.program, 70 + step))
                self.found.losses.append(loss_of(self.model, self.module, x, target))
        if self.does["saves"] in ("the model", "the optimizer too"):
            self.save(f"step {step}")

    def evaluate(self, when: str, model: Any) -> None:
        model.eval()
        with torch.inference_mode() if self.does["evaluates"] == "in inference_mode" else torch.no_grad():
            self.found.alike[f"outputs, {when}"] = y_of(model(rows(self.program, 99)[0])).clone()
        model.train()

    def average(self) -> Any:
        if self.does["averages"] == "a copy":
            return copy.deepcopy(self.model)
        if self.does["averages"] == "AveragedModel":
            return AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.6))
        return None

    @torch.no_grad()
    def update(self, average: Any) -> None:
        if isinstance(average, AveragedModel):
            average.update_parameters(self.model)
            return
        for a, b in zip(average.parameters(), self.model.parameters(), strict=True):
            a.lerp_(b, 0.3)

    def wholes(self, state: Any) -> Any:
        return _pytree.tree_map_only(Tensor, self.bench.whole, state)

    def state(self) -> dict[str, Tensor]:
        """The whole weights and buffers, under the names of the script's own module."""
        return {name.removeprefix("module."): value for name, value in self.wholes(self.model.state_dict()).items()}

    def save(self, when: str) -> None:
        self.found.alike[f"state, {when}"] = self.state()
        if self.does["saves"] == "the optimizer too":
            states = [self.wholes(each.state_dict())["state"] for each in self.optimizers]
            self.found.alike[f"optimizers, {when}"] = states
