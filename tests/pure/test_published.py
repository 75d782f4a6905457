"""The published points are whole, are predicted as well as they were, and no prediction saw what it is judged on."""

from __future__ import annotations

import pytest

from benchmarks.published import __main__ as command
from benchmarks.published import data_parallel, trainings
from benchmarks.published.points import all_series, percent, read, rows


def test_every_series_has_its_source_and_its_numbers_are_plausible() -> None:
    sources = read("scaling")["sources"]
    assert sum(len(series.points) for series in all_series()) == 296
    for series in all_series():
        assert series.about["source"] in sources and {"model", "machine", "precision", "batch"} <= series.about.keys()
        ns = list(series.points)
        assert ns == sorted(ns) and min(series.points.values()) > 0
        # One GPU's part of the work never takes less than 0.7 times, nor more than four times, of what it takes first.
        if series.about["table"] in ("weak", "weak-large", "fsdp"):
            first = series.times[ns[0]]
            assert all(0.7 < t / first < 4 for t in series.times.values()), series.name
    for each in read("layouts").values():
        assert each["source"] and each["label"] in ("R", "img") and all(rows(each))


@pytest.mark.parametrize(
    ("make", "num_points", "most"),
    [
        (data_parallel.one_two_four, 27, 0.02),
        (data_parallel.one_four, 14, 0.04),
        (data_parallel.to_256, 14, 0.05),
        (data_parallel.fully_sharded, 19, 0.04),
        (data_parallel.large_weak, 18, 0.01),
        (data_parallel.strong, 2, 0.03),
        (trainings.days, 12, 0.022),
        (trainings.bert_hours, 2, 0.02),
        (trainings.activation_memory, 8, 1e-12),
        (trainings.budget, 1, 0.0),
        (trainings.data_ways, 4, 0.03),
    ],
)
def test_the_error_is_what_it_was(make: object, num_points: int, most: float) -> None:
    protocol = make()  # type: ignore[operator]
    errors, null = protocol.errors(), protocol.null_error()
    assert errors.num == num_points and errors.mean <= most
    assert null is None or errors.mean < null  # else perfect scaling would do


def test_utilization_agrees_to_a_fifth_of_a_point() -> None:
    found = trainings.utilization().points
    assert len(found) == 4 and all(abs(point.predicted - point.published) <= 0.2 for point in found)


def test_outliers_are_named_and_not_fitted() -> None:
    weak, sharded = data_parallel.one_two_four().outliers, data_parallel.fully_sharded().outliers
    assert len(weak) == 5 and all("V100-16 DGX-1" in each and "at 2 GPUs" in each for each in weak)
    assert len(sharded) == 1 and sharded[0].startswith("mpt-1b A100-40 bf16: at 32 GPUs")
    neighbours = [p for p in data_parallel.fully_sharded().points if p.what == "mpt-1b A100-40 bf16"]
    assert len(neighbours) == 2 and all(abs(p.predicted / p.published - 1) < 0.05 for p in neighbours)


def test_what_is_judged_does_not_move_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [point.predicted for point in data_parallel.one_two_four().points + data_parallel.to_256().points]
    scaling = read("scaling")
    for series in scaling["series"]:
        judged = (
            ("8", "16")
            if {"1", "2", "4"} <= series["points"].keys()
            else ("128", "256", "64"[: 2 * ("8" in series["points"])])
        )
        series["points"] = {n: value * (1.5 if n in judged else 1) for n, value in series["points"].items()}
    monkeypatch.setattr("benchmarks.published.points.read", lambda name: scaling)
    after = [point.predicted for point in data_parallel.one_two_four().points + data_parallel.to_256().points]
    assert after == before


def test_the_command_prints_each_point_and_the_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    found = command.protocols()
    for protocol in found:
        assert shown.count(protocol.title) >= 2 and percent(protocol.errors().mean) in shown
    assert "994,400" in shown
    assert shown.count("GPUs, tokens/s") > 50 and "Outliers" in shown
    assert command.main(["--summary"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < len(shown.splitlines()) - 150
