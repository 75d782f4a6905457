"""Predict measured steps of transformers from other measured steps of the same machines.

python -m benchmarks.published --calibration FILE --rows FILE --out FILE   predicts the rows of a file
python -m benchmarks.published --calibration FILE --check                  how far off: by cross-validation
python -m benchmarks.published --calibration FILE --fit                    coefficients of all rows together

Rows on one node and rows on several are two machines: coefficients of `guozhuang.cost.step` are fitted to each. What they leave
over is similar for similar rows: either for all micro-batches of one layout (its ranks' place on the nodes, its slow node), or
for one layer (the width, tensor ways and micro-batch of its kernels). A Gaussian process whose kernel is of one of these two
adds that, drawn to 0 away from measured rows; which of the two, or none, is decided by leaving out rows of the calibration.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import functools
import io
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from guozhuang.cost.cluster import Cluster
from guozhuang.cost.describe import parse_cluster
from guozhuang.cost.fit import conformal_factor, least_held_out, summarize_errors
from guozhuang.cost.step import A100, Coefficients, MeasuredStep, fit, step
from guozhuang.cost.transformer import Transformer
from guozhuang.errors import UsageError, explain
from guozhuang.records import write_text

SIZES = (
    "gpus",
    "global_batch",
    "micro_batch",
    "hidden",
    "heads",
    "layers",
    "sequence",
    "tensor",
    "data",
    "pipeline",
)
PER_NODE, VOCABULARY = 8, 51200  # of the published measurements; their models are GPT's with this padded vocabulary
ONE_NODE, MANY_NODES = "one node", "many nodes"
RECOMPUTE = {ONE_NODE: "none", MANY_NODES: "full"}

# Distances at which the likeness of two rows falls to 1/e, in doublings of each size. None: no correction.
ALIKE = {
    "none": None,
    "layout": {"hidden": 0.3, "layers": 9, "tensor": 0.3, "data": 0.3, "pipeline": 0.3, "micro_batch": 3},
    "layer": {"hidden": 1, "layers": 9, "tensor": 1, "data": 9, "pipeline": 3, "micro_batch": 1},
}
LEFT_OVER, NOISE = 0.1, 0.03  # of logarithms: what the coefficients leave over, what no neighbour tells


@dataclass(frozen=True)
class Row:
    """A row of a file: the sizes of a training, the measured seconds of its step (None in a file to predict), and its line."""

    sizes: dict[str, int]
    seconds: float | None
    line: int
    cells: dict[str, str]

    @property
    def machine(self) -> str:
        return ONE_NODE if self.sizes["gpus"] <= PER_NODE else MANY_NODES

    def measured(self) -> MeasuredStep:
        """Return the row as a training; its seconds are 1 where none were measured."""
        s = self.sizes
        layout = {name: s[name] for name in ("global_batch", "micro_batch", "tensor", "data", "pipeline")}
        return MeasuredStep(
            _model(s["layers"], s["hidden"], s["heads"], s["sequence"]),
            _cluster(s["gpus"]),
            {**layout, "recompute": RECOMPUTE[self.machine]},
            self.seconds or 1.0,
        )


@functools.cache
def _model(layers: int, hidden: int, heads: int, sequence: int) -> Transformer:
    return Transformer(layers, hidden, heads, sequence, VOCABULARY)


@functools.cache
def _cluster(gpus: int) -> Cluster:
    if gpus <= PER_NODE:
        return parse_cluster(f"1x{gpus}xA100-80")
    return parse_cluster(f"{gpus // PER_NODE}x{PER_NODE}xA100-80,ib=4x200gbit")


def read(path: Path, *, measured: bool) -> list[Row]:
    """Read a file of rows; ``measured``: with the column ``step_ms``.

    Raises:
        UsageError: the file cannot be read, lacks a column or has no row; a value is no number that can be; a row's layout
            contradicts itself. The text names the line, the column and the value.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageError(
            explain(f"{path} cannot be read as a table", value=str(fault), fix="name a CSV file")
        ) from fault
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as fault:
        what = f"{path}, line {reader.line_num} cannot be read as cells of a table: {fault}"
        raise UsageError(explain(what, fix="correct this line; every quotation mark is closed")) from fault
    names = [name.strip() for name in lines[0][1]] if lines else []
    wanted = (*SIZES, "step_ms") if measured else SIZES
    missing, twice = [n for n in wanted if n not in names], [n for n in names if names.count(n) > 1]
    if missing or twice:
        what = f"lacks the columns {', '.join(missing)}" if missing else f"has a column twice: {twice[0]!r}"
        raise UsageError(explain(f"{path} {what}", value=names, fix=f"give it the columns {', '.join(wanted)}"))
    rows = []
    for number, values in lines[1:]:
        where = f"{path}, line {number}"
        if len(values) != len(names):
            what = f"{where} has {len(values)} values for {len(names)} columns"
            raise UsageError(explain(what, value=values, fix="give it one value for each column, divided by commas"))
        cells = dict(zip(names, (value.strip() for value in values), strict=True))
        sizes = {name: int(_number(where, name, cells[name], whole=True)) for name in SIZES}
        seconds = _number(where, "step_ms", cells["step_ms"], whole=False) / 1e3 if measured else None
        row = Row(sizes, seconds, number, cells)
        _check(where, row)
        rows.append(row)
    if not rows:
        raise UsageError(explain(f"{path} has no rows", fix="put a line for each training below the names of columns"))
    return rows


