"""Steps predicted from measured steps in a file: what is written, what the rows around one say, and what is refused."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guozhuang.cost.step import A100, step
from guozhuang.errors import UsageError

calibrated = pytest.importorskip("benchmarks.published.calibrated")
published = pytest.importorskip("benchmarks.published.__main__")

COLUMNS = ("params_b", *calibrated.SIZES)
TRUTH = dataclasses.replace(A100, host_s=1.3e-3, matmul=0.84, data=0.4)


def row(**sizes: Any) -> dict[str, Any]:
    usual = {"params_b": "", "gpus": 8, "global_batch": 64, "micro_batch": 1, "hidden": 2048, "heads": 16, "layers": 24}
    return {**usual, "sequence": 1024, "tensor": 1, "data": 8, "pipeline": 1, **sizes}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def true_ms(sizes: dict[str, Any]) -> float:
    each = calibrated.Row({name: int(sizes[name]) for name in calibrated.SIZES}, None, 0, {}).measured()
    return 1e3 * step(each.model, cluster=each.cluster, coefficients=TRUTH, **each.layout).seconds


def alternatives() -> list[dict[str, Any]]:
    ways = [(1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (1, 2, 4), (2, 2, 2)]
    return [row(tensor=t, data=d, pipeline=p, micro_batch=b) for t, d, p in ways for b in (1, 2, 8)]


def test_a_file_is_predicted_and_written_with_the_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = alternatives()
    known = write(tmp_path / "known.csv", [{"set": "any", **r, "step_ms": true_ms(r)} for r in rows[::2]])
    wanted = [*rows[1::2], row(gpus=16, data=16, hidden=8192)]
    asked, out = write(tmp_path / "rows.csv", wanted), tmp_path / "out.csv"
    assert published.main(["--calibration", str(known), "--rows", str(asked), "--out", str(out)]) == 0
    with out.open() as file:
        reader = csv.DictReader(file)
        found = list(reader)
    assert reader.fieldnames == [*COLUMNS, "step_ms"]
    assert [{name: str(r[name]) for name in COLUMNS} for r in wanted] == [
        {name: r[name] for name in COLUMNS} for r in found
    ]
    for sizes, written in zip(rows[1::2], found, strict=False):
        assert float(written["step_ms"]) == pytest.approx(true_ms(sizes), rel=0.05)
    told = capsys.readouterr().err
    assert "one node: 9 rows, calibrated on 9 rows" in told and "90 % interval" in told
    assert "many nodes: 1 rows, no row of the calibration is of this machine" in told
    assert f"{asked}, line 3: outside" not in told


def test_what_coefficients_leave_over_is_learnt_where_it_is(tmp_path: Path) -> None:
    """One layout ran on a slow node: its other micro-batches are slow too, other layouts are not."""
    rows = [
        row(gpus=64, global_batch=512, hidden=h, layers=30, tensor=t, data=64 // t // p, pipeline=p, micro_batch=b)
        for h in (3072, 6144)
        for t, p in ((1, 1), (2, 1), (4, 1), (2, 2), (8, 2))
        for b in (1, 2, 4)
    ]  # fmt: skip

    def is_slow(sizes: dict[str, Any]) -> bool:
        return bool(sizes["hidden"] == 6144 and sizes["tensor"] == 2 and sizes["pipeline"] == 2)

    measured = [{**r, "step_ms": true_ms(r) * (1.5 if is_slow(r) else 1)} for r in rows]
    left_out = [n for n, r in enumerate(rows) if r["micro_batch"] == 2]
    known = write(tmp_path / "known.csv", [r for n, r in enumerate(measured) if n not in left_out])
    found = calibrated.calibrate(calibrated.read(known, measured=True))
    assert found.alike == "layout"
    asked = calibrated.read(write(tmp_path / "rows.csv", [rows[n] for n in left_out]), measured=False)
    for seconds, n in zip(found.predict(asked), left_out, strict=True):
        assert 1e3 * seconds == pytest.approx(measured[n]["step_ms"], rel=0.1 if is_slow(rows[n]) else 0.05)


def test_the_error_on_rows_left_out_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = write(tmp_path / "known.csv", [{**r, "step_ms": true_ms(r)} for r in alternatives()[::2]])
    assert published.main(["--calibration", str(known), "--check", "--fit"]) == 0
    told = capsys.readouterr().out
    assert "8 known rows (each row from all others): mean" in told
    assert "1 groups: regret mean 0.0%" in told and "host_s=" in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data": 4}, "line 3: The ways of the layout do not multiply to the number of devices, 8"),
        ({"global_batch": 63}, "line 3: The batch is not a multiple of data"),
        ({"hidden": "wide"}, "line 3: hidden is not a positive whole number (got 'wide')"),
        ({"layers": "2.5"}, "line 3: layers is not a positive whole number (got '2.5')"),
        ({"micro_batch": -1}, "line 3: micro_batch is not a positive whole number (got '-1')"),
        ({"sequence": "nan"}, "line 3: sequence"),
        ({"tensor": "", "data": 8}, "line 3: tensor"),
        ({"gpus": 12, "data": 12, "global_batch": 48}, "line 3: gpus on several nodes fill nodes of 8"),
        ({"pipeline": 8, "data": 1, "layers": 4}, "line 3: There are more stages than layers"),
        ({"heads": 3}, "line 3: The hidden width"),
    ],
)
def test_rows_that_cannot_be_are_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        calibrated.read(write(tmp_path / "rows.csv", [row(), row(**change)]), measured=False)
    assert told in str(refused.value) and "Fix: " in str(refused.value)


@pytest.mark.parametrize(
    "change",
    {
        "BOM": lambda text: "\ufeff" + text,
        "CRLF": lambda text: text.replace("\n", "\r\n"),
        "CR": lambda text: text.replace("\n", "\r"),
        "blank lines": lambda text: "\n \n" + text.replace("\n", "\n\n") + ",,,\n",
        "quoted": lambda text: '"' + text.replace(",", '","').replace("\n", '"\n"').removesuffix('"'),
        "written as floats": lambda text: text.replace(",24,", ",24.0,").replace(",8,", ", 8.0 ,"),
        "without params_b": lambda text: re.sub("(?m)^[^,\n]*,", "", text),
        "step_ms is empty": lambda text: text.replace("pipeline", "pipeline,step_ms").replace(",1\n", ",1,\n"),
        "more columns": lambda text: re.sub("(?m)$(?!\\Z)", ',"a, ""b"" c"', text),
    }.items(),
    ids=lambda each: each[0],
)
def test_a_table_may_be_written_in_many_ways(tmp_path: Path, change: tuple[str, Callable[[str], str]]) -> None:
    plain = write(tmp_path / "rows.csv", [row(data=4, tensor=2), row()]).read_text().replace("\r", "")
    other = tmp_path / "other.csv"
    other.write_bytes(change[1](plain).encode())
    found = [calibrated.read(path, measured=False) for path in (tmp_path / "rows.csv", other)]
    assert [each.sizes for each in found[0]] == [each.sizes for each in found[1]]


@pytest.mark.parametrize("out", ["rows.csv", "known.csv", "link.csv", ".", "absent/out.csv"])
def test_an_output_that_cannot_be_leaves_all_files_as_they_are(tmp_path: Path, out: str) -> None:
    known = write(tmp_path / "known.csv", [{**row(), "step_ms": 100}])
    rows = write(tmp_path / "rows.csv", [row()])
    (tmp_path / "link.csv").symlink_to(known)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match="--out names"):
        calibrated.predict(known, rows, tmp_path / out)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "lacks the columns gpus"),
        ("gpus,tensor\n8,1\n", "lacks the columns global_batch"),
        (",".join(calibrated.SIZES) + ",step_ms\n\n", "has no rows"),
        (",".join(calibrated.SIZES) + ",step_ms,gpus\n", "has a column twice: 'gpus'"),
        (",".join(calibrated.SIZES) + ",step_ms\n8,64\n", "line 2 has 2 values for 11 columns"),
        (",".join(calibrated.SIZES) + ',step_ms\n\n8,"64', "line 3 cannot be read as cells of a table"),
        (",".join(calibrated.SIZES) + ",step_ms,note\n" + "8" * 200_000, "line 2 cannot be read as cells of a table"),
        (",".join(calibrated.SIZES) + ",step_ms\n8,64,1,2048,16,24,1024,1,8,1,0\n", "step_ms is not a positive number"),
    ],
)
def test_files_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    (tmp_path / "known.csv").write_text(text)
    with pytest.raises(SystemExit) as ended:
        published.main(["--calibration", str(tmp_path / "known.csv"), "--fit"])
    assert ended.value.code == 2 and told in capsys.readouterr().err
    with pytest.raises(UsageError, match="cannot be read"):
        calibrated.read(tmp_path / "absent.csv", measured=True)


@pytest.mark.parametrize("options", [["--rows", "x"], ["--calibration", "x"], ["--calibration", "x", "--rows", "y"]])
def test_options_that_go_together(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        published.main(options)
    assert "--calibration FILE" in capsys.readouterr().err
