"""The examples run as their docstrings say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from guozhuang.workloads import load

ROOT = Path(__file__).parents[2]
RUN = ["-m", "guozhuang", "run", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["examples/train.py"], id="alone", marks=pytest.mark.slow),
        pytest.param([*RUN, "examples/train.py"], id="ddp"),
        pytest.param([*RUN, "--strategy", "torch-ddp", "examples/train.py"], id="torch-ddp", marks=pytest.mark.slow),
    ],
)
def test_train_learns_under_every_launcher(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3, done.stdout  # rank 0 alone prints
    assert losses[-1] < 0.3


def test_own_workload_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    workload = load("examples.own_workload:two_moons", {"hidden": "16"})
    model = workload.model()
    batch = workload.collate([workload.train[i] for i in range(8)])
    before = workload.loss(model, batch)
    optimizer = workload.optimizer(model)
    for _ in range(50):
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert workload.loss(model, batch) < before
    assert workload.evaluate is not None
    assert 0 <= workload.evaluate(model)["accuracy"] <= 1