def _number(where: str, column: str, text: str, *, whole: bool) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e12 or (whole and number != int(number)):
        kind = "a positive whole number" if whole else "a positive number"
        raise UsageError(explain(f"{where}: {column} is not {kind}", value=text, fix="correct this value"))
    return number


def _check(where: str, row: Row) -> None:
    """Refuse what cannot be: of the layout what the model of a step refuses, and part of a node beside full ones."""
    gpus = row.sizes["gpus"]
    if gpus > PER_NODE and gpus % PER_NODE:
        fix = f"give up to {PER_NODE}, or a multiple of it"
        raise UsageError(explain(f"{where}: gpus on several nodes fill nodes of {PER_NODE}", value=gpus, fix=fix))
    try:
        each = row.measured()
        step(each.model, cluster=each.cluster, **each.layout)
    except UsageError as fault:
        fix = "" if "Fix: " in str(fault) else " Fix: correct these sizes."
        raise UsageError(f"{where}: {fault}{fix}") from fault


@dataclass(frozen=True)
class Calibration:
    """What measured rows of one machine tell: coefficients, and what is left over where."""

    coefficients: Coefficients
    rows: tuple[Row, ...]
    left_over: np.ndarray  # logarithms of measured / predicted, by row
    alike: str

    def predict(self, rows: Sequence[Row]) -> list[float]:
        """Return the predicted seconds of rows of the same machine."""
        plain = np.array([_seconds(row, self.coefficients) for row in rows])
        if self.alike == "none":
            return plain.tolist()
        inside = _likeness(self.rows, self.rows, self.alike) + NOISE**2 * np.eye(len(self.rows))
        across = _likeness(rows, self.rows, self.alike)
        return (plain * np.exp(across @ np.linalg.solve(inside, self.left_over))).tolist()


def _seconds(row: Row, coefficients: Coefficients) -> float:
    each = row.measured()
    return step(each.model, cluster=each.cluster, coefficients=coefficients, **each.layout).seconds


def _likeness(one: Sequence[Row], other: Sequence[Row], alike: str) -> np.ndarray:
    scales = ALIKE[alike]
    assert scales is not None
    a, b = (
        np.array([[math.log2(r.sizes[name]) / s for name, s in scales.items()] for r in rows]) for rows in (one, other)
    )
    return LEFT_OVER**2 * np.exp(-np.abs(a[:, None] - b[None]).sum(axis=2))


def _left_out(rows: Sequence[Row], left_over: np.ndarray, alike: str) -> float:
    """The mean error of rows, each predicted from what all others leave over."""
    if alike == "none":
        return float(np.abs(np.expm1(left_over)).mean())
    inverse = np.linalg.inv(_likeness(rows, rows, alike) + NOISE**2 * np.eye(len(rows)))
    return float(np.abs(np.expm1(inverse @ left_over / np.diag(inverse))).mean())


