"""The figures of docs/scaling.md are those that the command gives."""

from __future__ import annotations

import re

import pytest

from benchmarks import scaling

TEXT = scaling.PAGE.read_text()
SHOWN = dict(re.findall(r"<!-- scaling: ([\w-]+) -->\n```text\n(.*?)```", TEXT, flags=re.DOTALL))


def test_each_table_of_the_page_is_made_by_the_command() -> None:
    assert SHOWN.keys() == scaling.BLOCKS.keys()
    wrong = [name for name in SHOWN if scaling.block(name) != SHOWN[name]]
    assert not wrong, f"python -m benchmarks.scaling --write puts {wrong} right"


def test_percentages_in_sentences_stand_in_a_table() -> None:
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    told = set(re.findall(r"(\d[\d.,]*) %", prose)) - {"3"}  # the assumed spread
    tables = "\n".join(SHOWN.values()) + published_summary()
    assert len(told) >= 3 and [each for each in told if not re.search(rf"\b{re.escape(each)}[.\d]* %", tables)] == []


def published_summary() -> str:
    from benchmarks.published import data_parallel
    from benchmarks.published.points import percent

    return "\n" + percent(data_parallel.minutes().errors().worst, 0)


def test_a_page_is_changed_in_its_tables_alone() -> None:
    page = "a\n<!-- scaling: why -->\n```text\nold\n```\nb\n```text\nold\n```\n"
    assert scaling.with_blocks(page, lambda name: f"new {name}\n") == page.replace("old", "new why", 1)


def test_an_unknown_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scaling.main(["cap"])
    assert "no such block: cap" in capsys.readouterr().err
    assert scaling.main(["critical"]) == 0 and "noise scale" in capsys.readouterr().out
