"""``guozhuang tune`` and ``--strategy auto`` in processes: a plan is found, kept and run; an interruption leaves nothing."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from guozhuang.lab.unfinished import alone_in
from guozhuang.launch.options.plan_file import read_plan
from tests.launching import Launched, guozhuang, write
from tests.waiting import LIMIT_S

TINY = (
    "--workload",
    "tests.processes.tiny_workload:make",
    "--device",
    "cpu",
    "--rounds",
    3,
    "--steps",
    2,
    "--warmup-steps",
    2,
)

SCRIPT = """
import torch
import guozhuang as gz

torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(40):
    gz.clip_grad_norm_(model.parameters(), 1.0) if model(torch.ones(2, 8)).sum().backward() is None else None
    optimizer.step()
    optimizer.zero_grad()
print("ends with", sum(p.abs().sum().item() for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.timeout(19 * LIMIT_S)
def test_a_plan_is_found_kept_and_run(tmp_path: Path) -> None:
    words = ("tune", *TINY, "--knobs", "ranks", "--option", "fail=3")
    found = guozhuang(*words, folder=tmp_path, timeout_s=3 * LIMIT_S)
    assert found.returncode == 0, found
    # The setting that dies at its third step is left out with its reason, and the race goes on.
    assert "failed: rank 1: RuntimeError: made to fail at step 3" in found.stdout
    plan = read_plan(str(tmp_path / "tuned.json"))
    assert plan.strategy == "single" and plan.tuned_on["workload option fail"] == '"3"'
    assert [path.name for path in tmp_path.iterdir() if path.name != "tmp"] == ["tuned.json"]
    again = guozhuang(*words, folder=tmp_path, timeout_s=3 * LIMIT_S)
    assert "tuned.json holds this plan already" in again.stderr and again.returncode == 0
    other = guozhuang(*words, "--backend", "gloo", "--timeout", 0.001, folder=tmp_path, timeout_s=3 * LIMIT_S)
    assert "does not count here" in other.stderr and "--backend was None, is gloo" in other.stderr, other
    assert other.returncode == 2 and "every contender has failed" in other.stderr
    script = write(tmp_path, SCRIPT)
    trained = guozhuang("run", "--plan", "tuned.json", script, folder=tmp_path, timeout_s=3 * LIMIT_S)
    assert len(re.findall("ends with", trained.stdout)) == plan.ranks_per_node, trained
    with alone_in(tmp_path):
        refused = guozhuang(*words, folder=tmp_path, timeout_s=3 * LIMIT_S)
    assert refused.returncode == 2 and "another tuner writes to this folder now" in refused.stderr
    raced = guozhuang("run", "-np", 2, "--strategy", "auto", script, folder=tmp_path, timeout_s=3 * LIMIT_S)
    assert len(set(re.findall(r"ends with .*", raced.stdout))) == 1 and "was not tried" not in raced.stderr, raced


@pytest.mark.slow
def test_an_interrupted_tuner_leaves_nothing(tmp_path: Path) -> None:
    with Launched("tune", *TINY, "--option", "hang=2", folder=tmp_path) as launched:
        launched.until(lambda: "ranks: " in launched.printed and len(launched.processes()) > 2)
        launched.send(signal.SIGINT)
        ended = launched.wait(LIMIT_S)
        assert ended.returncode == 130 and "Nothing was written" in ended.stderr and "Traceback" not in ended.stderr
        assert launched.left() == []
    assert [path.name for path in tmp_path.iterdir() if path.name != "tmp"] == []