def calibrate(rows: Sequence[Row]) -> Calibration:
    """Fit coefficients to measured rows of one machine, then decide how what is left over is alike."""
    coefficients = fit([row.measured() for row in rows], "A100-80")
    left_over = np.array([math.log((row.seconds or 1.0) / _seconds(row, coefficients)) for row in rows])
    alike = min(ALIKE, key=lambda kind: _left_out(rows, left_over, kind))
    return Calibration(coefficients, tuple(rows), left_over, alike)


def _machines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        found[row.machine].append(row)
    return found


def predict(calibration: Path, rows: Path, out: Path) -> None:
    """Predict the steps of one file from those of another; write it with ``step_ms``, and tell what to expect of it.

    Raises:
        UsageError: a file cannot be read, as :func:`read` says, or ``out`` cannot be written; nothing is written then.
    """
    if out.is_dir() or not out.parent.is_dir() or out.resolve() in (calibration.resolve(), rows.resolve()):
        what = "--out names a folder, a file of a folder that is not there, or a file that is read"
        raise UsageError(explain(what, value=str(out), fix="name another file, in a folder that exists"))
    measured, wanted = _machines(read(calibration, measured=True)), read(rows, measured=False)
    seconds: dict[int, float] = {}
    for machine, each in _machines(wanted).items():
        known = measured.get(machine, [])
        if known:
            found = calibrate(known)
            told = f"calibrated on {len(known)} rows, what is left over alike by {found.alike}"
        else:
            found = Calibration(A100, (), np.zeros(0), "none")
            told = "no row of the calibration is of this machine: coefficients of A100 as shipped"
        print(f"{machine}: {len(each)} rows, {told}", file=sys.stderr)
        if len(known) >= least_held_out():
            factor = conformal_factor(*_held_out(known, [[number] for number in range(len(known))]))
            print(f"{machine}: 90 % interval: prediction / {factor:.2f} to prediction x {factor:.2f}", file=sys.stderr)
        seconds |= dict(zip((row.line for row in each), found.predict(each), strict=True))
        for row in each:
            training = row.measured()
            c = found.coefficients
            for reason in step(training.model, cluster=training.cluster, coefficients=c, **training.layout).widened:
                print(f"{rows}, line {row.line}: outside of the calibration: {reason}", file=sys.stderr)
    if "step_ms" in wanted[0].cells:
        print(f"{rows}: the column step_ms is not read; the predictions replace it", file=sys.stderr)
    names = [*(name for name in wanted[0].cells if name != "step_ms"), "step_ms"]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row.cells, "step_ms": f"{1e3 * seconds[row.line]:.6g}"} for row in wanted)
    try:
        write_text(out, text.getvalue())
    except OSError as fault:
        what = f"the predictions cannot be written: {fault.strerror}"
        raise UsageError(explain(what, value=str(out), fix="name another file")) from fault


