"""Every strategy trains a few steps on this version of PyTorch, one after the other on the same ranks."""

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
