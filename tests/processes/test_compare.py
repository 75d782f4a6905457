from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from guozhuang import compat
from guozhuang.lab import compare, options
from guozhuang.lab.results import Results, from_json
from guozhuang.lab.verdict import how, judge
from tests.waiting import LIMIT_S, remaining, until

TINY = "tests.processes.tiny_workload:make"


def _arguments(out: Path, *more: str) -> list[str]:
    return ["--workload", TINY, "--out", str(out), "--warmup-steps", "2", "--rounds", "1", "--timeout", "60", *more]


def _compare(out: Path, *more: str) -> tuple[int, Results]:
    parser = options.parser()
    code = compare.run(parser.parse_args(_arguments(out, *more)), compat.extension().python_path)
    return code, from_json((out / "results.json").read_text())


def _processes_of(text: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if text in " ".join(p.info["cmdline"] or ())]


def _until_there_are_two(scratch: Path, strategy: str, comparison: subprocess.Popen[Any]) -> None:
    until(
        lambda: len(list(scratch.glob(f"guozhuang-*/{strategy}-*/pid-*"))) == 2,
        goes_on=lambda: comparison.poll() is None,
    )


def test_strategies_side_by_side_and_one_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    code, results = _compare(out, "--strategies", "single,ddp,torch-ddp,none", "--steps", "6", "--option", "fail=5")
    assert code == 0

    single, torch_ddp, none = (results.row(name) for name in ("single", "torch-ddp", "none"))
    assert single is not None and torch_ddp is not None and none is not None
    assert torch_ddp.difference is not None and torch_ddp.difference.relative < 1e-5
    assert torch_ddp.losses == pytest.approx(single.losses, rel=1e-5)
    assert none.losses != pytest.approx(single.losses, rel=1e-3)
    assert (single.ranks_identical, torch_ddp.ranks_identical, none.ranks_identical) == (None, True, False)
    assert set(single.metrics) == {"accuracy", "forked"}
    assert single.metrics["forked"] == torch_ddp.metrics["forked"] == none.metrics["forked"] == 1.0
    assert len(single.losses) == 8

    phases = torch_ddp.phases
    assert phases.exchange_s is not None and phases.exchange_s > 0
    assert single.phases.exchange_s is None
    assert (single.backend, torch_ddp.backend, torch_ddp.asked_backend, none.asked_backend) == (
        "",
        "gloo",
        "gloo",
        None,
    )
    for row in (single, torch_ddp, none):
        ranks = row.rounds[0].ranks
        elapsed_s = statistics.fmean(rank.elapsed_s for rank in ranks)
        assert row.phases.step_s * ranks[0].num_steps == pytest.approx(elapsed_s, rel=0.5)
        assert row.machine_bytes is None or row.machine_bytes > 0
    if sys.platform == "linux":
        gradient_bytes = torch_ddp.rounds[0].ranks[0].gradient_bytes
        assert gradient_bytes == 4 * (8 * 2 + 2)
        assert torch_ddp.sent_bytes_per_step is not None
        assert torch_ddp.sent_bytes_per_step >= gradient_bytes  # 2 (n - 1) / n of it, and gloo's headers
        assert single.sent_bytes_per_step == 0
        assert (
            none.sent_bytes_per_step is not None and none.sent_bytes_per_step * 6 <= 1024
        )  # a heartbeat may fall into it

    failed = next(row for row in results.rows if row.name == "ddp")
    assert failed.failure is not None
    assert failed.failure.cause == "rank 1: RuntimeError: made to fail at step 5"
    assert "made to fail" in Path(failed.failure.log).read_text()

    printed = capsys.readouterr().out
    assert "torch-ddp on gloo" in printed or "torch-ddp, none on gloo" in printed
    assert "ddp failed" in printed and "torch-ddp" in printed and str(out / "report.html") in printed.replace("\n", "")
    assert {p.name for p in out.iterdir()} == {
        "report.html", "results.json", "speed.png", "step.png", "loss.png", "logs"
    }  # fmt: skip


