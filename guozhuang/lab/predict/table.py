"""Print predictions to the terminal: a table, then what makes intervals wide and what to measure next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from guozhuang import units
from guozhuang.cost.prediction.predict import SLOWEST, WAITING, Prediction
from guozhuang.lab.predict.curves import KEPT, Curve
from guozhuang.lab.predict.narrowing import Advice

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
SPEED = ("ranks", "samples/s", "ms/step", "90 % interval", "perfect", "kept", "memory")
PARTS = ("ranks", "data", "forward", "backward", "exch.", "optim.", "waiting", "slowest")
BATCHES = ("ranks", "bounds, ms", *(units.percent(each) for each in KEPT), "time", "cost")
_NAME_CHARACTERS = 12
_PART_NAMES = ("data", "forward", "backward", "exchange", "optimizer", WAITING, SLOWEST)


@dataclass(frozen=True)
class Row:
    """One line of the table: a strategy on a number of ranks, or why there is no prediction of it."""

    name: str
    num_ranks: int
    prediction: Prediction | None
    problem: str = ""
    advice: Advice | None = None


@dataclass(frozen=True)
class Predictions:
    """All that ``guozhuang predict`` found, as ``--json`` prints it.

    Attributes:
        command: the command line.
        workload: its title.
        cluster: the description of where it will train.
        profile_created: when the profile was measured.
        rows: a row for each strategy and number of ranks.
        profile_file: where the profile is kept; empty if it is not.
        curves: of each strategy that is predicted on one rank too.
        samples: the number of samples whose time and cost the curves have; None if none was asked for.
    """

    command: str
    workload: str
    cluster: str
    batch_size: int
    profile_created: str
    rows: tuple[Row, ...]
    profile_file: str = ""
    curves: tuple[Curve, ...] = ()
    samples: float | None = None
    schema_version: int = SCHEMA_VERSION


def speed_cells(row: Row, found: Prediction) -> list[str]:
    """Return the cells of a row of the first table, whose headings are :data:`SPEED`."""
    return [
        str(row.num_ranks),
        units.rate(found.samples_per_s),
        units.milliseconds(found.step_s),
        _span(found.interval_s),
        units.milliseconds(found.perfect_s),
        units.percent(found.efficiency),
        units.size(found.memory_bytes),
    ]


def part_cells(row: Row, found: Prediction) -> list[str]:
    """Return the cells of a row of the second table, whose headings are :data:`PARTS`; the largest part is marked."""
    shown = [
        units.milliseconds(found.parts.get(part, 0.0)) + "*" * (part == found.largest_term) for part in _PART_NAMES
    ]
    return [str(row.num_ranks), *shown]


def batch_cells(found: Predictions) -> list[list[str]]:
    """Return the lines of the third table: the name of a curve, then the cells of one of its points under :data:`BATCHES`."""
    return [
        [
            each.name,
            str(point.num_ranks),
            _span(point.bounds),
            *(units.ABSENT if batch is None else f"{batch:,}" for batch in point.smallest_batches),
            units.duration(point.seconds),
            units.ABSENT if point.money is None else f"{point.money:,.2f}",
        ]
        for each in found.curves
        for point in each.points
    ]


def _span(ends: tuple[float, float]) -> str:
    low, high = (units.milliseconds(end) for end in ends)
    return low if low == high else f"{low} {units.DASH} {high}"


def show(console: Console, found: Predictions) -> None:
    """Print the tables, and what is to be known about them."""
    from rich.text import Text

    console.print()
    about = f": {found.batch_size} samples a rank on {found.cluster}; profile of {found.profile_created}"
    console.print(Text.assemble((found.workload, "bold"), about), soft_wrap=True)
    done = [(row, row.prediction) for row in found.rows if row.prediction is not None]
    tables = (("Speed", SPEED, speed_cells), ("Parts of a step, ms (* the largest)", PARTS, part_cells))
    for title, headings, cells in tables if done else ():
        table = units.terminal_table(title, ["strategy", *headings], 1, no_wrap=True)
        for number, (row, each) in enumerate(done):
            same = number > 0 and done[number - 1][0].name == row.name
            table.add_row("" if same else units.wrapped_name(row.name, _NAME_CHARACTERS), *cells(row, each))
        console.print(table)
    if found.curves:
        about = "" if found.samples is None else f", time and cost of {found.samples:,.0f} samples"
        table = units.terminal_table(
            f"Bounds, and the batch of a rank that keeps so much{about}",
            ["strategy", *BATCHES],
            1,
            no_wrap=True,
        )
        for name, *cells_of_it in batch_cells(found):
            table.add_row(units.wrapped_name(name, _NAME_CHARACTERS), *cells_of_it)
        console.print(table)
    for text in notes(found):
        console.print(Text(text), soft_wrap=True)


def notes(found: Predictions) -> list[str]:
    """Return sentences about the rows: where intervals come from, why they are wide, and what to measure next."""
    done = [(row, row.prediction) for row in found.rows if row.prediction is not None]
    sources = "; ".join(dict.fromkeys(each.interval_source for _, each in done))
    texts = (
        [f"90 % intervals begin with factors that held nine of ten steps measured on a host of 2 cores. {sources}."]
        if done
        else []
    )
    wide: dict[str, list[str]] = {}
    for row, each in done:
        for why in each.widened:
            wide.setdefault(why, []).append(f"{row.name} on {row.num_ranks}")
    texts += [f"Wider interval, {why}: {units.listed(names)}." for why, names in wide.items()]
    texts += [f"No prediction of {row.name} on {row.num_ranks}: {row.problem}" for row in found.rows if row.problem]
    advised = [(row, each, row.advice) for row, each in done if row.advice is not None]
    if advised:
        row, each, told = max(advised, key=lambda one: _width(one[1].interval_s) / _width(one[2].interval_s))
        change = f"{_span(each.interval_s)} to about {_span(told.interval_s)} ms"
        texts.append(f"What would narrow an interval most ({row.name} on {row.num_ranks}: {change}): {told.command}")
    return texts


def _width(interval: tuple[float, float]) -> float:
    return interval[1] / interval[0]
