"""Write a comparison to a folder: ``report.html`` (one file that loads no other), ``results.json`` and the plots as PNG."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from guozhuang import units
from guozhuang.lab import plots
from guozhuang.lab.results import FINAL_LOSS_STEPS, Results, to_json
from guozhuang.lab.table import STAGE_HEADINGS, largest_batch, stage_lines
from guozhuang.lab.verdict import Verdict, judge
from guozhuang.records import write_bytes, write_text

if TYPE_CHECKING:
    import jinja2


def write(results: Results, folder: Path) -> Path:
    """Write all files of the report; each file appears complete or not at all.

    A report follows from ``results`` alone, so it can be written again from ``results.json`` (``results.from_json``).

    Args:
        results: the comparison.
        folder: the folder to write to; created if missing.

    Returns:
        The path of ``report.html``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = plots.draw(results)
    for name in plots.NAMES:
        if name in drawn:
            write_bytes(folder / f"{name}.png", drawn[name].png)
        else:  # remove the plot of an earlier comparison, which would be misleading
            (folder / f"{name}.png").unlink(missing_ok=True)
    write_text(folder / "results.json", to_json(results))
    path = folder / "report.html"
    write_text(path, html(results, judge(results), drawn))
    return path


def html(results: Results, verdict: Verdict, pictures: Mapping[str, plots.Picture]) -> str:
    """Return the text of the HTML page.

    Args:
        results: the comparison.
        verdict: the conclusion drawn from it.
        pictures: the plots by name.
    """
    template = template_of("report.html.jinja")
    rows = [row for row in results.rows if row.ok]
    ranks = [rank for row in rows for one in row.rounds for rank in one.ranks]
    return template.render(
        results=results,
        s=results.settings,
        verdict=verdict,
        rows=rows,
        failed=[row for row in results.rows if row.failure is not None],
        timelines=[row for row in results.rows if row.timeline],
        metrics=list(dict.fromkeys(name for row in rows for name in row.metrics)),
        colors=plots.colors(results),
        plots=pictures,
        sources=_sources(results),
        largest_batch=largest_batch(results),
        stage_headings=STAGE_HEADINGS,
        stage_lines=stage_lines,
        on_device=any(rank.peak_device_bytes is not None for rank in ranks),
        whole_life=any(rank.peak_whole_life for rank in ranks),
        final_loss_steps=FINAL_LOSS_STEPS,
        u=units,
    )


def template_of(name: str) -> jinja2.Template:
    """Return a template of a page, by its path below ``guozhuang/lab``."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("guozhuang.lab", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = _unbroken
    environment.filters["parts"] = units.name_parts
    return environment.get_template(name)


def _unbroken(text: str) -> str:
    """Put no-break spaces between the numbers of a text and their units, so that no line of the page ends between them."""
    return re.sub(r"(?<=\d) (?=(%|s|ms|min|h|B|[KMGT]iB)\b|%)", "\N{NO-BREAK SPACE}", text)


def _sources(results: Results) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in results.rows:
        if row.source:
            found.setdefault(row.source, []).append(row.name)
    return found
