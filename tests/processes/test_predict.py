"""``guozhuang predict`` as a user types it: measured once, kept in a file, used again, refused for another training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

STRANGE = """
import torch
from torch import nn
from guozhuang.workloads import Workload


class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.used(self.frozen(x))


def training(options):
    data = [torch.full((64,), n / 100) for n in range(100)]
    return Workload(
        name="strange", model=Strange, train=data, collate=torch.stack, batch_size=4, details={},
        optimizer=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01),
        loss=lambda model, batch: model(batch).square().mean(), evaluate=None,
    )
"""


def predict(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "guozhuang", "predict", *words, "--device", "cpu", "--profile", "profile.json"]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{folder}:{Path(__file__).resolve().parents[2]}"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=3 * LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(7 * LIMIT_S)
def test_a_profile_is_measured_kept_and_used_again(tmp_path: Path) -> None:
    (tmp_path / "strange.py").write_text(STRANGE)
    own = ("--workload", "strange:training", "--ranks", "1,2", "--strategies", "ddp,parameter-server,none")
    measured = predict(tmp_path, *own, "--out", "report", "--json", "--samples", "1e6", "--price", "2")
    assert measured.returncode == 0, measured.stderr
    document = json.loads(measured.stdout)
    assert document["schema_version"] == 1 and document["workload"] == "strange:training"
    found = {(row["name"], row["num_ranks"]): row for row in document["rows"]}
    each = found["none", 2]["prediction"]
    low, high = each["interval_s"]
    assert 0 < low < each["step_s"] < high and sum(each["parts"].values()) == pytest.approx(each["step_s"])
    assert "unused.weight, unused.bias" in found["ddp", 2]["problem"]  # as ddp itself refuses this model
    assert found["parameter-server", 2]["prediction"] is None
    assert "exchange messages with servers" in found["parameter-server", 2]["problem"]
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert [each["name"] for each in profile["gradients"] if each["ready_s"] == "inf"] == [
        "unused.weight",
        "unused.bias",
    ]
    assert len(profile["gradients"]) == 4  # frozen parameters have none
    assert [each["batch_size"] for each in profile["batches"]] == [2, 4, 8]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<svg" in page and (tmp_path / "report" / "weak.png").stat().st_size > 1000
    shown = predict(tmp_path, *own)
    assert shown.returncode == 0 and "What would narrow an interval most" in shown.stdout, shown.stderr
    again = predict(tmp_path, *own, "--json", "--on", "4xhere,1gbit/0.1ms")
    assert again.returncode == 0, again.stderr
    rows = {(row["name"], row["num_ranks"]): row["prediction"] for row in json.loads(again.stdout)["rows"]}
    assert rows["none", 2]["step_s"] > 0 and "It lacks some of what is asked, and is extended." in again.stderr
    extended = json.loads((tmp_path / "profile.json").read_text())
    assert "extended" in extended["created"] and len(extended["refused"]) > len(profile["refused"])
    other = predict(tmp_path, "--workload", "synthetic", "--ranks", "2")
    assert other.returncode == 2
    assert "workload: strange:training then, synthetic now" in other.stderr
    assert "remove profile.json, so that it is measured again" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "0"), "--ranks takes numbers of at least 1"),
        (("--strategies", "dpp"), "dpp"),
        (("--on", "4xbananas"), "bananas"),
        (("--on", "nothing.json"), "cannot be read"),
        (("--samples", "-1"), "--samples is a number above 0"),
    ],
)
def test_words_that_cannot_work_are_refused_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    found = predict(tmp_path, "--workload", "synthetic", *words)
    assert found.returncode == 2 and message in found.stderr and "Traceback" not in found.stderr
    assert not (tmp_path / "profile.json").exists()
