from __future__ import annotations

import math
import re
import xml.etree.ElementTree
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from guozhuang import units
from guozhuang.lab import plots, report, table
from guozhuang.lab.results import Results, RunFailure, from_json, to_json
from guozhuang.lab.verdict import judge
from tests.pure.made_up import comparison, row, usual

DRAW = plots.draw
DRAWN: dict[str, Mapping[str, plots.Picture]] = {}


@pytest.fixture(autouse=True)
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tests write the same report, and drawing is most of it."""

    def draw(results: Results) -> Mapping[str, plots.Picture]:
        key = to_json(results)
        if key not in DRAWN:
            DRAWN[key] = DRAW(results)
        return DRAWN[key]

    monkeypatch.setattr(plots, "draw", draw)


class _Page(HTMLParser):
    """Checks that tags close in order, and collects what a browser would fetch, ids and the text."""

    VOID = frozenset(("meta", "br", "img", "link", "hr", "input", "wbr"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetched.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _page(text: str) -> _Page:
    page = _Page()
    page.feed(text)
    assert page.open == []
    return page


def test_report_is_one_page_that_fetches_nothing(tmp_path: Path) -> None:
    path = report.write(usual(), tmp_path / "new" / "folder")
    text = path.read_text()
    page = _page(text)
    assert page.fetched == []
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids))
    assert {p.name for p in path.parent.iterdir()} == {
        "report.html",
        "results.json",
        "speed.png",
        "step.png",
        "loss.png",
    }
    assert (path.parent / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_report_says_what_was_found_and_escapes_what_others_wrote(tmp_path: Path) -> None:
    text = report.write(usual(), tmp_path).read_text()
    page = _page(text)
    for expected in (
        "Take ddp",
        "183",
        "1.83",
        "92 %",
        "replicas <b>fell</b> over",
        "A paper <1>",
        "encoder.0.weight",
        "87.0 %",
        "4,386,178",
    ):
        assert expected in page.text
    assert "<b>fell" not in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize(
    ("noise_scale", "text"),
    [
        (None, ""),
        (
            178.4,
            "Largest batch that still pays: about 180 samples, today's is 16 (by the gradient noise scale after 65 ",
        ),
        (math.inf, "Largest batch that still pays: more than 16, too large to be measured here"),
        (0.0, "about 1 sample,"),
        (123_456.0, "about 120,000 samples"),
    ],
)
def test_the_largest_batch_that_pays_is_told_where_it_was_measured(noise_scale: float | None, text: str) -> None:
    ddp = row("ddp", 90.0, 92.0)
    ranks = tuple(replace(rank, noise_scale=noise_scale) for rank in ddp.rounds[0].ranks)
    results = comparison(row("single", 50.0), replace(ddp, rounds=(replace(ddp.rounds[0], ranks=ranks), ddp.rounds[1])))
    page = report.html(results, judge(results), plots.draw(comparison(row("single", 50.0), ddp)))
    assert text in table.largest_batch(results)
    assert ("Largest batch" in page) == (noise_scale is not None)
    assert from_json(to_json(results)) == results


def test_report_can_be_made_again_from_its_results_file(tmp_path: Path) -> None:
    first = report.write(usual(), tmp_path / "a").read_text()
    DRAWN.clear()
    again = report.write(from_json((tmp_path / "a" / "results.json").read_text()), tmp_path / "b").read_text()
    assert again == first


def test_plots_of_an_earlier_comparison_do_not_stay_behind(tmp_path: Path) -> None:
    report.write(usual(), tmp_path)
    report.write(comparison(row("ddp", failure=RunFailure("rank 0: no", "x.log", 1))), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"report.html", "results.json"}


@pytest.mark.parametrize("speeds", [(100.0,), (100.0, 101.0, 102.0)])
def test_report_of_a_single_strategy_without_metrics(tmp_path: Path, speeds: tuple[float, ...]) -> None:
    one = row("torch-ddp", *speeds)
    bare = tuple(replace(r, ranks=tuple(replace(rank, metrics={}) for rank in r.ranks)) for r in one.rounds)
    page = _page(report.write(comparison(replace(one, rounds=bare, difference=None)), tmp_path).read_text())
    assert "the only strategy" in page.text


def test_pictures_are_well_formed_and_follow_the_page() -> None:
    drawn = plots.draw(usual())
    svgs = [(name, each.svg) for name, each in drawn.items()]
    svgs += [(f"{name}-narrow", each.narrow_svg) for name, each in drawn.items()]
    for name, svg in svgs:
        root = xml.etree.ElementTree.fromstring(svg)
        assert root.get("viewBox") and root.get("width") is None and root.get("height") is None
        assert "currentColor" in svg
        assert all(i.startswith(f"{name}-") for i in re.findall(r'\bid="([^"]*)"', svg))
        assert set(re.findall(r"url\(#([^)]*)\)", svg)) <= set(re.findall(r'\bid="([^"]*)"', svg))


@pytest.mark.parametrize("width", [80, 100, 120])
def test_tables_fit_the_terminal(width: int) -> None:
    found = usual()
    names = {"torch-ddp": "low-precision-decentralized@gloo"}
    rows = tuple(replace(each, name=names.get(each.name, each.name)) for each in found.rows)
    results = replace(found, rows=rows)
    console = Console(width=width, record=True, file=open("/dev/null", "w"), force_terminal=False)  # noqa: SIM115
    with console.file:
        table.show(console, results, judge(results), Path("/x/report.html"))
    text = console.export_text()
    assert "…" not in text and ("low-precision-decentralized@gloo  " in text) is (width >= 100)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    for expected in (
        "Speed",
        "183",
        f"180 {units.DASH} 186",
        "1.83",
        "92 %",
        "exposed",
        "17.0 MiB",
        "600 MiB",
        "3.1e-07",
        "dp failed",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.rate(1234.5), "1,234"),
        (units.rate(9.996), "10.0"),
        (units.rate(99.96), "100"),
        (units.size(0), "0 B"),
        (units.size(1023), "1.00 KiB"),
        (units.size(17 * 1024**2), "17.0 MiB"),
        (units.duration(0.0213), "21.3 ms"),
        (units.duration(0.9996), "1.00 s"),
        (units.duration(59.4), "59.4 s"),
        (units.duration(125), "2 min 5 s"),
        (units.duration(12000), "3 h 20 min"),
        (units.tiny(0.0), "0"),
        (units.tiny(None), units.DASH),
        (units.metric("accuracy", 0.913), "91.3 %"),
        (units.metric("perplexity", 12.3456), "12.35"),
    ],
)
def test_numbers_are_written_in_one_form(shown: str, expected: str) -> None:
    assert shown == expected