def _held_out(rows: Sequence[Row], folds: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
    """Predict each fold from the rows outside of it; return predicted and measured seconds."""
    predicted, measured = [], []
    for fold in folds:
        found = calibrate([row for number, row in enumerate(rows) if number not in fold])
        predicted += found.predict([rows[number] for number in fold])
        measured += [rows[number].seconds or 1.0 for number in fold]
    return predicted, measured


def _folds(num_rows: int, num_known: int, num_draws: int, seed: int) -> list[list[int]]:
    """Draw the rows to predict from ``num_known`` others."""
    draw = random.Random(seed)
    return [draw.sample(range(num_rows), num_rows - num_known) for _ in range(num_draws)]


def check(calibration: Path, num_draws: int = 20, seed: int = 0) -> None:
    """Print how far predictions are off rows that were left out, for several numbers of known rows; and of the choice."""
    for machine, rows in _machines(read(calibration, measured=True)).items():
        print(f"\n{machine}: {len(rows)} rows")
        most = len(rows) - 1
        for known in [n for n in (10, 20, 30) if n < most] + [most]:
            folds = [[n] for n in range(len(rows))] if known == most else _folds(len(rows), known, num_draws, seed)
            predicted, measured = _held_out(rows, folds)
            e = summarize_errors(predicted, measured)
            how = "each row from all others" if known == most else f"{num_draws} draws, seed {seed}"
            print(
                f"  {known} known rows ({how}): mean {e.mean:.1%}, median {e.median:.1%}, p95 {e.p95:.1%}, worst "
                f"{e.worst:.1%}, bias {e.bias:+.1%}"
            )
        plain = fit([row.measured() for row in rows])
        e = summarize_errors([_seconds(row, plain) for row in rows], [row.seconds or 1.0 for row in rows])
        print(f"  coefficients alone, on the rows that they were fitted to: mean {e.mean:.1%}, worst {e.worst:.1%}")
        _print_choices(rows, predicted)


def _print_choices(rows: Sequence[Row], predicted: Sequence[float]) -> None:
    """Print what choosing the layout that is predicted to be fastest costs, among rows of one model, devices and batch."""
    groups: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    for number, row in enumerate(rows):
        names = ("gpus", "global_batch", "hidden", "heads", "layers", "sequence")
        groups[tuple(row.sizes[name] for name in names)].append(number)
    regrets, orders = [], []
    for group in groups.values():
        if len(group) < 2:
            continue
        times = {number: rows[number].seconds or 1.0 for number in group}
        regrets.append(times[min(group, key=lambda number: predicted[number])] / min(times.values()) - 1)
        pairs = [(a, b) for a in group for b in group if a < b and times[a] != times[b]]
        agree = [math.copysign(1, (predicted[a] - predicted[b]) * (times[a] - times[b])) for a, b in pairs]
        orders.append(sum(agree) / len(agree) if agree else 1.0)
    if regrets:
        print(
            f"  choice among alternatives, {len(regrets)} groups: regret mean {np.mean(regrets):.1%}, worst "
            f"{max(regrets):.1%}, fastest chosen in {sum(r == 0 for r in regrets)}; Kendall's tau mean {np.mean(orders):.2f}"
        )


def print_fit(calibration: Path) -> None:
    """Print the coefficients of all rows together: those that are shipped for A100."""
    rows = read(calibration, measured=True)
    found = fit([row.measured() for row in rows], "A100-80")
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        print(f"{field.name}={value:.3g}," if isinstance(value, float) else f"{field.name}={value!r},")
    for machine, each in _machines(rows).items():
        e = summarize_errors([_seconds(row, found) for row in each], [row.seconds or 1.0 for row in each])
        print(f"# {machine}: mean {e.mean:.1%}, median {e.median:.1%}, worst {e.worst:.1%}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that need a file of measured rows."""
    options = parser.add_argument_group("from other measured rows of the same machines")
    options.add_argument(
        "--calibration", type=Path, metavar="FILE", help="CSV with the columns " + ", ".join(SIZES) + ", step_ms"
    )
    options.add_argument("--rows", type=Path, metavar="FILE", help="rows to predict: the same columns without step_ms")
    options.add_argument("--out", type=Path, metavar="FILE", help="where to write them with step_ms")
    options.add_argument(
        "--check", action="store_true", help="how far off rows of the calibration are that are left out"
    )
    options.add_argument("--fit", action="store_true", help="print the coefficients of all rows together")


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> bool:
    """Do what these options ask for; return whether they did."""
    if given.calibration is None:
        if given.rows or given.out or given.check or given.fit:
            parser.error("--rows, --out, --check and --fit need --calibration FILE")
        return False
    if bool(given.rows) != bool(given.out) or not (given.rows or given.check or given.fit):
        parser.error("give --calibration FILE with --rows FILE and --out FILE, with --check, or with --fit")
    try:
        if given.rows:
            predict(given.calibration, given.rows, given.out)
        if given.check:
            check(given.calibration)
        if given.fit:
            print_fit(given.calibration)
    except UsageError as fault:
        parser.exit(2, f"{parser.prog}: {fault}\n")
    return True
