from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from guozhuang import strategies
from guozhuang.errors import UsageError
from guozhuang.lab import config, options
from guozhuang.lab.contender import short_set
from guozhuang.lab.plan import ComparisonPlan, default_ranks, notes_of, plan_of
from guozhuang.world.machine import usable_cores

TINY = "tests.processes.tiny_workload:make"


def _plan(tmp_path: Path, *arguments: str) -> ComparisonPlan:
    parser = options.parser()
    told = parser.parse_args(["--workload", TINY, "--out", str(tmp_path / "out"), *arguments])
    return plan_of(told, tmp_path / "scratch", Console(file=io.StringIO()))[0]


def test_defaults_compare_a_short_set_over_two_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert _plan(tmp_path, "--all").names == tuple(name for name in strategies.STRATEGIES if name != "hybrid")
    sets = {(on_cpu, shares): short_set(on_cpu, shares) for on_cpu in (True, False) for shares in (True, False)}
    assert all(set(names) < set(strategies.STRATEGIES) and 5 < len(names) < 8 for names in sets.values())
    assert _plan(tmp_path, "--device", "cpu", "--backend", "gloo").names == sets[True, False]
    assert [default_ranks(*machine) for machine in ((True, 0), (True, 4), (False, 1), (False, 4))] == [2, 2, 1, 4]
    plan = _plan(tmp_path, "--device", "cpu")
    assert plan.names in (sets[True, True], sets[True, False])
    assert plan.settings.num_ranks == 2
    assert plan.settings.num_rounds == 3 and plan.may_stop_early
    assert plan.settings.global_batch_size == 8
    assert plan.settings.threads_per_rank == max(1, usable_cores() // 2)
    assert plan.out == tmp_path / "out"


@pytest.mark.parametrize(
    ("variable", "more", "threads", "said"),
    [
        ("3", (), 3, "OMP_NUM_THREADS=3 counts here: each rank computes with 3 thread(s)"),
        (
            "3",
            ("--threads-per-rank", "1"),
            1,
            "OMP_NUM_THREADS=3 does not count here: each rank computes with 1 thread(s)",
        ),
        ("many", (), max(1, usable_cores() // 2), "OMP_NUM_THREADS=many does not count here"),
        ("", (), max(1, usable_cores() // 2), ""),
    ],
)
def test_a_number_of_threads_in_the_environment_counts_or_is_contradicted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, more: tuple[str, ...], threads: int, said: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    plan = _plan(tmp_path, "--ranks", "2", *more)
    assert plan.settings.threads_per_rank == threads
    notes = [note for note in notes_of(plan) if "OMP_NUM_THREADS" in note]
    assert len(notes) == bool(said) and all(said in note for note in notes)


def test_a_package_that_the_model_needs_is_missed_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for workload in ("text", "synthetic"):
        with pytest.raises(UsageError, match=r"needs the package transformers.*pip install 'guozhuang\[text\]'"):
            _plan(tmp_path, "--workload", workload)


def _backends(plan: ComparisonPlan) -> dict[str, tuple[str, str | None, int]]:
    return {one.name: (one.strategy, one.backend, one.num_groups) for one in plan.contenders}


def test_each_row_has_its_backend_and_groups(tmp_path: Path) -> None:
    names = "single,ddp,torch-ddp,torch-ddp@fake,ddp@gloo,none"
    assert _backends(_plan(tmp_path, "--device", "cpu", "--strategies", names)) == {
        "single": ("single", None, 1),
        "ddp": ("ddp", None, 1),
        "torch-ddp": ("torch-ddp", "gloo", 1),  # as people use it
        "torch-ddp@fake": ("torch-ddp", "fake", 1),
        "ddp@gloo": ("ddp", "gloo", 1),
        "none": ("none", None, 1),
    }
    plan = _plan(tmp_path, "--device", "cpu", "--strategies", names, "--backend", "fake", "--groups", "3")
    assert _backends(plan) == {
        "single": ("single", None, 1),
        "ddp": ("ddp", "fake", 3),
        "torch-ddp": ("torch-ddp", "gloo", 1),
        "torch-ddp@fake": ("torch-ddp", "fake", 3),
        "ddp@gloo": ("ddp", "gloo", 3),
        "none": ("none", "fake", 1),
    }
    summaries = {one.name: one.summary for one in plan.contenders}
    assert summaries["ddp@gloo"].endswith("(on gloo, 3 groups in turn)")
    assert summaries["torch-ddp"] == strategies.get("torch-ddp").summary


def test_a_row_of_a_pipeline_has_a_layout_and_a_schedule(tmp_path: Path) -> None:
    names = "pipeline,pipeline:schedule=1f1b,hybrid:pp=2:schedule=zero-bubble:tp=2@gloo,torch-pipeline:schedule=1f1b"
    plan = _plan(tmp_path, "--device", "cpu", "--ranks", "4", "--strategies", names)
    assert [(one.strategy, one.layout, one.schedule, one.backend) for one in plan.contenders] == [
        ("pipeline", None, None, None),
        ("pipeline", None, "1f1b", None),
        ("hybrid", "pp=2,tp=2", "zero-bubble", "gloo"),
        ("torch-pipeline", None, "1f1b", None),
    ]
    assert plan.contenders[2].summary.endswith("(pp=2,tp=2, schedule zero-bubble, on gloo)")


def test_epochs_become_steps_less_the_warm_up(tmp_path: Path) -> None:
    assert _plan(tmp_path, "--epochs", "2", "--warmup-steps", "3").settings.num_steps == 2 * 12 - 3


def test_options_of_a_workload_reach_it(tmp_path: Path) -> None:
    assert _plan(tmp_path, "--option", "fail=9").options == {"fail": "9"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--strategies", "single,dpp"),
            "single, ddp, torch-ddp, horovod, byteps, bagua-gradient-allreduce, bagua-bytegrad, "
            "dp, sharded, sharded-quantize8, sharded-gradients, sharded-weights, "
            "pipeline, torch-pipeline, tensor, torch-tensor, space, sequence, hybrid, parameter-server, sparse-rows",
        ),
        (("--strategies", "ddp,single,ddp"), "one twice"),
        (("--strategies", " , "), "names none"),
        (("--strategies", "ddp", "--all"), "--strategies and --all"),
        (("--strategies", "ddp@glue"), "'glue'"),
        (("--strategies", "single@gloo"), "runs in one process"),
        (("--strategies", "nosuch@gloo"), "no such strategy"),
        (("--strategies", "hybrid"), "Fix: write the sizes of its axes too, as in hybrid:pp=2:tp=2"),
        (("--strategies", "hybrid:pp=3", "--ranks", "2"), "does not fit the world of 2 ranks (got 'pp=3')"),
        (("--strategies", "tensor:pp=2", "--ranks", "2"), "strategy tensor divides the model along tp only"),
        (("--strategies", "single:pp=2"), "which has no axes"),
        (("--strategies", "single:schedule=1f1b"), "which has no axes"),
        (("--strategies", "pipeline:schedule=2f2b"), "Fix: choose one of gpipe, 1f1b, interleaved, zero-bubble"),
        (("--strategies", "pipeline:schedule="), "a pipeline has no such schedule (got '')"),
        (("--strategies", "pipeline:schedule=1f1b:schedule=gpipe"), "has one schedule"),
        (("--strategies", "ddp:schedule=1f1b"), "Fix: write pipeline:schedule=1f1b, or add pp=2 to the layout"),
        (("--strategies", "tensor:schedule=1f1b"), "this row divides no layers (got 'tensor:schedule=1f1b')"),
        (("--strategies", "hybrid:schedule=1f1b"), "strategy hybrid needs a layout"),
        (("--strategies", "single,shared"), "Fix: write sharded, or choose one of single, "),
        (("--backend", "glue"), "'glue'"),
        (("--groups", "0"), "--groups"),
        (("--groups", "2", "--strategies", "single,none"), "can use several groups"),
        (("--groups", "2", "--device", "cpu", "--strategies", "torch-ddp"), "can use several groups"),
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
    crowded = _plan(tmp_path, "--ranks", "2", "--threads-per-rank", str(usable_cores()))
    assert any("take turns" in note for note in notes_of(crowded))


def test_a_missing_reference_is_noted(tmp_path: Path) -> None:
    short = notes_of(_plan(tmp_path, "--strategies", "ddp,onebit,qadam", "--steps", "150"))
    assert any(
        "onebit sends whole gradients in its first 100 steps, as 95 of the 150 measured" in note for note in short
    )
    assert any("qadam sends whole gradients in its first 300 steps, as all measured" in note for note in short)
    enough = notes_of(_plan(tmp_path, "--strategies", "ddp,onebit", "--warmup-steps", "100"))
    assert not any("whole gradients" in note for note in enough)
    assert any("single was not compared" in note for note in notes_of(_plan(tmp_path, "--strategies", "ddp")))


def _with_config(path: Path, text: str, *arguments: str) -> argparse.Namespace:
    path.write_text(text)
    words = [*arguments, "--config", str(path)]
    return config.with_config(options.parser().parse_args(words), words)


def test_a_config_file_has_every_option_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "compare.toml"
    text = """
        workload = "examples.own_workload:two_moons"
        strategies = ["single", "ddp@gloo"]
        steps = 100
        warmup-steps = 7
        json = true
        fused = false
        all = false
        timeout = 30.5
        text = ["title", "body"]
        out = "there"
        [option]
        hidden = 256
        depth = "2"
    """
    found = _with_config(path, text)
    assert (found.workload, found.strategies) == ("examples.own_workload:two_moons", "single,ddp@gloo")
    assert (found.steps, found.warmup_steps, found.json, found.fused, found.timeout) == (100, 7, True, False, 30.5)
    assert (found.text, found.out, found.option) == (["title", "body"], Path("there"), ["hidden=256", "depth=2"])
    # What the command line says goes before, also where one option takes the place of another.
    found = _with_config(path, text, "--steps", "9", "--all", "--option", "hidden=1", "--fused")
    assert (found.steps, found.all, found.strategies, found.fused) == (9, True, None, True)
    assert sorted(found.option) == ["depth=2", "hidden=1"]
    assert _with_config(path, text, "--epochs", "1").steps is None
    # Every option that the command line has can be written in the file.
    names = {name[2:] for a in options.parser()._actions for name in a.option_strings if not name.startswith("--no-")}
    for name in names - {"help", "config", "h", ""}:
        with pytest.raises(UsageError, match=r"is one value|is true or false|table of keys|no such choice|invalid"):
            config.read({name: {"a": 1} if name != "option" else 3}, "here")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stpes = 3", r"compare.toml: there is no such option of guozhuang compare .got 'stpes'.. Fix: write steps"),
        ("qqqqqq = 3", "use the names of the options that guozhuang compare --help lists"),
        ("config = 'other.toml'", "no such option"),
        ("steps = 'many'", "compare.toml: argument --steps: invalid int value: 'many'"),
        ("steps = true", "compare.toml: steps is one value"),
        ("steps = [1, 2]", "compare.toml: steps is one value, not a list"),
        ("device = 'gpu'", "invalid choice: 'gpu'"),
        ("fused = 'yes'", "fused is true or false"),
        ("option = 'a=1'", "option is a table of keys and values"),
        ("steps = ", "compare.toml is not TOML"),
    ],
)
def test_a_mistake_in_a_config_file_names_the_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _with_config(tmp_path / "compare.toml", text)


def test_a_config_file_that_is_not_there(tmp_path: Path) -> None:
    words = ["--config", str(tmp_path / "no.toml")]
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        config.with_config(options.parser().parse_args(words), words)
