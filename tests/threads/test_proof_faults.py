"""Faults planted in the divided run alone: the proof finds each before the first step, and says what it is."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from guozhuang.errors import UsageError
from guozhuang.parallel.proof import reference
from guozhuang.strategies import get
from guozhuang.strategies.divided import prepare_divided
from guozhuang.strategies.ways import Setup
from guozhuang.world.layout import Layout
from tests.threads.ranks import run_threads


class Block(nn.Module):
    """A block with a buffer that it counts in, and a fault that only the ranks have."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.fault = nn.Linear(12, 24), nn.Linear(24, 12), None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(x)))
        return x if self.fault is None or reference.here is not None else self.fault(self, x)


class Fault(NamedTuple):
    """What is wrong, and what the refusal says: in a forward, in the gradient of a parameter, or in what the script does."""

    said: str
    forward: Callable[[Any, Any], Any] | None = None
    gradient: Callable[[Any], Any] | None = None
    script: Callable[[Any], Any] | None = None
    where: str = "blocks.1"


def changed(block, x):
    block.seen += 1
    return x


def counts(block, x):
    block.calls = getattr(block, "calls", 0) + 1
    return x


def draws(draw):
    def fault(block, x):
        draw()
        return x

    return fault


def other_rows(block, x):
    return x.roll(1, 0)


OUTPUT, GRADIENT = "the model's output is not that of one process", "the gradient of '.*' is not that of one process"
OTHERS = "other random numbers than one process"
FAULTS = {
    "scaled by 1.001": Fault(OUTPUT, lambda block, x: x * 1.001),
    "something added": Fault(OUTPUT, lambda block, x: x + 1e-4),
    "a feature lost": Fault(OUTPUT, lambda block, x: torch.cat([x[:, :-1], x[:, -1:] * 0], 1)),
    "a row lost": Fault(OUTPUT, lambda block, x: torch.cat([x[:-1], x[-1:] * 0])),
    "rows exchanged": Fault(OUTPUT, other_rows),
    "features exchanged": Fault(OUTPUT, lambda block, x: x.flip(1)),
    "the sign turned": Fault(OUTPUT, lambda block, x: -x),
    "less precision": Fault(OUTPUT, lambda block, x: x.bfloat16().to(x.dtype)),
    "NaN": Fault("it is not finite where one process has a number", lambda block, x: x + torch.nan),
    "noise": Fault(OUTPUT, lambda block, x: x + 1e-3 * torch.sin(1e3 * x.detach())),
    "the first block": Fault(
        "first part whose output differs is 'blocks.0'", lambda block, x: x * 1.01, where="blocks.0"
    ),
    "the last block": Fault(
        "first part whose output differs is 'blocks.3'", lambda block, x: x * 1.01, where="blocks.3"
    ),
    "the graph cut": Fault(
        "there is none, and in one process there is one|" + GRADIENT, lambda block, x: x.detach() + 0 * x
    ),
    "a buffer changed": Fault("the buffer 'blocks.1.seen'|attribute", changed),
    "an attribute changed": Fault("another attribute 'blocks.1.calls'", counts),
    "a draw too many": Fault(OTHERS + ": torch", draws(lambda: torch.rand(3))),
    "a draw of Python's": Fault(OTHERS + ": Python's random", draws(random.random)),
    "a gradient dropped": Fault(GRADIENT, gradient=lambda g: g * 0),
    "a gradient halved": Fault("it is 0.5 times that of one process", gradient=lambda g: g / 2),
    "a gradient doubled": Fault("it is 2 times that of one process", gradient=lambda g: 2 * g),
    "a gradient turned": Fault("it is -1 times that of one process", gradient=lambda g: -g),
    "a gradient exchanged": Fault(GRADIENT, gradient=lambda g: g.flip(0)),
    "a gradient of one row": Fault(GRADIENT, gradient=lambda g: torch.cat([g[:1], g[1:] * 0])),
    "a gradient with noise": Fault(GRADIENT, gradient=lambda g: g * (1 + 1e-2 * torch.sin(1e3 * g))),
    "a gradient that is not finite": Fault("it is not finite", gradient=lambda g: g / 0),
    "a gradient rounded": Fault(GRADIENT, gradient=lambda g: g.bfloat16().to(g.dtype)),
    "a gradient clipped": Fault(GRADIENT, gradient=lambda g: g.clamp(-1e-3, 1e-3)),
    "gradients scaled before the step": Fault(
        "changed some before the step|was changed after the last backward|" + GRADIENT,
        script=lambda p: None if p.grad is None else p.grad.mul_(0.5),
    ),
    "weights changed before the step": Fault(
        "changed some before the step|made '.*' another", script=lambda p: p.data.mul_(1.01)
    ),
    "another loss": Fault("the script's loss is not that of one process"),
}
QUICK = (
    "scaled by 1.001",
    "a buffer changed",
    "a draw too many",
    "a gradient halved",
    "weights changed before the step",
)