@pytest.mark.slow
def test_the_same_strategy_on_several_backends_and_groups(tmp_path: Path) -> None:
    names, staged = "ddp@gloo,torch-ddp", "pipeline:schedule=1f1b"
    more = ("--steps", "3", "--groups", "2", "--option", "norm=batch")
    code, results = _compare(tmp_path / "report", "--strategies", f"{names},single,{staged}", *more)
    assert code == 0
    rows = {row.name: row for row in results.rows if not row.one_process}
    refused = rows.pop(staged)
    assert not refused.ok and "BatchNorm takes the statistics of each microbatch" in str(refused.failure)
    assert list(rows) == names.split(",")
    assert {name: (row.strategy, row.backend, row.num_groups) for name, row in rows.items()} == {
        "ddp@gloo": ("ddp", "gloo", 2),
        "torch-ddp": ("torch-ddp", "gloo", 1),
    }
    assert rows["ddp@gloo"].losses == pytest.approx(rows["torch-ddp"].losses, rel=1e-5)
    shell = how(results, rows["ddp@gloo"])[-1]  # not judge()'s: on a busy machine it may recommend single
    assert "--backend gloo" in shell and "@" not in shell
    said = [caution for caution in judge(results).cautions if "The likely cause is batch normalization" in caution]
    assert len(said) == 1 and said[0].startswith("ddp@gloo and torch-ddp ended") and "a BatchNorm layer" in said[0]


@pytest.mark.slow
def test_a_row_in_stages_says_what_each_does_and_how_to_run_it(tmp_path: Path) -> None:
    name = "pipeline:schedule=1f1b"
    code, results = _compare(tmp_path / "report", "--strategies", name, "--steps", "3", "--option", "norm=layer")
    (row,) = (each for each in results.rows if each.name == name)
    assert code == 0 and row.ok
    assert [stage.number for stage in row.stages] == [0, 1]
    assert all(stage.predicted_s and stage.busy_s > 0 for stage in row.stages)
    lines = how(results, row)
    assert "loss=loss_fn" in lines[3] and "model.step(x, y)" in lines[5] and "--schedule 1f1b" in lines[-1]


@pytest.mark.slow
def test_a_rank_that_hangs_is_a_failed_row_with_everyones_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, results = _compare(
        tmp_path, "--strategies", "none", "--steps", "3", "--option", "hang=4", "--timeout", "20", "--json"
    )
    assert code == 1
    failure = results.rows[0].failure
    assert failure is not None
    log = Path(failure.log).read_text()
    assert "tiny_workload.py" in log and "in loss" in log  # where rank 1 slept
    assert _processes_of(str(tmp_path)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_an_interrupted_comparison_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = _arguments(tmp_path / "report", "--strategies", "none", "--option", "hang=2")
    process = subprocess.Popen(
        [sys.executable, "-m", "guozhuang", "compare", *arguments],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _until_there_are_two(scratch, "none", process)
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Interrupted" in said
    assert "Traceback" not in said
    assert _processes_of(str(scratch)) == []
    assert [path for path in scratch.iterdir() if not path.name.startswith("torchinductor")] == []  # torch's own cache
    assert not (tmp_path / "report" / "results.json").exists()


@pytest.mark.slow
def test_a_killed_comparison_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """It is killed with -9 while ddp hangs; the same command then makes only what was not finished."""
    out, scratch, calm = tmp_path / "report", tmp_path / "scratch", tmp_path / "calm"
    scratch.mkdir()
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom pathlib import Path\nfrom tests.processes import tiny_workload\n"
        f"def make(options):\n    hang = {{}} if Path({str(calm)!r}).exists() else {{'hang': '4'}}\n"
        "    return replace(tiny_workload.make(hang), details={})\n"
    )
    arguments = _arguments(out, "--strategies", "single,ddp,none", "--steps", "6")
    arguments[1] = "own:make"
    command = [sys.executable, "-m", "guozhuang", "compare", *arguments]
    environ = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _until_there_are_two(scratch, "ddp", process)
    finally:
        process.kill()
        _, said = process.communicate()
    assert "single: " in said
    assert not remaining(lambda: _processes_of(str(scratch)), LIMIT_S), "ranks of a killed comparison are left"
    assert {path.name for path in (out / "unfinished").iterdir()} == {
        "comparison.json", "run-round1-single.json", "weights-single.pt",
    }  # fmt: skip
    calm.touch()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "1 finished run(s) of single are not made again" in done.stderr and "round 1/1, single" not in done.stderr
    results = from_json((out / "results.json").read_text())
    assert [row.ok for row in results.rows] == [True] * 3
    ddp = results.row("ddp")
    assert ddp is not None and ddp.difference is not None and ddp.difference.relative < 1e-5
    assert not (out / "unfinished").exists()
