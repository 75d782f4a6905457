from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.errors import UsageError
from guozhuang.lab.results import FINAL_LOSS_STEPS, from_json, summarize_round, to_json
from guozhuang.records import write_text
from tests.pure.made_up import comparison, record, row, usual


def test_json_and_back_is_the_same_comparison() -> None:
    results = usual()
    assert from_json(to_json(results)) == results


def test_json_holds_the_derived_values_of_rows_that_ran() -> None:
    document = json.loads(to_json(usual()))
    by_name = {one["name"]: one["derived"] for one in document["rows"]}
    assert by_name["dp"] is None
    assert by_name["ddp"]["samples_per_s"] == {
        "median": pytest.approx(183),
        "min": pytest.approx(180),
        "max": pytest.approx(186),
    }
    assert by_name["ddp"]["speedup_over_single"] == pytest.approx(1.83)
    assert by_name["ddp"]["efficiency_against_none"] == pytest.approx(183 / 200)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no json", "no results.json"),
        ("[]", "no results.json"),
        ('{"schema_version": 99}', "another version"),
        ('{"schema_version": 1}', "not complete"),
    ],
)
def test_what_is_no_results_file_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        from_json(text)


@given(st.lists(st.floats(0.5, 1e4), min_size=1, max_size=7))
def test_median_lies_between_the_slowest_and_the_fastest_round(speeds: list[float]) -> None:
    found = row("ddp", *speeds)
    assert found.slowest <= found.samples_per_s <= found.fastest
    assert found.slowest == pytest.approx(min(speeds))
    assert found.fastest == pytest.approx(max(speeds))


def test_speed_of_a_round_is_that_of_its_slowest_rank() -> None:
    fast, slow = record(0, 100, 8, 2), record(1, 100, 8, 2)
    slow = replace(slow, elapsed_s=2 * fast.elapsed_s)
    assert summarize_round(1, [slow, fast]).samples_per_s == pytest.approx(50)


def test_a_round_has_no_exchange_when_a_rank_has_none_and_else_the_mean() -> None:
    assert summarize_round(1, [record(0, 100, 16, 1)]).phases.exchange_s is None
    one, two = record(0, 100, 8, 2), record(1, 100, 8, 2)
    two = replace(two, phases=replace(two.phases, exchange_s=3 * (one.phases.exchange_s or 0)))
    assert summarize_round(1, [one, two]).phases.exchange_s == pytest.approx(2 * (one.phases.exchange_s or 0))


def test_phases_come_from_the_median_round_and_add_up_to_its_step() -> None:
    found = row("ddp", 100, 300, 200)
    assert found.phases.step_s == pytest.approx(16 / 200)


def test_loss_is_the_mean_over_the_ranks_and_the_last_steps() -> None:
    found = row("ddp", 100)
    first, second = (one.losses for one in found.rounds[0].ranks)
    assert found.losses[0] == pytest.approx((first[0] + second[0]) / 2)
    assert found.final_loss == pytest.approx(sum(found.losses[-FINAL_LOSS_STEPS:]) / FINAL_LOSS_STEPS)


def test_machine_memory_adds_the_ranks_and_rank_memory_takes_the_largest() -> None:
    found = row("ddp", 100, 100, 100)
    ranks = found.rounds[0].ranks
    assert found.machine_bytes == sum(one.pss_bytes or 0 for one in ranks)
    assert found.peak_rank_bytes == max(one.peak_bytes or 0 for one in ranks)


def test_a_value_that_one_rank_could_not_tell_is_absent() -> None:
    found = row("ddp", 100)
    silent = replace(found.rounds[0].ranks[0], sent_bytes=None)
    found = replace(found, rounds=(summarize_round(1, [silent, found.rounds[0].ranks[1]]),))
    assert found.sent_bytes_per_step is None
    assert found.peak_rank_bytes is not None


def test_ranks_are_identical_only_if_all_hashes_of_a_round_agree() -> None:
    assert row("ddp", 100, 100).ranks_identical is True
    assert row("ddp", 100, digests="ab").ranks_identical is False
    assert row("single", 100).ranks_identical is None


def test_ratios_need_both_rows() -> None:
    results = comparison(row("ddp", 100), row("none", 125))
    assert results.ratio(results.rows[0], "none") == pytest.approx(0.8)
    assert results.ratio(results.rows[0], "single") is None


def test_a_loss_that_is_not_a_number_survives_json() -> None:
    found = row("ddp", 100)
    broken = replace(found.rounds[0].ranks[0], losses=(math.nan,) * 65, metrics={"accuracy": math.inf})
    results = comparison(replace(found, rounds=(summarize_round(1, [broken, found.rounds[0].ranks[1]]),)))
    text = to_json(results)
    assert "NaN" not in text and "Infinity" not in text  # strict JSON, for readers in other languages
    back = from_json(text).rows[0]
    assert math.isnan(back.final_loss)
    assert back.metrics == {"accuracy": math.inf}


def test_a_file_is_replaced_whole_and_leaves_no_other(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "new"
