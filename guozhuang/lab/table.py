"""Print a comparison to the terminal: three small tables that fit 80 columns, then the recommended strategy and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from guozhuang import units
from guozhuang.lab.results import Results, StrategyRow
from guozhuang.lab.verdict import Verdict, short

if TYPE_CHECKING:
    from rich.console import Console

# In terminals of fewer columns than the first number names are cut into lines of so many characters.
_WIDE, _NAME_CHARACTERS = 100, 16

_Content = tuple[str, list[str], list[list[str]]]  # of a table: its title, headings, and the cells of each row


def show(console: Console, results: Results, verdict: Verdict, report: Path) -> None:
    """Print the tables, the verdict and the path of the report."""
    from rich.padding import Padding
    from rich.text import Text

    settings = results.settings
    console.print()
    console.print(
        Text.assemble(
            (results.workload, "bold"),
            f": {settings.num_ranks} ranks {units.TIMES} {settings.batch_size} samples, {settings.num_steps} steps, "
            f"{settings.num_rounds} round{'s' * (settings.num_rounds > 1)}",
        )
    )
    carried = [f"{', '.join(names)} on {backend}" for backend, names in results.backends().items()]
    if carried:
        console.print(Text("; ".join(carried), style="dim"))
    rows, most = _ok(results), _NAME_CHARACTERS if console.width < _WIDE else console.width
    for title, headings, lines in (_speed(results, rows), _step(rows), _cost(results, rows)) if rows else ():
        table = units.terminal_table(title, ["strategy", *headings], 1, no_wrap=True)
        for row, cells in zip(rows, lines, strict=True):
            style = "bold" if row.name == verdict.recommended else "" if row.trains else "dim"
            table.add_row(units.wrapped_name(row.title, most), *cells, style=style)
        console.print(table)
    for row in rows:
        if row.stages:
            table = units.terminal_table(f"Stages of {row.title}, ms a step", ["stage", *STAGE_HEADINGS], 2)
            for cells in stage_lines(row):
                table.add_row(*cells)
            console.print(table)
            console.print(Text(row.stages[0].microbatches, style="dim"))
    for row in results.rows:
        if row.failure is not None:
            console.print(Text.assemble((f"{row.name} failed", "bold red"), ": ", short(row.failure.cause, 400)))
            console.print(
                Padding(Text(f"all it printed: {row.failure.log}", style="dim"), (0, 0, 0, 2), expand=False),
                soft_wrap=True,
            )
    if text := largest_batch(results):
        console.print(Padding(Text(text), (0, 0, 1, 0), expand=False))
    console.print(Text(verdict.headline, style="bold green" if verdict.recommended else "bold red"))
    for reason in verdict.reasons:
        console.print(Padding(Text(reason), (0, 0, 0, 2), expand=False))
    for text in (*verdict.cautions, *results.notes):
        console.print(Padding(Text(f"Note: {text}", style="yellow"), (0, 0, 0, 2), expand=False))
    console.print(Text(f"Report: {report}"), soft_wrap=True)


def largest_batch(results: Results) -> str:
    """Return a sentence about the largest batch that still pays; empty where the gradient noise scale was not measured."""
    found, today = results.largest_batch, results.settings.global_batch_size
    if found is None:
        return ""
    num_steps = results.settings.num_warmup_steps + results.settings.num_steps
    when = f"by the gradient noise scale after {num_steps} steps; it grows as the loss falls"
    if math.isinf(found):
        return f"Largest batch that still pays: more than {today:,}, too large to be measured here ({when})"
    samples = max(1, int(round(found, min(0, 2 - len(str(int(found)))))))
    plural = "s" * (samples != 1)
    return f"Largest batch that still pays: about {samples:,} sample{plural}, today's is {today:,} ({when})"


def _speed(results: Results, rows: Sequence[StrategyRow]) -> _Content:
    ratios = [f"{units.TIMES}\nsingle", f"{units.TIMES} torch-\nddp", "of\nnone"]
    headings = ["samples/s", f"min {units.DASH} max", "epoch", *ratios]
    lines = [
        [
            units.rate(row.samples_per_s),
            units.span(row.slowest, row.fastest),
            units.duration(results.epoch_s(row)),
            units.times(results.ratio(row, "single")),
            units.times(results.ratio(row, "torch-ddp")),
            units.percent(results.ratio(row, "none")),
        ]
        for row in rows
    ]
    return "Speed", headings, lines


def _step(rows: Sequence[StrategyRow]) -> _Content:
    headings = ["step", "data", "forward", "backward", "exposed\nexchange", "optimizer"]
    lines = []
    for phases in (row.phases for row in rows):
        parts = (phases.data_s, phases.forward_s, phases.backward_s, phases.exchange_s, phases.optimizer_s)
        lines.append([units.milliseconds(part) for part in (phases.step_s, *parts)])
    return "How a step divides, ms", headings, lines


#: The columns after the number of the stage.
STAGE_HEADINGS = ("parts of the model", "predicted", "computing", "idle")


def stage_lines(row: StrategyRow) -> list[list[str]]:
    """Return the cells of a table of a pipeline's stages: number, parts, predicted and measured time, idle share."""
    busy: dict[int, float] = {}
    for stage in row.stages:
        busy[stage.rank] = busy.get(stage.rank, 0.0) + stage.busy_s
    found = []
    for stage in row.stages:
        parts = stage.first if stage.first == stage.last else f"{stage.first} {units.DASH} {stage.last}"
        times = [units.milliseconds(each) for each in (stage.predicted_s, stage.busy_s)]
        idle = 1 - busy[stage.rank] / (row.phases.step_s - row.phases.optimizer_s)
        found.append([str(stage.number), parts, *times, units.percent(max(idle, 0.0))])
    return found


def _cost(results: Results, rows: Sequence[StrategyRow]) -> _Content:
    name = primary_metric(results)
    of_metric = [name] if name else []
    sizes = ["sent per\nstep", "peak of\na rank", "whole\nmachine"]
    lines = []
    for row in rows:
        difference = units.tiny(row.difference.largest) if row.difference is not None else units.ABSENT
        lines.append(
            [
                units.size(row.sent_bytes_per_step),
                units.size(row.peak_rank_bytes),
                units.size(row.machine_bytes),
                f"{row.final_loss:.4f}",
                *(units.metric(each, row.metrics.get(each)) for each in of_metric),
                difference if row.exact else "not trained" if not row.trains else "inexact",
            ]
        )
    return "Cost and result", [*sizes, "loss", *of_metric, f"max |w {units.MINUS}\nsingle|"], lines


def primary_metric(results: Results) -> str:
    """Return the name of the first metric that any strategy was evaluated by; empty if the workload has no metric."""
    return next((name for row in _ok(results) for name in row.metrics), "")


def _ok(results: Results) -> list[StrategyRow]:
    return [row for row in results.rows if row.ok]
