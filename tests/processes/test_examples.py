"""The examples run as their docstrings say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from guozhuang.workloads import load
from tests.launching import ROOT, guozhuang, python

TRAIN = ROOT / "examples" / "train.py"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(None, id="alone", marks=pytest.mark.slow),
        pytest.param([], id="ddp"),
        pytest.param(["--strategy", "torch-ddp"], id="torch-ddp", marks=pytest.mark.slow),
    ],
)
def test_train_learns_under_every_launcher(options: list[str] | None, tmp_path: Path) -> None:
    run = ("run", "--nproc-per-node", 2, *(options or []), TRAIN)
    done = python(TRAIN) if options is None else guozhuang(*run, folder=tmp_path)
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
