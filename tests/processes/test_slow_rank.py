"""Own time leaves waits for other ranks out, whatever the strategy and the backend; and a run names its slow rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.registry import registry
from guozhuang.watch.pace import PHASES
from tests.launching import guozhuang, write
from tests.ranks import run_ranks

LATE_S, STEPS = 0.02, 12
STRATEGIES = ["ddp", "sharded", "quantize8", "powersgd", "sparse-rows", "diloco", "local-sgd"]
# PyTorch's FSDP, which waits by itself: that is measured in works of our own groups alone.
FSDP = ["sharded-gradients", "sharded-weights"]


class _Late(nn.Module):
    """A small model that one rank takes longer for, in a phase that a test chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.phase = ""

    def late(self, phase: str) -> None:
        if phase == self.phase:
            time.sleep(LATE_S)

    def forward(self, x: Tensor) -> Tensor:
        self.late("forward")
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.late("backward"))
        y: Tensor = self.last(hidden.relu())
        return y


def _own_times(rank: int, size: int, strategies: list[str]) -> dict[str, dict[str, float]]:
    gz.init()
    found = {}
    for strategy in strategies:
        registry.own_time = None
        net = _Late()
        model, optimizer = gz.prepare(net, torch.optim.AdamW(net.parameters()), strategy=strategy)
        several: Any = optimizer
        several.register_step_pre_hook(lambda *_, net=net: net.late("optimizer"))
        assert registry.own_time is not None
        registry.own_time.fields = lambda clock_s: {}  # the heartbeat takes nothing away
        for step in range(2 + STEPS * (len(PHASES) if strategy == "ddp" else 1)):
            net.phase = "" if rank == 0 else PHASES[max(step - 2, 0) // STEPS] if strategy == "ddp" else "forward"
            net.late("data")
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                registry.own_time.timer._steps.clear()
            elif (step - 1) % STEPS == 0:
                own = registry.own_time.timer.take()
                assert own is not None
                name = strategy if strategy != "ddp" else f"ddp {PHASES[(step - 2) // STEPS]}"
                found[name] = {**own.own_ms, "own": own.total_ms, "step": own.step_ms}
    gz.shutdown()
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_own_time_of_each_strategy(backend: str) -> None:
    fast, slow = run_ranks(
        _own_times, 2, STRATEGIES + (FSDP if backend == "shm" else []), init=False, env={"GUOZHUANG_BACKEND": backend}
    )
    late_ms = LATE_S * 1e3
    for name, here in slow.items():
        phase = name.partition(" ")[2] or "forward"
        # On a busy machine the other phases take long too, but none as long.
        assert here[phase] >= late_ms and here[phase] == max(here[each] for each in PHASES), (name, here)
        assert fast[name]["own"] < here["own"] - 0.7 * late_ms, (name, fast[name], here)
        if name not in ("diloco", "local-sgd"):  # under these ranks wait now and then
            assert fast[name]["step"] > late_ms > fast[name][phase], (name, fast[name])


SCRIPT = """
import time
import torch
import guozhuang as gz

world = gz.init()
model = torch.nn.Linear(8, 8)
model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(450):
    time.sleep(0.02 if world.rank == 1 else 0.015)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("asked", [[], ["--slow-rank", "off"]], ids=["default", "off"])
def test_a_run_names_its_slow_rank(tmp_path: Path, asked: list[str]) -> None:
    done = guozhuang("run", "-np", 3, *asked, write(tmp_path, SCRIPT), folder=tmp_path, timeout_s=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert ("rank 1 on " in said and "is slow: its data takes" in said) == (not asked), said
    assert ("own time of each rank" in said and "slow: data" in said) == (not asked), said
    assert "rank 0 on" not in said and "rank 2 on" not in said
