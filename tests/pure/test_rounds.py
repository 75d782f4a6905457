"""The order of the runs of a comparison and what becomes of their failures; the runs themselves are played."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from guozhuang.lab import compare, options
from guozhuang.lab.results import RankRecord, Results, RunFailure, from_json
from guozhuang.lab.runs import Runs
from guozhuang.lab.worker import RunSpec
from tests.pure.made_up import record

Play = Callable[[RunSpec], tuple[RankRecord, ...] | RunFailure]


def _run(monkeypatch: pytest.MonkeyPatch, out: Path, play: Play, *arguments: str) -> tuple[int, Results]:
    def execute(_: Runs, spec: RunSpec, log: Path, tick: Callable[[int], None]) -> tuple[RankRecord, ...] | RunFailure:
        log.write_text(f"the log of {spec.strategy}")
        return play(spec)

    monkeypatch.setattr(Runs, "execute", execute)
    monkeypatch.setattr(compare, "busy_share", lambda: 0.9)
    parser = options.parser()
    told = parser.parse_args(["--workload", "tests.processes.tiny_workload:make", "--out", str(out), *arguments])
    code = compare.run(told)
    return code, from_json((out / "results.json").read_text())


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
    ("of_ddp", "arguments", "num_rounds"),
    [(150, (), 2), (102, (), 3), (150, ("--rounds", "3"), 3), (0, (), 3)],
    ids=["clear", "near", "asked for", "restless"],
)
def test_two_rounds_are_enough_where_a_third_would_not_change_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_ddp: float, arguments: tuple[str, ...], num_rounds: int
) -> None:
    runs: list[str] = []

    def play(spec: RunSpec) -> tuple[RankRecord, ...]:
        runs.append(spec.strategy)
        restless = 150 * (1 + 0.1 * runs.count("ddp"))
        return (
            _well(spec) if spec.strategy == "single" else tuple(record(r, of_ddp or restless, 4, 2) for r in range(2))
        )

    _, results = _run(monkeypatch, tmp_path, play, "--strategies", "single,ddp", *arguments)
    assert len(runs) == 2 * num_rounds
    assert [len(row.rounds) for row in results.rows] == [num_rounds] * 2
    assert results.settings.num_rounds == num_rounds
    assert any("2 rounds were enough" in note for note in results.notes) is (num_rounds == 2)


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
