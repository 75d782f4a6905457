"""What rank 0 does alone although it needs every rank ends within seconds, on all ranks, with an error that names the call."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.errors import MismatchError, WorldError
from tests.ranks import run_ranks

STATE, OPTIMIZER = "model.state_dict() needs every rank", "optimizer.state_dict() needs every rank"
FORWARD = "elsewhere: rank 1 in a forward of the model (training). Fix: call"
STEP = "elsewhere: rank 1 in optimizer.step(). Fix: call"
CLIP = "elsewhere: rank 1 in gz.clip_grad_norm_(). Fix: call"
MODES = "call it in different modes"
ROWS = [
    *[(layout, "state", (STATE, FORWARD)) for layout in ("pipeline", "tensor")],
    *[(layout, "optimizer", (OPTIMIZER, FORWARD)) for layout in ("pipeline", "tensor")],
    *[(layout, "evaluation", (MODES, "not inside `if rank == 0:`")) for layout in ("pipeline", "tensor")],
    *[
        (layout, "norm", ("call clip_grad_norm_(), and others have gone on", "is in"))
        for layout in ("pipeline", "tensor")
    ],
    ("sharded", "optimizer", (OPTIMIZER, STEP)),
    ("sharded", "optimizer, others clip", (OPTIMIZER, CLIP)),
    ("sharded", "optimizer, with buffers", (OPTIMIZER, FORWARD)),
]


def alone(rank: int, world_size: int, strategy: str, habit: str) -> str:
    gz.init()
    torch.manual_seed(0)
    norms: list[nn.Module] = [nn.BatchNorm1d(8)] if "buffers" in habit else []
    model: Any = nn.Sequential(nn.Linear(6, 8), *norms, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model, optimizer = gz.prepare(model, torch.optim.Adam(model.parameters()), strategy)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if "clip" in habit:
            gz.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(3):
        step(torch.randn(8, 6))
    model.state_dict(), optimizer.state_dict()  # on every rank, as it should be
    try:
        if rank == 0 and habit == "evaluation":
            model.eval()
            with torch.no_grad():
                model(torch.randn(5, 6))
        elif rank == 0 and habit == "norm":
            gz.clip_grad_norm_(model.parameters(), 1.0)
        elif rank == 0:
            (model if habit == "state" else optimizer).state_dict()
        step(torch.randn(8, 6))
    except (MismatchError, WorldError) as error:
        if rank == 0:
            torch.distributed.destroy_process_group()  # as if the process ended: others wait in a collective
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(("strategy", "habit", "texts"), ROWS)
def test_the_call_is_named_on_all_ranks(strategy: str, habit: str, texts: tuple[str, str]) -> None:
    for told in run_ranks(alone, 2, strategy, habit, backend="shm"):
        assert all(re.search(re.escape(text), told) for text in texts), told
