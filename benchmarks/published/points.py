"""Read the published points, and compare predictions with them."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guozhuang.cost.fit import ErrorSummary, summarize_errors

FOLDER = Path(__file__).resolve().parent


def read(name: str) -> dict[str, Any]:
    """Return one of the data files beside this module: "scaling", "layouts", "others"."""
    with (FOLDER / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def rows(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the rows of a table of "layouts" or "others" as dictionaries, with what holds for the whole table."""
    common = {key: value for key, value in table.items() if key not in ("columns", "rows")}
    for row in table["rows"]:
        yield common | dict(zip(table["columns"], row, strict=True))


@dataclass(frozen=True)
class Series:
    """Published values of one training by the number of GPUs, as they are published, and what is known of it."""

    points: dict[int, float]
    about: dict[str, Any]

    @property
    def name(self) -> str:
        """What the lines of the output call it."""
        about = self.about
        more = [f"s={about['sequence']}"] if "sequence" in about else []
        more += [f"b={about['batch']}"] if str(about["batch"])[:1].isdigit() and " of all" not in about["batch"] else []
        return " ".join([about["model"], about["machine"].split(",")[0], about["precision"], *more])

    @property
    def times(self) -> dict[int, float]:
        """Seconds of what one GPU does at a time, by the number of GPUs, up to a factor that all of them share.

        Of a rate of the whole job that is n / rate: the time of a step whose batch a GPU is the same everywhere.
        """
        quantity = self.about["quantity"]
        if quantity in ("step_s", "minutes"):
            return self.points
        one_gpu = quantity.endswith("a GPU") or quantity == "efficiency"
        return {n: (1 if one_gpu else n) / value for n, value in self.points.items()}

    def at(self, num_gpus: int) -> str:
        """Return what the lines of the output say of one point: its number of GPUs, and what was published."""
        quantity = {"step_s": "s a step"}.get(self.about["quantity"], self.about["quantity"])
        return f"{num_gpus} GPUs, {quantity}"

    def work(self, num_gpus: int) -> float | None:
        """Return what a published rate must be multiplied by to be a time of :attr:`times`; None if times are published."""
        time = self.times[num_gpus]
        return None if time == self.points[num_gpus] else time * self.points[num_gpus]


def all_series(table: str | None = None) -> list[Series]:
    """Return the series of one table of scaling.toml, or of all, in the order of the file."""
    found = read("scaling")["series"]
    return [
        Series({int(n): float(value) for n, value in each["points"].items()}, each)
        for each in found
        if table in (None, each["table"])
    ]


@dataclass(frozen=True)
class Point:
    """One published number beside its prediction. Times are compared, also where a rate was published.

    Attributes:
        what: whose number it is.
        at: for which number of GPUs, or which quantity.
        predicted: the prediction.
        published: the published value, in the same unit.
        null: what the null model of its protocol says; None where there is none.
        work: of a time, what it takes to be shown as the rate that was published: work / time; None: it is shown as it is.
    """

    what: str
    at: str
    predicted: float
    published: float
    null: float | None = None
    work: float | None = None

    def shown(self, value: float) -> str:
        """Format the prediction or the published value, as it was published."""
        value = value if self.work is None else self.work / value
        return f"{value:,.0f}" if value >= 1e4 else f"{value:.5g}"


@dataclass
class Protocol:
    """Points that are predicted in one way, from the same kind of calibration.

    Attributes:
        title: what is predicted from what.
        null: the null model's name; empty where there is none.
        target: the mean error that is aimed at, as a share; None where none was set.
        points: those judged: none of them took part in the fit.
        num_calibrating: points that the fits used.
        outliers: sentences about published points that no fit used, because they contradict their neighbours.
        notes: further sentences about the result.
    """

    title: str
    null: str = ""
    target: float | None = None
    points: list[Point] = field(default_factory=list)
    num_calibrating: int = 0
    outliers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def errors(self) -> ErrorSummary:
        """Sum up the errors of the predictions."""
        return summarize_errors([p.predicted for p in self.points], [p.published for p in self.points])

    def null_error(self) -> float | None:
        """Return the mean error of the null model, as a share."""
        found = [abs(p.null / p.published - 1) for p in self.points if p.null is not None]
        return statistics.fmean(found) if found else None


def percent(share: float, digits: int = 1) -> str:
    """Format a share in percent, with its sign only if it is negative."""
    return f"{share * 100:.{digits}f} %"


def table(lines: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Lay out lines of cells, the first of which are headings, in columns; the first ``num_left`` columns at the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(c.ljust(w) if i < num_left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        .rstrip()
        for line in lines
    ]  # fmt: skip
