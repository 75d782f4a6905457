"""Strategies between the copies of a divided model do what they do for whole models; states go from layout to layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import guozhuang as gz
from guozhuang.strategies.divided import prepare_divided
from guozhuang.strategies.table import get
from guozhuang.strategies.ways import Setup
from guozhuang.world import World
from guozhuang.world.layout import Layout
from tests.threads.ranks import GENERATOR, run_threads

STEPS, MICRO, ROWS, WORDS, WIDTH = 3, 2, 8, 12, 8
PLAN = {"blocks.*.up": "columns", "blocks.*.down": "rows"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down(torch.tanh(self.up(rows)))


class Tagger(nn.Module):
    """The first and the last stage hold one matrix, the second of four stages trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head.weight = self.words.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.words(words)
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


def made() -> Tagger:
    with GENERATOR:
        torch.manual_seed(4)
        return Tagger().double()


def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
    """The rows of all copies of the model together."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    return tuple(torch.randint(WORDS, (ROWS, 3), generator=generator) for _ in range(2))  # type: ignore[return-value]


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def norm_of_step(model: Any, step: int, place: int = 0, copies: int = 1, has_schedule: bool = False) -> float:
    """Compute the gradients of several micro-batches, clip them, and return their norm."""
    for micro in range(MICRO):
        words, labels = (each.chunk(copies)[place] for each in batch(step, micro))
        if has_schedule:
            model.step(words, labels)
        else:
            mean(model(words), labels).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= MICRO
    return float(gz.clip_grad_norm_(model.parameters(), 0.2))


def prepared(
    rank: int, model: nn.Module, optimizer: Any, strategy: str, layout: Layout, **wishes: Any
) -> tuple[Any, Any]:
    world = World(rank, layout.size, rank, layout.size, 0, 1, torch.device("cpu"), "threads", layout)
    wishes = {"plan": PLAN if layout.tp > 1 else None, **wishes}
    if layout.pp > 1:
        wishes["cut"] = ["blocks.2"] if layout.pp == 2 else ["blocks.1", "blocks.2", "blocks.3"]
    found = prepare_divided(model, optimizer, Setup(world, wishes=wishes), get(strategy))
    return found[0], found[1]


def equal(found: Any, wanted: Any, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-9)


ADAMW: Callable[[Any], Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True)  # noqa: E731
LAMB: Callable[[Any], Optimizer] = lambda p: gz.optim.LAMB(p, lr=0.02)  # noqa: E731
SGD: Callable[[Any], Optimizer] = lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9)  # noqa: E731

SHARDED = (
    ("pp=4,dp=2", ADAMW, None),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("pp=2,dp=2", ADAMW, "1f1b"),
            ("pp=2,dp=2", SGD, "zero-bubble"),
            ("pp=2,dp=2,tp=2", SGD, None),
            ("pp=2,dp=2", LAMB, None),
        )
    ),
)


@pytest.mark.parametrize(("sizes", "make", "schedule"), SHARDED)
def test_sharded_inside_a_pipeline_is_one_process(
    sizes: str, make: Callable[[Any], Optimizer], schedule: str | None
) -> None:
    """With a state from before ``prepare`` or from before the first forward, and one that goes on in other layouts."""
    layout = Layout.parse(sizes, "hybrid", 8 if sizes != "pp=2,dp=2" else 4)
    alone = made()
    optimizer = make(alone.parameters())
    states, norms = [], []
    for step in range(STEPS + 1):
        states.append((copy.deepcopy(alone.state_dict()), copy.deepcopy(optimizer.state_dict())))
        optimizer.zero_grad()
        norms.append(norm_of_step(alone, step))
        optimizer.step()
    states.append((alone.state_dict(), optimizer.state_dict()))

    def on_rank(rank: int, size: int) -> None:
        for is_loaded_before in (True, False):
            model, (state, of_optimizer) = made(), states[1]
            model.load_state_dict(state)
            inner = make(model.parameters())
            if is_loaded_before:
                inner.load_state_dict(copy.deepcopy(of_optimizer))
            wishes = {"loss": mean, "schedule": schedule} if schedule else {}
            pipe, stepped = prepared(rank, model, inner, "sharded", layout, **wishes)
            if not is_loaded_before:
                stepped.load_state_dict(copy.deepcopy(of_optimizer))
            equal(stepped.state_dict(), of_optimizer)
            check(rank, pipe, stepped, layout, range(1, STEPS), schedule is not None)
            equal(pipe.state_dict(), states[STEPS][0])
            equal(stepped.state_dict(), states[STEPS][1])
        saved = copy.deepcopy((pipe.state_dict(), stepped.state_dict()))
        again = made()
        other = Layout(dp=size // 2, tp=2) if layout.tp == 1 else Layout(pp=4, tp=2)
        divided, resumed = prepared(rank, again, make(again.parameters()), "hybrid", other)
        divided.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        check(rank, divided, resumed, other, range(STEPS, STEPS + 1))
        equal(divided.state_dict(), states[-1][0])
        equal(resumed.state_dict()["state"], states[-1][1]["state"])

    def check(rank: int, model: Any, stepped: Any, layout: Layout, steps: range, has_schedule: bool = False) -> None:
        for step in steps:
            stepped.zero_grad()
            equal(norm_of_step(model, step, layout.coordinate(rank)["dp"], layout.dp, has_schedule), norms[step])
            stepped.step()

    run_threads(on_rank, layout.size)
