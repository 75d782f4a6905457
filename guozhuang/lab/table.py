"""Print a comparison to the terminal: three small tables that fit 80 columns, then the recommended strategy and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from guozhuang import units
from guozhuang.lab.results import Results, StrategyRow
from guozhuang.lab.verdict import Verdict, short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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
    if any(row.ok for row in results.rows):
        for table in (_speed(results, verdict), _step(results, verdict), _cost(results, verdict)):
            console.print(table)
    for row in results.rows:
        if row.failure is not None:
            console.print(Text.assemble((f"{row.name} failed", "bold red"), ": ", short(row.failure.cause, 400)))
            console.print(
                Padding(Text(f"all it printed: {row.failure.log}", style="dim"), (0, 0, 0, 2)), soft_wrap=True
            )
    console.print(Text(verdict.headline, style="bold green" if verdict.recommended else "bold red"))
    for reason in verdict.reasons:
        console.print(Padding(Text(reason), (0, 0, 0, 2)))
    for text in (*verdict.cautions, *results.notes):
        console.print(Padding(Text(f"Note: {text}", style="yellow"), (0, 0, 0, 2)))
    console.print(Text(f"Report: {report}"), soft_wrap=True)


def _speed(results: Results, verdict: Verdict) -> Table:
    ratios = [f"{units.TIMES}\nsingle", f"{units.TIMES} torch-\nddp", "of\nnone"]
    headings = ["strategy", "samples/s", f"min {units.DASH} max", "epoch", *ratios]
    table = units.terminal_table("Speed", headings, 1, no_wrap=True)
    for row in _ok(results):
        _line(
            table,
            row,
            verdict,
            units.rate(row.samples_per_s),
            units.span(row.slowest, row.fastest),
            units.duration(results.epoch_s(row)),
            units.times(results.ratio(row, "single")),
            units.times(results.ratio(row, "torch-ddp")),
            units.percent(results.ratio(row, "none")),
        )
    return table


def _step(results: Results, verdict: Verdict) -> Table:
    headings = ["strategy", "step", "data", "forward", "backward", "exposed\nexchange", "optimizer"]
    table = units.terminal_table("How a step divides, ms", headings, 1, no_wrap=True)
    for row in _ok(results):
        phases = row.phases
        parts = (phases.data_s, phases.forward_s, phases.backward_s, phases.exchange_s, phases.optimizer_s)
        _line(table, row, verdict, units.milliseconds(phases.step_s), *(units.milliseconds(part) for part in parts))
    return table


def _cost(results: Results, verdict: Verdict) -> Table:
    name = primary_metric(results)
    headings = [
        "strategy",
        "sent per\nstep",
        "peak of\na rank",
        "whole\nmachine",
        "loss",
        *([name] if name else []),
        f"max |w {units.MINUS}\nsingle|",
    ]
    table = units.terminal_table("Cost and result", headings, 1, no_wrap=True)
    for row in _ok(results):
        difference = units.tiny(row.difference.largest) if row.difference is not None else units.ABSENT
        _line(
            table,
            row,
            verdict,
            units.size(row.sent_bytes_per_step),
            units.size(row.peak_rank_bytes),
            units.size(row.machine_bytes),
            f"{row.final_loss:.4f}",
            *([units.metric(name, row.metrics.get(name))] if name else []),
            difference if row.exact else "not trained" if not row.trains else "inexact",
        )
    return table


def primary_metric(results: Results) -> str:
    """Return the name of the first metric that any strategy was evaluated by; empty if the workload has no metric."""
    return next((name for row in _ok(results) for name in row.metrics), "")


def _ok(results: Results) -> list[StrategyRow]:
    return [row for row in results.rows if row.ok]


def _line(table: Table, row: StrategyRow, verdict: Verdict, *cells: str) -> None:
    style = "bold" if row.name == verdict.recommended else "" if row.trains else "dim"
    table.add_row(row.name if row.trains else f"{row.name} (bound)", *cells, style=style)
