"""``guozhuang tune``: which settings each knob gives, what dying trials and equal settings lead to, which plan counts where."""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from guozhuang.cost.race import Rules
from guozhuang.errors import UsageError
from guozhuang.lab.predict import profile as profiles
from guozhuang.lab.results import RunFailure
from guozhuang.lab.tune import command
from guozhuang.lab.tune.arguments import KNOBS, OF_THE_RESULT, parser
from guozhuang.lab.tune.foresight import Foresight
from guozhuang.lab.tune.knobs import Choices, best_cap, chosen_knobs
from guozhuang.launch.options.arguments import read
from guozhuang.launch.options.plan_file import read_plan, write_plan
from guozhuang.workloads.arguments import add_arguments
from guozhuang.workloads.base import fuse
from guozhuang.world.machine import describe

GLOO = Choices(on_cpu=True, num_cores=4, num_ranks=2, global_batch=16, backend="gloo", asked_backend="gloo")
SHM = Choices(on_cpu=True, num_cores=4, num_ranks=2, global_batch=16, backend="shm")
ODD = Choices(on_cpu=True, num_cores=2, num_ranks=3, global_batch=9, backend="shm")
CUDA = Choices(on_cpu=False, num_cores=16, num_ranks=4, global_batch=64, backend="nccl", is_fused=True)


@pytest.mark.parametrize(
    ("choices", "knob", "expected"),
    [
        (GLOO, "ranks", ["single, 1 rank of 4 threads", "ddp, 4 ranks of 1 thread"]),
        (ODD, "ranks", ["single, 1 rank of 2 threads"]),
        (CUDA, "ranks", "each CUDA device has its rank"),
        (SHM, "fused", ["ddp, 2 ranks of 2 threads, fused"]),
        (CUDA, "fused", "the optimizer is fused already"),
        (
            SHM,
            "strategy",
            [
                "single, 1 rank of 4 threads",
                "torch-ddp, 2 ranks of 2 threads",
                "dp, 1 rank of 4 threads",
                "sharded, 2 ranks of 2 threads",
            ],
        ),
        (
            GLOO,
            "strategy",
            ["single, 1 rank of 4 threads", "torch-ddp, 2 ranks of 2 threads", "sharded, 2 ranks of 2 threads"],
        ),
        (SHM, "cap", "in shared memory no bucket waits for a link"),
        (GLOO, "cap", [f"ddp, 2 ranks of 2 threads, buckets of {cap} MiB" for cap in (1, 6, 100, 400)]),
        (GLOO, "groups", ["ddp, 2 ranks of 2 threads, 2 groups", "ddp, 2 ranks of 2 threads, 4 groups"]),
    ],
)
def test_each_knob_changes_one_thing_and_says_why_there_is_nothing(choices: Choices, knob: str, expected: Any) -> None:
    others, why = choices.others(knob, choices.default(), None)
    assert [each.name for each in others] == expected if isinstance(expected, list) else (others, why) == ([], expected)


def test_no_inexact_strategy_is_tried_unasked_and_no_bound_at_all() -> None:
    for choices in (GLOO, SHM, CUDA):
        assert all(each.row.entry.exact for each in choices.others("strategy", choices.default(), None)[0])
    asked = Choices(True, 2, 2, 8, "shm", asked="quantize8,sharded")
    assert [each.row.name for each in asked.others("strategy", asked.default(), None)[0]] == ["quantize8", "sharded"]
    with pytest.raises(UsageError, match="a bound on speed"):
        Choices(True, 2, 2, 8, "shm", asked="none").others("strategy", asked.default(), None)


def test_a_strategy_on_another_backend_is_another_setting_and_the_present_one_is_none() -> None:
    asked = Choices(True, 2, 2, 8, "shm", asked="ddp@gloo,ddp,ddp@shm,hybrid:pp=2")
    found = asked.others("strategy", asked.default(), None)[0]
    assert [each.row.name for each in found] == ["ddp@gloo", "hybrid:pp=2"]


