"""Every strategy trains a few steps, and stops at NaN, one after the other on the same ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import guozhuang as gz
from guozhuang.errors import UsageError
from guozhuang.strategies.table import STRATEGIES
from guozhuang.world.layout import HYBRID, OWN_AXIS
from tests.processes.test_peers import Model, loss_of
from tests.ranks import run_ranks

STEPS = 3


def trains(rank: int, name: str) -> list[float]:
    """This rank's losses on the same batch."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 2))
    try:
        pair = gz.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3), strategy=name)
    except UsageError:  # its optimizer is SGD
        pair = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), strategy=name)
    words = torch.randint(0, 50, (16, 4), generator=torch.Generator().manual_seed(rank))
    batch = {"words": words, "answers": words[:, 0] % 2}
    prepared, optimizer = pair
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(prepared(batch["words"]), batch["answers"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_all(rank: int, world_size: int) -> dict[str, list[float]]:
    world = gz.init()
    assert dist.get_backend() == "shm" and world.size == world_size
    found = {}
    for name, strategy in STRATEGIES.items():
        if name in (*OWN_AXIS, HYBRID):  # see test_layouts.py
            continue
        if strategy.trains and not strategy.one_process and not strategy.divides_itself:  # see test_peers.py
            found[name] = trains(rank, name)
            dist.barrier()
    gz.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.versions
def test_every_strategy_trains() -> None:
    first, second = run_ranks(train_all, 2, init=False)
    assert first.keys() == second.keys() and len(first) > 15
    for name, losses in first.items():
        assert all(map(math.isfinite, losses + second[name])), (name, losses, second[name])
        assert sum(losses) + sum(second[name]) < STEPS * (losses[0] + second[name][0]), (name, losses, second[name])


NAN_STEP = 2
# One of each kind: what exchanges gradients or weights, divides the model, averages by PyTorch's own, or exchanges nothing.
SOME = (
    "ddp",
    "local-sgd",
    "sharded",
    "pipeline",
    "tensor",
    "sequence",
    "space",
    "hybrid",
    "torch-ddp",
    "torch-pipeline",
    "none",
)


class Images(nn.Module):
    """What space can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.head = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.body(images).mean((2, 3)))}


def stop_at_nan(rank: int, size: int, names: list[str]) -> dict[str, str]:
    """What stopped each training whose loss is NaN from one step on."""
    found = {}
    for name in names:
        gz.init()
        torch.manual_seed(3)
        model = Images() if name == "space" else Model()
        layout = "pp=2" if name == HYBRID else None
        make = torch.optim.Adam if "adam" in name else torch.optim.SGD
        pair = gz.prepare(model, make(model.parameters(), lr=0.01), name, layout=layout)
        words = torch.randint(0, 50, (16, 8), generator=torch.Generator().manual_seed(1))
        images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        batch = {"words": images if name == "space" else words, "answers": words[:, 0] % 2}
        found[name] = "nothing did"
        for step in range(NAN_STEP + 3):
            factor = math.nan if step >= NAN_STEP else 1.0
            try:
                pair.step(batch, lambda model, part, factor=factor: loss_of(model, part) * factor)
            except FloatingPointError as error:
                found[name] = str(error)
                break
        gz.shutdown()
    return found


@pytest.mark.parametrize("names", [SOME, pytest.param(tuple(STRATEGIES), marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_strategy_stops_at_nan_where_that_was_asked(names: tuple[str, ...], num_ranks: int) -> None:
    chosen = [name for name in names if STRATEGIES[name].one_process == (num_ranks == 1)] or ["single", "ddp"]
    for rank, found in enumerate(
        run_ranks(stop_at_nan, num_ranks, chosen, init=False, env={"GUOZHUANG_STOP_ON_NAN": "1"})
    ):
        for name, text in found.items():
            assert text.startswith(f"[rank {rank}] step {NAN_STEP}: the ") and "is NaN here" in text, (name, text)
