"""``gz.Tracker``: rows of a CSV file and of TensorBoard from two ranks, and what is refused."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import guozhuang as gz
from guozhuang.errors import UsageError
from tests.ranks import run_ranks


def train(rank: int, size: int, to: str, strategy: str) -> list[tuple[int, dict[str, float]]]:
    """Six steps, a row every two, of ranks with 1 and 3 samples whose losses are 1 and 5."""
    rows: list[tuple[int, dict[str, float]]] = []
    gz.init(backend="gloo")
    model = torch.nn.Linear(40, 40)
    model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)  # type: ignore[assignment]
    tracker = gz.Tracker(to or (lambda metrics, step: rows.append((step, dict(metrics)))), model, every=2)
    for step in range(6):
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        tracker.step(1 + 2 * rank, loss=torch.tensor(1.0 + 4 * rank, requires_grad=True), step_number=step)
    tracker.log(accuracy=0.5)
    state = tracker.state_dict()
    tracker.close()
    again = gz.Tracker(to or (lambda metrics, step: rows.append((step, dict(metrics)))), every=2)
    again.load_state_dict(state)
    for _ in range(2):
        again.step(1)
    again.close()
    gz.shutdown()
    return rows


def test_rows_of_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(train, 2, "", "ddp", init=False)
    assert not second, "rank 0 writes"
    assert [step for step, _ in first] == [2, 4, 6, 6, 8]
    for step, row in first[:3]:
        assert row["loss"] == pytest.approx((1 * 1 + 3 * 5) / 4) and row["step_number"] == pytest.approx(step - 1.5)
        assert row["samples_per_s"] > 0 and row["exposed_exchange_ms"] > 0
        assert 0 < row["own_ms"] <= row["own_ms_max"]
        if sys.platform == "linux":
            assert 40 * 41 * 4 <= row["sent_bytes"] < 100_000
    assert first[3][1] == {"accuracy": 0.5}

    path = tmp_path / "runs" / "log.csv"
    run_ranks(train, 2, str(path), "sharded", init=False)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["value"] for row in rows if row["name"] == "loss"] == ["4.0"] * 3
    assert [row["step"] for row in rows if row["name"] == "samples_per_s"] == ["2", "4", "6", "8"]
    assert not [row for row in rows if row["name"] == "exposed_exchange_ms"], "gradients are exchanged in the step"


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(train, 2, f"tensorboard:{tmp_path}", "ddp", init=False)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(2, 4.0), (4, 4.0), (6, 4.0)]
    assert [each.value for each in events.Scalars("accuracy")] == [0.5]


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match=r'"FILE\.csv", "tensorboard:FOLDER"'):
        gz.Tracker("paper")
    with pytest.raises(UsageError, match="`every` is a number of steps"):
        gz.Tracker("a.csv", every=0)
    with pytest.raises(UsageError, match="takes the model that prepare"):
        gz.Tracker("a.csv", torch.nn.Linear(1, 1))
    with mock.patch.dict(sys.modules, {"mlflow": None}), pytest.raises(UsageError, match="pip install mlflow"):
        gz.Tracker("mlflow:mine").log(loss=1.0)