@pytest.mark.parametrize(
    ("asked", "in_the_script"),
    [
        ("sharded", ["batches of 4 samples"]),
        ("pipeline", ["batches of 8 samples"]),  # of the two ranks that hold one copy of the model
        ("hybrid:tp=2", ["batches of 8 samples"]),
        ("single", ["batches of 8 samples"]),
        ("dp", ["batches of 8 samples", "gz.prepare(..., num_replicas=2)"]),
    ],
)
def test_the_plan_tells_what_the_script_does_for_the_batch_that_was_raced(
    asked: str, in_the_script: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    choices = Choices(True, 2, 2, 8, "shm", asked=asked)
    words = ("--knobs", "strategy", "--strategies", asked)
    found, _ = tuned(choices, tmp_path, lambda name, number: 2.0 + 0.01 * (number % 3) - name.startswith(asked), *words)
    plan = command._plan(found, {})
    assert [each.partition(" (gz.loader")[0] for each in plan.in_the_script] == in_the_script
    assert (plan.strategy, plan.device) == (asked.partition(":")[0], "cpu")


def test_every_option_counts_for_the_stored_result_or_says_where_it_goes() -> None:
    of_workloads = argparse.ArgumentParser()
    add_arguments(of_workloads)
    options = {action.dest for action in parser()._actions} - {action.dest for action in of_workloads._actions}
    assert options | {"seed"} == {
        *OF_THE_RESULT,
        "workload",
        "out",
        "fresh",
        "json",
        "profile",
    }  # workloads have a seed too


@pytest.mark.parametrize(
    ("seconds", "cap"),
    [
        ({1.0: 1.2, 6.0: 1.05, 25.0: 1.0, 100.0: 1.05, 400.0: 1.2}, 20.0),  # even around log 20
        ({1.0: 1.0, 6.0: 1.1, 25.0: 1.2, 100.0: 1.3}, None),  # falls to the edge
        ({1.0: 1.0, 6.0: 1.2, 25.0: 1.2, 100.0: 1.0}, None),  # a hill
        ({1.0: 1.0, 25.0: 0.9, 100.0: 1.0}, None),  # too few
    ],
)
def test_the_cap_at_the_minimum_of_the_parabola(seconds: dict[float, float], cap: float | None) -> None:
    assert best_cap(seconds) == (None if cap is None else pytest.approx(cap, rel=0.15))


class Made:
    """Runs that take what a table says, by the name of the setting."""

    def __init__(self, cost: Callable[[str, int], float | str]) -> None:
        self.cost, self.calls = cost, list[str]()

    def execute(self, spec: Any, log: Path, tick: Any) -> Any:
        self.calls.append(spec.name)
        found = self.cost(spec.name, len(self.calls))
        if isinstance(found, str):
            return RunFailure(found, str(log), 0)
        return (SimpleNamespace(median_step_s=found), SimpleNamespace(median_step_s=found * 0.99))


def tuned(
    choices: Choices, folder: Path, cost: Callable[[str, int], float | str], *words: str, foresight: Any = None
) -> tuple[Any, str]:
    said = io.StringIO()
    what = SimpleNamespace(folder=folder, name="text", options={}, device=None)
    namespace = parser().parse_args(list(words))
    found = command._Tuning(
        namespace, what, choices, Made(cost), Rules(0.01, 0.02, 12), Console(file=said, width=500), foresight
    )  # type: ignore[arg-type]
    found.tune(chosen_knobs(namespace.knobs))
    return found, said.getvalue()


def test_each_knob_goes_on_from_the_winner_of_the_one_before_and_survives_a_dying_trial(tmp_path: Path) -> None:
    def cost(name: str, number: int) -> float | str:
        if "torch-ddp" in name:
            return "rank 1: MemoryError: no room\nand more"
        noise = 1 + 0.01 * ((number * 7) % 5 - 2)
        return (
            noise
            * (2.0 if "single" in name else 1.0)
            * (0.8 if "fused" in name else 1)
            * (0.7 if "sharded" in name else 1)
        )

    found, said = tuned(SHM, tmp_path, cost)
    assert found.now.name == "sharded, 2 ranks of 2 threads, fused" and found.gain == pytest.approx(1 / 0.56, rel=0.05)
    assert "not torch-ddp, 2 ranks of 2 threads, fused: failed: rank 1: MemoryError: no room" in said
    assert found.runs.calls.count("torch-ddp, 2 ranks of 2 threads, fused") == 1  # it is not tried again
    plan = command._plan(found, {"workload": "text"})
    assert plan.command() == "guozhuang run -np 2 --strategy sharded --threads-per-rank 2 train.py"
    assert plan.in_the_script == ("batches of 8 samples (gz.loader's batch_size)", "an optimizer made with fused=True")
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(str(tmp_path / "plan.json")) == plan


class TabledForesight(Foresight):
    """What a table predicts, whose intervals reach so many times up and down."""

    def __init__(self, steps_s: dict[str, float], factor: float) -> None:
        self.steps_s, self.factor = steps_s, factor

    def predicted(self, settings: Any, runs_s: float) -> Any:
        assert runs_s > 0
        return {
            each.name: SimpleNamespace(step_s=s, interval_s=(s / self.factor, s * self.factor))
            for each in settings
            if (s := self.steps_s.get(each.row.strategy)) is not None
        }


@pytest.mark.parametrize(
    ("factor", "unrun"),
    [(1.01, ["dp", "torch-ddp"]), (1.3, ["torch-ddp"])],  # 1.3 each way for both is 1.45 together
)
def test_what_is_predicted_far_behind_is_not_run_but_the_default_is(
    tmp_path: Path, factor: float, unrun: list[str]
) -> None:
    steps_s = {"sharded": 1.0, "ddp": 5.0, "torch-ddp": 1.5, "dp": 1.35}  # nothing is known of single
    found, said = tuned(
        SHM, tmp_path, lambda name, number: 2.0 - 0.3 * ("single" in name), "--knobs", "strategy",
        foresight=TabledForesight(steps_s, factor),
    )  # fmt: skip
    were_run = {name.partition(",")[0] for name in found.runs.calls}
    assert were_run == {"ddp", "torch-ddp", "dp", "single", "sharded"} - set(unrun)
    assert found.now.row.strategy == "single"
    assert "not torch-ddp, 2 ranks of 2 threads: predicted to take 1.50 times as long as sharded" in said


def test_a_profile_is_measured_only_where_it_can_save_more_time_than_it_takes(tmp_path: Path) -> None:
    what, said = SimpleNamespace(conditions={}), io.StringIO()
    foresight = Foresight(what, SHM, None, tmp_path / "profile.json", 60.0, Console(file=said))  # type: ignore[arg-type]
    settings = [SHM.default(), *SHM.others("strategy", SHM.default(), None)[0]]
    assert foresight.far_behind(settings, 59.0) == {} and said.getvalue() == ""
    on_cuda = Foresight(what, CUDA, None, tmp_path / "profile.json", 0.0, Console(file=said))  # type: ignore[arg-type]
    assert on_cuda.far_behind(settings, 1e9) == {} and said.getvalue() == ""


def test_equal_settings_leave_the_default(tmp_path: Path) -> None:
    found, said = tuned(SHM, tmp_path, lambda name, number: 1 + 0.02 * ((number * 13) % 7 - 3) / 3)
    assert found.now == SHM.default() and found.gain == 1.0
    assert "no difference that counts, so the default stays" in said


def test_when_every_trial_dies_the_first_reasons_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"every contender has failed: ddp, 2 ranks of 2 threads: failed: no memory"):
        tuned(SHM, tmp_path, lambda name, number: "no memory", "--knobs", "fused")


