"""The report in a browser: no error on the console, and nothing wider than the page, on a screen and on a telephone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from guozhuang.lab import report
from guozhuang.lab.results import RunFailure
from tests.pure.made_up import comparison, row, usual
from tests.waiting import LIMIT_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1400, 420)
# Opens each page in a frame of each width, and writes what it measured into the page.
OPENER = """<!doctype html><meta charset="utf-8"><pre id="found"></pre><script>
const pages = PAGES, found = {};
const inside = (element, selector) => element.parentElement !== null && element.parentElement.closest(selector) !== null;
function measure(page) {
  const width = page.documentElement.clientWidth, all = [...page.querySelectorAll("body *")];
  const shown = all.filter(each => each.getClientRects().length);
  const wide = shown.filter(each => each.getBoundingClientRect().right > width + 1 && !inside(each, ".scroll, pre, svg"));
  const cut = shown.filter(each => each.tagName === "text").filter(each => {
    const own = each.getBoundingClientRect(), box = each.closest("svg").getBoundingClientRect();
    return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1;
  });
  const texts = shown.filter(each => each.tagName === "text").map(each => each.getBoundingClientRect().height);
  return {
    width, page: page.documentElement.scrollWidth, wide: wide.map(each => each.outerHTML.slice(0, 80)),
    cut: cut.map(each => each.textContent), plots: shown.filter(each => each.matches("svg.plot")).length,
    smallest: Math.min(...texts),
    scrolling: shown.filter(each => each.matches(".scroll") && each.scrollWidth > each.clientWidth).length,
  };
}
const waiting = [];
for (const [name, text] of Object.entries(pages)) for (const width of WIDTHS) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  frame.srcdoc = text;
  waiting.push(new Promise(done => frame.onload = () => { found[name + width] = measure(frame.contentDocument); done(); }));
  document.body.append(frame);
}
Promise.all(waiting).then(() => document.getElementById("found").textContent = JSON.stringify(found));
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium, to open the report in it: apt install chromium")
def test_the_report_fits_a_screen_and_a_telephone(tmp_path: Path) -> None:
    long = replace(row("ddp", 160, 166, 161), name="low-precision-decentralized@cpu:gloo,cuda:nccl")
    log = f"/a/very/long/path/{'y' * 120}/dp.log"
    failed = row("dp", failure=RunFailure(f"rank 0: RuntimeError: {'x' * 300} fell over", log, 1))
    much = comparison(*usual().rows[::2], long, failed, notes=("A note.",), data="/home/" + "z" * 120 + ".csv")
    much = replace(much, command="guozhuang compare --data " + "z" * 150)
    pages = {
        name: report.write(results, tmp_path / name).read_text()
        for name, results in (("usual", usual()), ("much", much))
    }
    pages["broken"] = (
        pages["usual"]
        .replace("</main>", '<div style="width: 2000px">x</div></main><script>console.error("made up")</script>')
        .replace('viewBox="0 ', 'viewBox="300 ', 1)
    )
    opener = tmp_path / "opener.html"
    embedded = json.dumps(pages).replace("</", "<\\/")
    opener.write_text(OPENER.replace("PAGES", embedded).replace("of WIDTHS", f"of {list(WIDTHS)}"))
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", opener.as_uri()],
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    shown = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert shown is not None, done.stderr[-2000:]
    found = json.loads(unescape(shown[1]))
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line and '"made up"' not in line]
    assert said == []
    for name in ("usual", "much"):
        for width in WIDTHS:
            one = found[f"{name}{width}"]
            assert (one["page"], one["wide"], one["cut"], one["plots"]) == (one["width"], [], [], 3), (name, width)
            assert one["width"] > width - 20 and one["smallest"] > 9  # pixels
        assert found[f"{name}420"]["scrolling"] == 4  # every table has more columns than fit, inside its box
    # What is looked for is found where it is.
    assert sum('"made up"' in line for line in done.stderr.splitlines() if "CONSOLE" in line) == len(WIDTHS)
    assert all(
        len(found[f"broken{width}"]["wide"]) == 1 and found[f"broken{width}"]["page"] > width for width in WIDTHS
    )
    assert found["broken1400"]["cut"]