def step(model, optimizer, fault):
    """Train one step; return the text of a refusal."""
    try:
        loss = model(torch.linspace(-1, 1, 96, dtype=torch.float64).view(8, 12)).pow(2).mean()
        if fault == FAULTS["another loss"] and reference.here is None:
            loss = loss * 1.01
        loss.backward()
        if fault.script is not None and reference.here is None:
            with torch.no_grad():
                for parameter in model.parameters():
                    fault.script(parameter)
        optimizer.step()
    except UsageError as error:
        return str(error)
    return ""


def test_what_is_done_between_a_batch_and_the_step_is_compared():
    """As after a forward and a backward of the script's own: here ``model.step`` has run both."""
    torch.manual_seed(0)
    one = nn.Sequential(*[Block() for _ in range(4)]).double()
    models = [copy.deepcopy(one) for _ in range(2)]

    def rank_of(rank, size):
        setup = Setup(SimpleNamespace(layout=Layout(pp=2)), wishes={"num_microbatches": 2, "loss": nn.MSELoss()})
        optimizer = torch.optim.SGD(models[rank].parameters(), 0.1)
        model, optimizer = prepare_divided(models[rank], optimizer, setup, get("hybrid"))
        x = torch.linspace(-1, 1, 96, dtype=torch.float64).view(8, 12)
        try:
            model.step(x, -x)
            for parameter in model.parameters():
                if parameter.grad is not None and reference.here is None:
                    parameter.grad.mul_(0.5)
            optimizer.step()
        except UsageError as error:
            return str(error)

    for found in run_threads(rank_of, 2):
        assert found is not None and "changed some before the step" in found


PLACES = {
    "pp=2": ("hybrid", Layout(pp=2)),
    "tp=2": ("hybrid", Layout(tp=2)),
    "sharded pp=2,dp=2": ("sharded", Layout(pp=2, dp=2)),
    "sharded tp=2,dp=2": ("sharded", Layout(tp=2, dp=2)),
}


def is_quick(name, place):
    return name == "a gradient halved" or (name in QUICK and not place.startswith("sharded"))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=() if is_quick(name, place) else pytest.mark.slow)
        for name in FAULTS
        for place in PLACES
    ],
)
def test_a_planted_fault_is_found(name, place):
    fault, (strategy, layout) = FAULTS[name], PLACES[place]
    torch.manual_seed(0)
    one = nn.Sequential()
    one.blocks = nn.Sequential(*[Block() for _ in range(4)])
    models = [copy.deepcopy(one).double() for _ in range(layout.size)]

    def rank_of(rank, size):
        model = models[rank]
        block = model.get_submodule(fault.where)
        block.fault = fault.forward
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if fault.gradient is not None:
            gradient = fault.gradient
            block.down.bias.register_hook(lambda g: g if reference.here is not None else gradient(g))
        wishes = {"num_microbatches": 2} if layout.pp > 1 else {}
        setup = Setup(SimpleNamespace(layout=layout), wishes=wishes)
        return step(*prepare_divided(model, optimizer, setup, get(strategy)), fault)

    # Under sharded a hook that is neither a mask nor a scale is refused as such.
    said = fault.said if strategy == "hybrid" or fault.gradient is None else f"{fault.said}|a hook changes the gradient"
    for found in run_threads(rank_of, layout.size):
        assert re.search(said, found), found
