"""Random numbers in the forward of a divided model: those of one process, or refused before the first step.

In processes, because ranks that are threads have one generator for all.
"""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import guozhuang as gz
from guozhuang.errors import UsageError
from tests.ranks import run_ranks

STEPS = 3


class Block(nn.Module):
    """A block that draws what its kind says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.up(x)))
        if self.kind == "F.dropout":
            hidden = F.dropout(hidden, 0.2, self.training)
        elif self.kind == "randn_like":
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        elif self.kind == "random":
            hidden = hidden * (1 + random.random())
        elif self.kind == "numpy":
            hidden = hidden * (1 + numpy.random.rand())
        return x + hidden


class Skipped(Block):
    """A block that some samples skip, chosen by a draw that has no tensor; its method calls the module by another name."""

    def forward(this, x: Tensor) -> Tensor:
        keep = (torch.rand(len(x), 1) > 0.3).to(x)
        return x + keep * (super().forward(x) - x)


class Net(nn.Module):
    """Blocks in a row, and noise between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        block = Skipped if kind == "rand" else Block
        self.kind, self.blocks = kind, nn.ModuleList([block(kind) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.kind == "noise between":
                x = x + 0.1 * torch.randn_like(x)
        return x


EQUAL = ""
# The kind, and what a refusal says under a pipeline and under tensor parallelism.
ROWS = {
    "F.dropout": (EQUAL, EQUAL),
    "randn_like": (EQUAL, EQUAL),
    "rand": (EQUAL, "nothing in Net was found that 2 ranks of the axis tp can divide"),
    "noise between": ("draws other random numbers than one process: torch|the model's output is not that", EQUAL),
    "random": ("draws other random numbers than one process: Python's random", EQUAL),
    "numpy": ("draws other random numbers than one process: numpy.random", EQUAL),
}
OPTIONS: dict[str, dict[str, Any]] = {"pp=2": {"microbatches": 4}, "tp=2": {}}


def trained(kind: str, layout: str | None) -> list[Any]:
    """Train some steps; return the losses, what the script itself draws after each, and the weights."""
    torch.manual_seed(3)
    model: Any = Net(kind).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    random.seed(5)
    numpy.random.seed(5)
    if layout is not None:
        model, optimizer = gz.prepare(model, optimizer, strategy="hybrid", layout=layout, **OPTIONS[layout])
    torch.manual_seed(7)
    data, found = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        loss = model(torch.randn(8, 12, generator=data, dtype=torch.float64)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [float(loss.detach()), float(torch.rand(())), random.random(), numpy.random.rand()]
    return [*found, {name: value.clone() for name, value in model.state_dict().items()}]


def of_rank(rank: int, size: int) -> dict[str, Any]:
    gz.init()
    answers: dict[str, Any] = {}
    for kind in ROWS:
        for layout in OPTIONS:
            try:
                answers[f"{kind} {layout}"] = trained(kind, layout)
            except UsageError as error:
                answers[f"{kind} {layout}"] = str(error)
    gz.shutdown()
    return answers


@functools.cache
def of_ranks() -> list[dict[str, Any]]:
    return run_ranks(of_rank, 2, init=False)


@pytest.mark.parametrize("layout", OPTIONS)
@pytest.mark.parametrize("kind", ROWS)
def test_draws_are_those_of_one_process_or_refused(kind: str, layout: str) -> None:
    expected = dict(zip(OPTIONS, ROWS[kind], strict=True))[layout]
    for answers in of_ranks():
        found = answers[f"{kind} {layout}"]
        if expected == EQUAL:
            assert not isinstance(found, str), found
            torch.testing.assert_close(found, trained(kind, None), rtol=1e-10, atol=1e-12)
        else:
            assert isinstance(found, str) and re.search(expected, found), found
