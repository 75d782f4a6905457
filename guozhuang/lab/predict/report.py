"""Write predictions to a folder: ``report.html``, ``predictions.json`` and the scaling curves as PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from guozhuang.lab import plots
from guozhuang.lab.predict.curves import Curve, CurvePoint
from guozhuang.lab.predict.table import BATCHES, PARTS, SPEED, Predictions, batch_cells, notes, part_cells, speed_cells
from guozhuang.lab.report import template_of
from guozhuang.records import to_json, write_bytes, write_text

_Value = Callable[[CurvePoint], float | None]
# Of each plot: its title, the label of its axis, the value of a point, what is dashed beside it, and what a reader must know.
_PLOTS: Mapping[str, tuple[str, str, _Value, _Value | None, str]] = {
    "weak": (
        "Weak scaling",
        "kept of one rank's speed",
        lambda p: p.weak_efficiency,
        None,
        "t(1, b) / t(n, b): every rank keeps its batch b. Perfect scaling is 1.",
    ),
    "strong": (
        "Strong scaling",
        "speed-up",
        lambda p: p.num_ranks * p.strong_efficiency if p.strong_efficiency is not None else None,
        lambda p: p.amdahl,
        "t(1, B) / t(n, B/n): all ranks together keep the batch B. Dashed: Amdahl's law with the share of the time on one rank "
        "that the fewest ranks above one show. Gustafson's law with the share measured on n ranks gives the same speed-ups.",
    ),
    "karp-flatt": (
        "Serial share by Karp and Flatt",
        "serial share",
        lambda p: p.serial_share,
        None,
        "Level: part of the work is serial. Rising with the ranks: communication takes the time. Of the strong speed-ups.",
    ),
    "time": (
        "Time to the samples",
        "hours",
        lambda p: None if p.seconds is None else p.seconds / 3600,
        None,
        "At the same batch of each rank.",
    ),
    "loss": (
        "Time to one loss",
        "relative to the best",
        lambda p: p.seconds_to_loss,
        None,
        "steps(B) = least steps (1 + noise scale / B): past the noise scale a larger batch hardly needs fewer steps.",
    ),
}


def write(found: Predictions, folder: Path) -> Path:
    """Write all files of the report; each appears complete or not at all.

    Returns:
        The path of ``report.html``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {name: _drawn(name, found.curves) for name in _PLOTS}
    for name, picture in drawn.items():
        path = folder / f"{name}.png"
        if picture is None:  # remove the plot of an earlier prediction, which would be misleading
            path.unlink(missing_ok=True)
        else:
            write_bytes(path, picture.png)
    write_text(folder / "predictions.json", to_json(asdict(found)))
    done = [(row, row.prediction) for row in found.rows if row.prediction is not None]
    page = template_of("predict/report.html.jinja").render(
        found=found,
        notes=notes(found),
        speed_headings=("strategy", *SPEED),
        speed=[(row.name, *speed_cells(row, each)) for row, each in done],
        parts_headings=("strategy", *PARTS),
        parts=[(row.name, *part_cells(row, each)) for row, each in done],
        sections=[(name, _PLOTS[name][0], _PLOTS[name][4]) for name, picture in drawn.items() if picture is not None],
        plots=drawn,
        batches_headings=("strategy", *BATCHES),
        batches=batch_cells(found),
        samples="" if found.samples is None else f"Time and cost are those of {found.samples:,.0f} samples.",
    )
    path = folder / "report.html"
    write_text(path, page)
    return path


def _drawn(name: str, curves: tuple[Curve, ...]) -> plots.Picture | None:
    """Draw a plot, or return None where no curve has two points of it."""
    _, label, value, beside, _ = _PLOTS[name]
    lines = {each.name: _points(each, value) for each in curves}
    lines = {each: points for each, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    colors = plots.colors_of([each.name for each in curves])
    best = min(y for points in lines.values() for _, y in points) if name == "loss" else 1.0

    def draw(width: float, axes: Any) -> None:
        for each in curves:
            if each.name in lines:
                x, y = zip(*lines[each.name], strict=True)
                axes.plot(
                    x, [one / best for one in y], marker="o", markersize=3, color=colors[each.name], label=each.name
                )
                dashed = _points(each, beside) if beside is not None else []
                if dashed:
                    axes.plot(*zip(*dashed, strict=True), linestyle="--", linewidth=1, color=colors[each.name])
        ranks = sorted({n for points in lines.values() for n, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(n) for n in ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.figure.legend(loc="outside upper center", ncols=4 if width > 5 else 2, frameon=False)

    return plots.picture(name, draw, lambda width: 3.0 + 0.21 * math.ceil(len(lines) / 4))


def _points(each: Curve, value: _Value) -> list[tuple[int, float]]:
    found = [(point.num_ranks, value(point)) for point in each.points]
    return [(n, y) for n, y in found if y is not None]
