"""The order of the runs of a comparison and what becomes of their failures; the runs themselves are played."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import guozhuang
from guozhuang import records, units, workloads
from guozhuang.errors import UsageError
from guozhuang.lab import compare, options, plots
from guozhuang.lab.progress import Forecast, PlannedRun, about, about_span
from guozhuang.lab.results import RankRecord, Results, RunFailure, from_json
from guozhuang.lab.runs import Runs, first_cause
from guozhuang.lab.worker import RunSpec
from tests.processes import tiny_workload
from tests.pure.made_up import record

Play = Callable[[RunSpec], tuple[RankRecord, ...] | RunFailure]


def _draw_nothing(results: Results) -> dict[str, plots.Picture]:
    return {name: plots.Picture(b"", "", "") for name in plots.NAMES}


def _run(
    monkeypatch: pytest.MonkeyPatch, out: Path, play: Play, *arguments: str, trial: Play | None = None
) -> tuple[int, Results]:
    def execute(_: Runs, spec: RunSpec, log: Path, tick: Callable[[int], None]) -> tuple[RankRecord, ...] | RunFailure:
        log.write_text(f"the log of {spec.strategy}")
        return (trial or _well)(spec) if spec.purpose == "trial" else play(spec)

    monkeypatch.setattr(Runs, "execute", execute)
    monkeypatch.setattr(compare, "busy_share", lambda: 0.9)
    monkeypatch.setattr(plots, "draw", _draw_nothing)
    parser = options.parser()
    told = parser.parse_args(["--workload", "tests.processes.tiny_workload:make", "--out", str(out), *arguments])
    code = compare.run(told)
    return code, from_json((out / "results.json").read_text())


def test_from_python_with_a_function_of_a_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: dict[str, object] = {}

    def execute(_: Runs, spec: RunSpec, log: Path, tick: Callable[[int], None]) -> tuple[RankRecord, ...] | RunFailure:
        log.write_text("")
        made.update(workload=workloads.load(spec.workload, spec.options), name=spec.workload)
        return RunFailure("it broke", "", 0) if spec.strategy == "none" else _well(spec)

    monkeypatch.setattr(Runs, "execute", execute)
    monkeypatch.setattr(plots, "draw", _draw_nothing)
    monkeypatch.setattr(compare, "busy_share", lambda: 0.0)
    monkeypatch.chdir(tmp_path)
    size = 5

    def own_model(options: dict[str, str]) -> workloads.Workload:  # closes over a name here: no process can import it
        return replace(tiny_workload.make({}), details={"size": size, **options})

    told = {"ranks": 2, "steps": 3, "rounds": 1, "out": "there", "option": {"depth": 2}, "progress": False}
    found = guozhuang.compare(own_model, ["single", "ddp@gloo", "none"], **told)
    assert isinstance(made["workload"], workloads.Workload) and str(made["name"]).endswith("/own_model.pickle")
    assert made["workload"].details == {"size": 5, "depth": "2"} and not Path(str(made["name"])).exists()
    assert [(row.name, row.ok) for row in found.rows] == [("single", True), ("ddp@gloo", True), ("none", False)]
    assert found["ddp@gloo"].samples_per_s == pytest.approx(150) and found["none"].failure is not None
    assert found.verdict.recommended == "ddp@gloo" and found.report == tmp_path / "there" / "report.html"
    assert found.results.workload == "own_model" and "own_model" in str(found) and "Take ddp@gloo" in str(found)
    assert found.results.command.startswith(
        "guozhuang.compare(own_model, strategies=['single', 'ddp@gloo', 'none'], ranks=2"
    )
    with pytest.raises(KeyError, match="dp was not compared; rows: single"):
        found["dp"]
    # One that others can import is named.
    guozhuang.compare(tiny_workload.make, "single", rounds=1, progress=False)
    assert made["name"] == "tests.processes.tiny_workload:make"
    for wrong, said in (
        ({"step": 3}, "write steps"),
        ({"fused": 1}, "is true or false"),
        ({"steps": "x"}, "invalid int"),
    ):
        with pytest.raises(UsageError, match=said):
            guozhuang.compare(tiny_workload.make, "single", **wrong)
    with pytest.raises(UsageError, match="neither a name nor a function"):
        guozhuang.compare(3, "single")  # type: ignore[arg-type]


def _well(spec: RunSpec) -> tuple[RankRecord, ...]:
    if spec.purpose == "timeline":
        return ()
    one = spec.strategy in ("single", "dp")
    return (record(0, 100, 8, 1),) if one else tuple(record(r, 150, 4, 2) for r in range(2))


def test_every_strategy_gets_its_turn_at_every_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    def play(spec: RunSpec) -> tuple[RankRecord, ...]:
        seen.append((spec.strategy, spec.purpose))
        return _well(spec)

    code, results = _run(monkeypatch, tmp_path, play, "--strategies", "single,ddp,none", "--rounds", "3")
    assert code == 0
    assert [name for name, _ in seen] == ["single", "ddp", "none", "ddp", "none", "single", "none", "single", "ddp"]
    assert [purpose for _, purpose in seen] == ["first"] * 3 + ["timing"] * 6
    assert [len(row.rounds) for row in results.rows] == [3, 3, 3]
    assert any("90 % of the cores busy" in note for note in results.notes)


@pytest.mark.parametrize(
    ("of_ddp", "more_each_time", "arguments", "num_rounds", "said"),
    [
        (150, 0, (), (2, 2), "2 rounds were enough: no strategy's differ by more than 5 %"),
        (102, 0, (), (3, 3), ""),
        (150, 0, ("--rounds", "3"), (3, 3), ""),
        (150, 0.1, (), (2, 3), "2 rounds were enough for single: another one would not change the verdict"),
        (
            150,
            0.5,
            (),
            (2, 2),
            f"2 rounds were made: those of ddp differ by {units.times(4 / 3)}, so that one more would not settle",
        ),
        (150, 0.5, ("--rounds", "3"), (3, 3), ""),
    ],
    ids=["clear", "near", "asked for", "one differs", "restless", "restless and asked for"],
)
def test_a_third_round_is_made_where_it_can_change_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    of_ddp: float,
    more_each_time: float,
    arguments: tuple[str, ...],
    num_rounds: tuple[int, int],
    said: str,
) -> None:
    runs: list[str] = []

    def play(spec: RunSpec) -> tuple[RankRecord, ...]:
        runs.append(spec.strategy)
        speed = of_ddp * (1 + more_each_time * runs.count("ddp"))
        return _well(spec) if spec.strategy == "single" else tuple(record(r, speed, 4, 2) for r in range(2))

    _, results = _run(monkeypatch, tmp_path, play, "--strategies", "single,ddp", *arguments)
    assert len(runs) == sum(num_rounds)
    assert tuple(len(row.rounds) for row in results.rows) == num_rounds
    assert results.settings.num_rounds == max(num_rounds)
    assert [note for note in results.notes if "2 rounds were" in note and said in note] == [
        note for note in results.notes if "2 rounds were" in note
    ]
    assert any(said in note for note in results.notes)


def test_a_failure_ends_only_its_own_strategy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def play(spec: RunSpec) -> tuple[RankRecord, ...] | RunFailure:
        seen.append(spec.strategy)
        return RunFailure("it broke", "", 0) if spec.strategy == "ddp" and seen.count("ddp") == 2 else _well(spec)

    code, results = _run(monkeypatch, tmp_path, play, "--strategies", "single,ddp", "--rounds", "3")
    assert code == 0
    assert seen == ["single", "ddp", "ddp", "single", "single"]
    failed = results.rows[1]
    assert failed.failure is not None and failed.failure.round == 2
    assert not failed.ok
    assert Path(failed.failure.log).read_text() == "the log of ddp"


def test_when_all_fail_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, results = _run(monkeypatch, tmp_path, lambda spec: RunFailure("no", "", 0), "--strategies", "ddp,none")
    assert code == 1
    assert all(row.failure is not None and row.rounds == () for row in results.rows)


def test_a_timeline_that_fails_costs_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def play(spec: RunSpec) -> tuple[RankRecord, ...] | RunFailure:
        if spec.purpose != "timeline":
            return _well(spec)
        (Path(spec.folder) / "timeline-0.json").write_text('{"traceEvents": []}')
        return RunFailure("no disk", "", 0) if spec.strategy == "none" else ()

    trace = tmp_path / "traces" / "t.json"
    _, results = _run(
        monkeypatch, tmp_path, play, "--strategies", "ddp,none", "--rounds", "1", "--timeline", str(trace)
    )
    assert [row.ok for row in results.rows] == [True, True]
    assert results.rows[0].timeline == str(tmp_path / "traces" / "t-ddp.json")
    assert Path(results.rows[0].timeline).exists()
    assert results.rows[1].timeline is None
    assert any("no timeline of none: no disk" in note for note in results.notes)


def test_json_goes_to_standard_output_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, results = _run(monkeypatch, tmp_path, _well, "--strategies", "single", "--rounds", "1", "--json")
    assert from_json(capsys.readouterr().out) == results


class _Interrupted:
    """Plays runs until a number of them are made, then interrupts the comparison."""

    def __init__(self, num_runs: int, out: Path) -> None:
        self.num_runs, self.out, self.seen = num_runs, out, list[tuple[str, str]]()

    def __call__(self, spec: RunSpec) -> tuple[RankRecord, ...] | RunFailure:
        if len(self.seen) == self.num_runs:
            raise KeyboardInterrupt
        self.seen.append((spec.strategy, spec.purpose))
        if spec.purpose == "first":
            torch.save({"w": torch.tensor([float(len(spec.strategy))])}, Path(spec.folder) / "weights.pt")
        return _well(spec)


ALL_RUNS = [
    ("single", "first"),
    ("ddp", "first"),
    ("none", "first"),
    ("ddp", "timing"),
    ("none", "timing"),
    ("single", "timing"),
]
COMPARED = ("--strategies", "single,ddp,none", "--rounds", "2")


@pytest.mark.parametrize("num_runs", [0, 2, 4])
def test_an_interrupted_comparison_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_runs: int
) -> None:
    begun, rest = _Interrupted(num_runs, tmp_path), _Interrupted(99, tmp_path)
    with pytest.raises(FileNotFoundError):  # there is no results.json
        _run(monkeypatch, tmp_path, begun, *COMPARED)
    said = capsys.readouterr().err
    assert ("Nothing was written" if num_runs == 0 else f"{num_runs} finished run") in said
    assert (tmp_path / "unfinished").exists() is (num_runs > 0)
    code, results = _run(monkeypatch, tmp_path, rest, *COMPARED)
    said = " ".join(capsys.readouterr().err.split())
    assert code == 0 and begun.seen + rest.seen == ALL_RUNS
    assert (f"{num_runs} finished run(s) of single" in said) is (num_runs > 0)
    assert any("not made by this command, but before" in note for note in results.notes) is (num_runs > 0)
    assert [(row.name, len(row.rounds)) for row in results.rows] == [("single", 2), ("ddp", 2), ("none", 2)]
    assert [row.difference.largest for row in results.rows if row.difference] == [3.0, 2.0]  # of the lengths of names
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"report.html", "results.json", "speed.png", "step.png", "loss.png"}


def test_what_must_match_is_compared_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted_after(num_runs: int, *more: str) -> tuple[list[tuple[str, str]], str]:
        play = _Interrupted(num_runs, tmp_path)
        (tmp_path / "results.json").unlink(missing_ok=True)
        with pytest.raises(FileNotFoundError):
            _run(monkeypatch, tmp_path, play, *COMPARED, *more)
        return play.seen, " ".join(capsys.readouterr().err.split())

    interrupted_after(2)
    seen, said = interrupted_after(1, "--steps", "7", "--option", "a=1")
    assert seen == ALL_RUNS[:1]
    assert "do not count here and were removed" in said and "steps was 50, is 7" in said
    assert "workload option a was not set, is" in said
    # A failed run is made again, more rounds and other strategies are added to what is there, damage is not trusted.
    _, results = _run(
        monkeypatch, tmp_path, lambda spec: RunFailure("no", "", 0), *COMPARED, "--steps", "7", "--option", "a=1"
    )
    assert [row.ok for row in results.rows] == [False] * 3 and "--fresh" in capsys.readouterr().err
    interrupted_after(3)
    (tmp_path / "unfinished" / "run-round1-ddp.json").write_text("{")
    (tmp_path / "unfinished" / "differences.json").write_text("")
    play = _Interrupted(99, tmp_path)
    _, results = _run(monkeypatch, tmp_path, play, "--strategies", "none,single,ddp,dp", "--rounds", "1")
    assert play.seen == [("ddp", "first"), ("dp", "first")] and all(row.ok for row in results.rows)
    interrupted_after(3)
    seen, said = interrupted_after(1, "--fresh")
    assert seen == ALL_RUNS[:1] and "Going on" not in said


def test_two_comparisons_do_not_write_to_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def play(spec: RunSpec) -> tuple[RankRecord, ...]:
        with pytest.raises(UsageError, match=r"another comparison writes to this folder now .*another --out"):
            _run(monkeypatch, tmp_path, _well, "--strategies", "single", "--steps", "7")
        monkeypatch.setattr(Runs, "execute", lambda _, spec, log, tick: (log.write_text(""), _well(spec))[1])
        return _well(spec)

    code, results = _run(monkeypatch, tmp_path, play, "--strategies", "single,ddp", "--rounds", "1")
    assert code == 0 and results.settings.num_steps == 50
    assert _run(monkeypatch, tmp_path, _well, "--strategies", "single")[0] == 0, "the folder is free again"


def test_a_full_disk_costs_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write = records.write_text

    def full(path: Path, text: str) -> None:
        if path.parent.name == "unfinished" and path.name != "comparison.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(records, "write_text", full)
    code, results = _run(monkeypatch, tmp_path, _Interrupted(99, tmp_path), *COMPARED)
    assert code == 0 and [len(row.rounds) for row in results.rows] == [2, 2, 2]
    assert [note for note in results.notes if "could not be kept" in note and "No space left on device" in note]
    assert [row.difference.largest for row in results.rows if row.difference] == [3.0, 2.0]


def test_how_long_it_takes_is_said_before_and_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(monkeypatch, tmp_path, _well, "--device", "cpu")
    said = " ".join(capsys.readouterr().err.split())
    assert "which suit this machine; --all compares all" in said
    assert re.search(
        r"18 runs of 5 \+ 50 steps in up to 3 round\(s\): about [\d a-z]+; a step took .+ under single and .+ under ddp in",
        said,
    )
    assert re.search(r"\[1/18\] round 1/3, single: 100 samples/s, about \d+ \w+ left", said)
    assert "would take" not in said
    _run(monkeypatch, tmp_path, _well, "--steps", "2000", "--device", "cpu")
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"about \d+ to \d+ min; a step took .* --steps 20 --rounds 2 would take about [1-4]\d s\.", said)


def test_a_trial_that_hangs_does_not_hold_the_comparison_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []

    def hangs(spec: RunSpec) -> RunFailure:
        limits.append(spec.timeout_s)
        return RunFailure(first_cause(tmp_path, tmp_path / "log", None, spec.timeout_s), "", 0)

    code, _ = _run(monkeypatch, tmp_path, _well, "--strategies", "ddp,none", "--rounds", "3", trial=hangs)
    said = " ".join(capsys.readouterr().err.split())
    assert code == 0 and limits == [300.0] and "; a trial of ddp failed: no end after 300 s. " in said, said


def test_a_forecast_learns_from_runs() -> None:
    forecast = Forecast()
    first, later = PlannedRun("ddp", "round 1/3", True, 100, False), PlannedRun("ddp", "round 2/3", False, 100, False)
    other = PlannedRun("none", "round 1/3", True, 10, False)
    assert forecast.seconds([first]) is None
    forecast.note(first, duration_s=15.0, step_s=0.1)  # 5 s besides its steps
    assert forecast.seconds([later]) == pytest.approx(15.0) and forecast.seconds([other]) == pytest.approx(6.0)
    forecast.note(later, duration_s=12.0, step_s=0.11)
    assert forecast.seconds([later, later]) == pytest.approx(24.0) and forecast.seconds([first]) == pytest.approx(16.0)
    alone = PlannedRun("single", "trial", False, 4, True)
    forecast.note(alone, duration_s=9.0, step_s=1.0)  # what one process takes says nothing of ranks
    assert forecast.seconds([other]) == pytest.approx(5 + 1.1)
    assert [about(s) for s in (1, 62, 100, 3500, 4000, 7000)] == ["5 s", "60 s", "2 min", "58 min", "1 h 10 min", "2 h"]
    assert [about_span(*s) for s in ((10, 20), (80, 200), (300, 310))] == ["10 to 20 s", "80 s to 3 min", "5 min"]
