"""Own time leaves waits for other ranks out, whatever the strategy and the backend; and a run names its slow rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.registry import registry
from guozhuang.watch.pace import PHASES
from tests.launching import guozhuang, write
from tests.ranks import run_ranks

STEPS = 12
LATE_STEPS = 10  # a rank is late by so many steps of both
STRATEGIES = ["ddp", "sharded", "quantize8", "powersgd", "sparse-rows", "diloco", "local-sgd"]
# PyTorch's FSDP, which waits by itself: that is measured in works of our own groups alone.
FSDP = ["sharded-gradients", "sharded-weights"]


class _Late(nn.Module):
    """A small model that one rank takes longer for, in a phase that a test chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.phase, self.late_s = "", 0.0

    def late(self, phase: str) -> None:
        if phase == self.phase:
            time.sleep(self.late_s)

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
        net.late_s = LATE_STEPS * _step_s(model, optimizer)
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
                found[name] = {**own.own_ms, "own": own.total_ms, "step": own.step_ms, "late": net.late_s * 1e3}
    gz.shutdown()
    return found


def _step_s(model: Any, optimizer: Any) -> float:
    """What a step takes here, on the slower rank."""
    took = []
    for _ in range(5):
        began_s = time.perf_counter()
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - began_s)
    slower = torch.tensor(sorted(took)[2])
    dist.all_reduce(slower, dist.ReduceOp.MAX)
    return float(slower)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_own_time_of_each_strategy(backend: str) -> None:
    fast, slow = run_ranks(
        _own_times, 2, STRATEGIES + (FSDP if backend == "shm" else []), init=False, env={"GUOZHUANG_BACKEND": backend}
    )
    for name, here in slow.items():
        late_ms = here["late"]
        phase = name.partition(" ")[2] or "forward"
        # On a busy machine the other phases take long too, but none as long.
        assert here[phase] >= late_ms and here[phase] == max(here[each] for each in PHASES), (name, here)
        assert fast[name]["own"] < here["own"] - 0.7 * late_ms, (name, fast[name], here)
        if name not in ("diloco", "local-sgd"):  # under these ranks wait now and then
            assert fast[name]["step"] > late_ms > fast[name][phase], (name, fast[name])


# By a clock that the script sets forward, rank 1 takes longer for its data. It trains until each rank has told its own time in
# more rounds than it takes to be named.
SCRIPT = """
from types import SimpleNamespace
import torch
import torch.distributed as dist
import guozhuang as gz
from guozhuang.registry import registry

world, now_ns = gz.init(), 1
model = torch.nn.Linear(8, 8)
model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
timer = None if registry.own_time is None else registry.own_time.timer
if timer is not None:
    timer._clock, timer._waits = lambda: now_ns, SimpleNamespace(total_ns=0)
num_steps, fewest = 0, torch.zeros(1)
while fewest < 8 and (timer is not None or num_steps < 100):
    now_ns += 20_000_000 if world.rank == 1 else 15_000_000
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    num_steps += 1
    fewest.fill_(0 if timer is None else timer._num_taken)
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
"""


@pytest.mark.slow
@pytest.mark.parametrize("asked", [[], ["--slow-rank", "off"]], ids=["default", "off"])
def test_a_run_names_its_slow_rank(tmp_path: Path, asked: list[str]) -> None:
    done = guozhuang("run", "-np", 3, *asked, write(tmp_path, SCRIPT), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert ("rank 1 on " in said and "is slow: its data takes" in said) == (not asked), said
    assert ("own time of each rank" in said and "slow: data" in said) == (not asked), said
    assert "rank 0 on" not in said and "rank 2 on" not in said
