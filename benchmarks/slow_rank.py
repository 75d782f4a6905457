"""How surely a slow rank is named with its phase, and what measuring costs.

    python benchmarks/slow_rank.py [--trials 100] [--computes] [--json FILE]

Four ranks under `ddp`. A step takes 40 ms on each: sleeps in fetching data, in forward, in backward and in the optimizer,
and a small model, so that four ranks on two cores do not crowd each other. With ``--computes`` two ranks compute for as
long instead of sleeping. In each trial one rank takes a tenth of a step longer in one phase, or none does; a trial is as
many rounds of 12 steps as the rule needs (three). Trials of all cases take turns. Right is the trial in which exactly that
rank was named with that phase, and without a slow rank nobody. The cost is a race of a perceptron's steps with and without
the measurement, in turns.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.registry import registry
from guozhuang.strategies.steps import watch_steps
from guozhuang.watch.pace import PHASES, ROUNDS, PaceJudge, StepTimer
from guozhuang.watch.waits import waits

STEP_MS = {"data": 4.0, "forward": 12.0, "backward": 20.0, "optimizer": 4.0}
LATE_MS = sum(STEP_MS.values()) / 10
STEPS = 12  # of a round


class Busy(nn.Module):
    """A small model whose phases take as long as ``ms`` says."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.ms, self.computes = dict(STEP_MS), computes

    def spend(self, phase: str) -> None:
        """Sleep, or compute, for the time of a phase."""
        if not self.computes:
            time.sleep(self.ms[phase] / 1e3)
            return
        end_s = time.perf_counter() + self.ms[phase] / 1e3
        while time.perf_counter() < end_s:
            torch.mm(_MATRIX, _MATRIX)

    def forward(self, x: Tensor) -> Tensor:
        self.spend("forward")
        hidden = self.layers[0](x)
        hidden.register_hook(lambda gradient: self.spend("backward"))
        y: Tensor = self.layers[1:](hidden)
        return y


_MATRIX = torch.ones(64, 64)


def train(model: Any, optimizer: Any, busy: Busy, steps: int, x: Tensor) -> None:
    for _ in range(steps):
        busy.spend("data")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trials(rank: int, num: int, computes: bool) -> dict[str, dict[str, int]]:
    """For each case how often each answer was given."""
    busy, x = Busy(computes), torch.ones(8, 64)
    model, optimizer = gz.prepare(busy, torch.optim.SGD(busy.parameters(), lr=1e-4))
    optimizer.register_step_pre_hook(lambda *_: busy.spend("optimizer"))
    timer = registry.own_time.timer
    registry.own_time.fields = lambda clock_s: {}  # the heartbeat takes nothing away
    size = dist.get_world_size()
    train(model, optimizer, busy, 20, x)
    answers: dict[str, dict[str, int]] = {case: collections.Counter() for case in ("nobody", *PHASES)}
    for trial in range(num):
        slow = trial % size
        for case, found in answers.items():
            busy.ms = dict(STEP_MS)
            if case != "nobody" and rank == slow:
                busy.ms[case] += LATE_MS
            train(model, optimizer, busy, 2, x)
            timer._steps.clear()
            judge, told = PaceJudge(), []
            for _ in range(ROUNDS):
                train(model, optimizer, busy, STEPS, x)
                everyones: list[Any] = [None] * size
                dist.all_gather_object(everyones, timer.take())
                for other, own_time in enumerate(everyones):
                    judge.take(other, own_time)
                told += [
                    f"{'the' if each.rank == slow else 'another'} rank, {each.phase}"
                    for each in judge.round(range(size))[0]
                ]
            found[" and ".join(told) or "nobody"] += 1
    return answers


def cost_us(rounds: int, steps: int = 2000) -> list[float]:
    """Microseconds by which measuring makes a step of one process longer, of a model that computes next to nothing."""

    def step_us(measures: bool) -> float:
        net = nn.Linear(4, 4)
        optimizer, timer, pair, x = (
            torch.optim.SGD(net.parameters(), lr=0.1),
            StepTimer(waits),
            object(),
            torch.ones(2, 4),
        )
        if measures:
            waits.measure()
            watch_steps(net, optimizer, timer.begin, lambda name: timer.stepped(pair), only_begins=True)
        for step in range(steps + 100):
            if step == 100:
                began_s = time.perf_counter()
            net(x).sum().backward()
            optimizer.step()
        return (time.perf_counter() - began_s) / steps * 1e6

    return [step_us(True) - step_us(False) for _ in range(rounds)]


def run(rank: int, size: int, port: int, num: int, computes: bool, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    gz.init()
    found = {"answers": trials(rank, num, computes)}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    gz.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--computes", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = 2 if options.computes else 4
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (size, port, options.trials, options.computes, folder), nprocs=size)
        found = json.loads(Path(folder, "found.json").read_text())
    for case, answers in found["answers"].items():
        right = answers.get("nobody" if case == "nobody" else f"the rank, {case}", 0)
        others = ", ".join(f"{answer} ({times})" for answer, times in answers.items())
        print(f"late in {case:10}: right in {right} of {options.trials}: {others}")
    torch.set_num_threads(1)
    found["cost_us"] = cost_us(9)
    middle, low, high = statistics.median(found["cost_us"]), min(found["cost_us"]), max(found["cost_us"])
    print(f"measuring makes a step {middle:.1f} us longer ({low:.1f} .. {high:.1f})")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