def test_a_plan_counts_for_the_machine_and_training_for_which_it_was_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text("")
    found, _ = tuned(SHM, tmp_path, lambda name, number: 1.0, "--knobs", "fused")
    same = {**describe().conditions, "workload": "text"}
    write_plan(command._plan(found, same), out)
    assert read(["--plan", str(out), str(script)]).strategy == "ddp"
    console, namespace = Console(stderr=True, width=500), argparse.Namespace(fresh=False)
    assert command._earlier(namespace, out, same, console) == read_plan(str(out))
    assert command._earlier(namespace, out, {**same, "workload": "synthetic"}, console) is None
    assert "workload was text, is synthetic" in capsys.readouterr().err
    document = json.loads(out.read_text())
    document["tuned_on"]["torch"] = "1.0"
    out.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=rf"torch was 1\.0, is {re.escape(torch.__version__)}"):
        read(["--plan", str(out), str(script)])
    document["tuned_on"] = {}
    out.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="holds a plan that was not tuned"):
        command._earlier(namespace, out, same, console)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--knobs", "threads"], "no such knob"),
        (["--knobs", ","], "names none"),
        (["--rounds", "2"], "--rounds is a count of at least 3"),
        (["--margin", "0"], "--margin is a percentage"),
        (["--timeout", "-1"], "--timeout is a number of seconds"),
        (["--timeout", "inf"], "--timeout is a number of seconds"),
        (["--out", "/nowhere/at/all"], "--out is no file"),
        (["--out", "."], "--out is no file"),
        (["--out", "notes.txt"], "this is no plan"),
        (["--out", "new.json", "--profile", "new.json"], "--profile and --out are one file"),
        (["--profile", "."], "--profile is a folder"),
    ],
)
def test_options_that_cannot_work(words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("of a user")
    with pytest.raises(UsageError, match=f"{text}.*Fix: "):
        command.run(parser().parse_args(words))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of a user"]


@pytest.mark.parametrize(
    "content", [b"", b'{"half', b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"schema_version": 0}']
)
def test_a_profile_that_cannot_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"profile.*profile\.json.*Fix: remove .*profile\.json"):
        profiles.read(tmp_path / "profile.json", {})


def test_knobs_keep_their_order_and_a_fused_optimizer_steps() -> None:
    assert chosen_knobs("groups, ranks") == ("ranks", "groups") and chosen_knobs(",".join(KNOBS)) == KNOBS
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], 0.1)
    fuse(optimizer)
    weight.sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] and not torch.equal(weight, torch.ones(3))
    with pytest.raises(UsageError, match="no fused form"):
        fuse(torch.optim.LBFGS([weight]))
