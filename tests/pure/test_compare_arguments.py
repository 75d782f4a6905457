from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest
from rich.console import Console

from guozhuang import strategies
from guozhuang.errors import UsageError
from guozhuang.lab import compare
from guozhuang.lab.machine import num_cores
from guozhuang.lab.plan import Plan, notes_of, plan_of

TINY = "tests.processes.tiny_workload:make"


def _plan(tmp_path: Path, *arguments: str) -> Plan:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    told = parser.parse_args(["--workload", TINY, "--out", str(tmp_path / "out"), *arguments])
    return plan_of(told, tmp_path / "scratch", Console(file=io.StringIO()))[0]


def test_defaults_compare_every_strategy_over_two_ranks(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    assert plan.names == tuple(strategies.STRATEGIES)
    assert plan.settings.num_ranks == 2
    assert plan.settings.num_rounds == 3
    assert plan.settings.global_batch_size == 8
    assert plan.settings.threads_per_rank == max(1, num_cores() // 2)
    assert plan.out == tmp_path / "out"


def test_epochs_become_steps_less_the_warm_up(tmp_path: Path) -> None:
    assert _plan(tmp_path, "--epochs", "2", "--warmup-steps", "3").settings.num_steps == 2 * 12 - 3


def test_options_of_a_workload_reach_it(tmp_path: Path) -> None:
    assert _plan(tmp_path, "--option", "fail=9").options == {"fail": "9"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--strategies", "single,dpp"), "single, ddp, torch-ddp, dp, none"),
        (("--strategies", "ddp,single,ddp"), "one twice"),
        (("--strategies", " , "), "names none"),
        (("--ranks", "0"), "--ranks"),
        (("--steps", "0"), "--steps"),
        (("--epochs", "-1"), "--epochs"),
        (("--rounds", "0"), "--rounds"),
        (("--threads-per-rank", "0"), "--threads-per-rank"),
        (("--warmup-steps", "1"), "--warmup-steps"),
        (("--timeout", "0"), "--timeout"),
        (("--timeout", "nan"), "--timeout"),
        (("--steps", "5", "--epochs", "1"), "both given"),
        (("--epochs", "1", "--warmup-steps", "12"), "none to measure"),
        (("--ranks", "25"), "smaller than one global batch"),
        (("--workload", "nothing"), "no such workload"),
        (("--workload", "tests.nowhere:make"), "no module"),
        (("--model", "bert-tiny"), "--model"),
        (("--out", "/dev/null/x"), "--out"),
        (("--timeline", "/dev/null/trace.json"), "--timeline"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        _plan(tmp_path, *arguments)
    assert says in str(caught.value)


def test_more_threads_than_cores_are_allowed_and_noted(tmp_path: Path) -> None:
    assert not any("take turns" in note for note in notes_of(_plan(tmp_path, "--ranks", "1")))
    crowded = _plan(tmp_path, "--ranks", "2", "--threads-per-rank", str(num_cores()))
    assert any("take turns" in note for note in notes_of(crowded))


def test_a_missing_reference_is_noted(tmp_path: Path) -> None:
    assert any("single was not compared" in note for note in notes_of(_plan(tmp_path, "--strategies", "ddp")))
