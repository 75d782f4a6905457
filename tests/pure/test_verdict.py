from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang import units
from guozhuang.lab.results import Difference, RunFailure, StrategyRow
from guozhuang.lab.verdict import judge
from tests.pure.made_up import comparison, row, usual


def test_the_fastest_that_trains_is_taken_and_the_bound_never() -> None:
    verdict = judge(usual())
    assert verdict.recommended == "ddp"
    assert "fastest" in verdict.headline
    assert any("1.83" in reason and "1.08" in reason for reason in verdict.reasons)
    assert any("92 %" in reason for reason in verdict.reasons)


def test_a_tie_goes_to_the_simpler_and_says_so() -> None:
    verdict = judge(comparison(row("torch-ddp", 100, 104, 102), row("ddp", 99, 103, 101), row("single", 40, 41, 42)))
    assert verdict.recommended == "ddp"
    assert "a statistical tie with torch-ddp" in verdict.headline and "fastest" not in verdict.headline
    assert "simplest" in verdict.headline


def test_nothing_is_recommended_where_ranges_overlap_and_medians_are_apart() -> None:
    verdict = judge(comparison(row("single", 100, 100, 200), row("ddp", 150, 190, 191), row("dp", 90, 91, 92)))
    assert verdict.recommended is None and verdict.how == ()
    assert "ddp trained 150 to 191 samples/s and single trained 100 to 200 samples/s" in verdict.headline
    assert verdict.headline.endswith("with more --rounds.") and verdict.reasons == (
        "Slower than ddp in every round: dp.",
    )


def test_nothing_is_recommended_where_ties_are_restless() -> None:
    verdict = judge(comparison(row("torch-ddp", 70, 104, 102), row("ddp", 99, 103, 101), row("single", 40, 41, 42)))
    assert verdict.recommended is None and "torch-ddp trained 70.0 to 104 samples/s" in verdict.headline


def test_a_clear_lead_on_a_restless_machine_says_what_it_is_at_least() -> None:
    verdict = judge(comparison(row("single", 10, 20), row("ddp", 100, 150)))
    assert verdict.recommended == "ddp"
    assert f"{units.times(125 / 15)} single (at least {units.times(5)})" in verdict.reasons[0]


def test_one_round_on_a_busy_machine_carries_no_verdict() -> None:
    results = comparison(row("single", 10), row("ddp", 340))
    assert judge(replace(results, busy=0.1)).recommended == "ddp"
    verdict = judge(replace(results, busy=0.9))
    assert verdict.recommended is None and verdict.reasons == ()
    assert "other programs kept 90 % of the cores busy, and one round does not show" in verdict.headline
    assert (
        judge(replace(comparison(row("ddp", 340)), busy=0.9)).recommended == "ddp"
    )  # there is nothing to compare with


def test_close_medians_without_overlap_are_no_tie() -> None:
    assert judge(comparison(row("single", 95, 96, 97), row("ddp", 98, 99, 100))).recommended == "ddp"


def test_one_round_ties_within_a_margin_and_warns() -> None:
    near = judge(comparison(row("single", 99), row("ddp", 100)))
    far = judge(comparison(row("single", 90), row("ddp", 100)))
    assert near.recommended == "single"
    assert far.recommended == "ddp"
    assert all(any("One round" in caution for caution in one.cautions) for one in (near, far))
    assert "one round cannot tell" in near.headline and "fastest" in far.headline


def test_ranks_that_drifted_apart_are_not_recommended() -> None:
    verdict = judge(comparison(row("single", 50, 51, 52), row("ddp", 100, 101, 102, digests="ab")))
    assert verdict.recommended == "single"
    assert any("different weights" in caution for caution in verdict.cautions)


def test_nothing_is_recommended_when_only_the_bound_ran() -> None:
    failed = row("ddp", failure=RunFailure("rank 1: it broke", "x.log", 1))
    verdict = judge(comparison(row("none", 100), failed))
    assert verdict.recommended is None
    assert verdict.how == ()


def test_a_strategy_that_failed_after_fast_rounds_is_not_recommended() -> None:
    fast = replace(row("ddp", 500, 500), failure=RunFailure("rank 1: it broke", "x.log", 3))
    assert judge(comparison(row("single", 50, 51, 52), fast)).recommended == "single"


def test_single_is_told_whether_spreading_could_win_at_all() -> None:
    hopeless = judge(comparison(row("single", 100, 101, 102), row("none", 90, 91, 92)))
    hopeful = judge(comparison(row("single", 100, 101, 102), row("none", 150, 151, 152)))
    assert any("can be faster" in reason for reason in hopeless.reasons)
    assert any("no strategy reached" in reason for reason in hopeful.reasons)
    assert hopeless.how[-1] == "guozhuang run --nproc-per-node 1 --strategy single train.py"


def test_how_names_the_ranks_that_were_measured() -> None:
    assert judge(usual()).how[-1] == "guozhuang run --nproc-per-node 2 --strategy ddp train.py"


def _far(distance: float) -> StrategyRow:
    return replace(row("ddp", 100, 101), difference=Difference(0.5, "weight", 1.0, distance))


def test_weights_far_from_single_are_pointed_out_and_dropout_named() -> None:
    assert not any("away" in c for c in judge(comparison(_far(1e-5))).cautions)
    plain = judge(comparison(_far(0.1))).cautions
    dropped = judge(comparison(_far(0.1), dropout=0.1)).cautions
    assert any("away" in c and "Dropout" not in c for c in plain)
    assert any("Dropout is on" in c for c in dropped)


def test_rounds_that_differ_wildly_are_pointed_out() -> None:
    quiet = comparison(row("single", 100, 101, 120), row("ddp", 200, 201, 202))
    busy = comparison(row("single", 50, 101, 120), row("ddp", 200, 201, 202))
    assert not any("not quiet" in caution for caution in judge(quiet).cautions)
    assert any("those of single" in caution and "2.40" in caution for caution in judge(busy).cautions)


def test_a_loss_that_is_not_a_number_is_pointed_out() -> None:
    found = row("ddp", 100, 101)
    first = found.rounds[0]
    broken = tuple(replace(rank, losses=(math.nan,) * 65) for rank in first.ranks)
    found = replace(found, rounds=(replace(first, ranks=broken), found.rounds[1]))
    assert any("diverged" in caution for caution in judge(comparison(found)).cautions)
    assert any("away" in caution for caution in judge(comparison(_far(math.nan))).cautions)


def test_how_gives_one_process_the_whole_batch() -> None:
    lines = judge(comparison(row("dp", 100, 101, 102))).how
    assert any("batch_size=16" in line for line in lines)
    assert any("num_replicas=2" in line for line in lines)


def test_more_than_the_bound_is_explained() -> None:
    above = judge(comparison(row("ddp", 110, 111, 112), row("none", 100, 101, 102)))
    level = judge(comparison(row("ddp", 100, 101, 102), row("none", 100, 101, 102)))
    assert any("repeats on every rank" in reason for reason in above.reasons)
    assert any("next to nothing" in reason for reason in level.reasons)


def test_an_inexact_strategy_is_called_so_beside_the_fastest_exact_one() -> None:
    verdict = judge(comparison(row("single", 40, 41), row("ddp", 50, 51), row("diloco", 100, 101)))
    assert verdict.recommended == "diloco"
    assert verdict.headline.endswith("and it is inexact.")
    (caution,) = (one for one in verdict.cautions if "inexact" in one)
    assert "ddp, with 50.5 samples/s" in caution and "accuracy at the end 87.0 % against 87.0 %" in caution


def test_where_sending_less_does_not_pay_that_is_said() -> None:
    verdict = judge(comparison(row("ddp", 100, 101), row("quantize8", 80, 81), row("diloco", 99, 102)))
    assert verdict.recommended == "ddp"
    assert any("quantize8 and diloco" in reason and "does not pay" in reason for reason in verdict.reasons)
    assert not any("does not pay" in reason for reason in judge(usual()).reasons)


def _with_losses(found: StrategyRow, first: float, later: float) -> StrategyRow:
    losses = (first, *[later] * 64)
    rounds = [replace(one, ranks=tuple(replace(r, losses=losses) for r in one.ranks)) for one in found.rounds]
    return replace(found, rounds=tuple(rounds))


@pytest.mark.parametrize(
    ("first", "later"), [(math.nan, math.nan), (0.7, math.inf), (0.7, 1e9), (0.7, 8.0), (-3.0, 40.0), (0.0, 1e9)]
)
def test_what_diverged_is_neither_recommended_nor_compared_with(first: float, later: float) -> None:
    broken = _with_losses(row("diloco", 200, 201), first, later)
    verdict = judge(comparison(row("single", 40, 41), row("ddp", 50, 51), broken))
    assert verdict.recommended == "ddp"
    assert not any("diloco" in text for text in (verdict.headline, *verdict.reasons))
    assert any("diloco began with a loss" in one and "diverged" in one for one in verdict.cautions)
    alone = judge(comparison(broken))
    assert alone.recommended is None and "astray" in alone.headline
    assert "only strategy" in judge(comparison(row("ddp", 50, 51), broken)).headline


@pytest.mark.parametrize(
    ("first", "later"), [(0.7, 0.1), (0.7, 5.0), (-3.0, -40.0), (-3.0, 2.0), (0.0, 0.5), (1e-6, 1e-6)]
)
def test_a_loss_of_the_order_of_the_first_is_no_divergence(first: float, later: float) -> None:
    verdict = judge(comparison(_with_losses(row("diloco", 200, 201), first, later), row("ddp", 50, 51)))
    assert verdict.recommended == "diloco"
    assert not any("diverged" in one for one in verdict.cautions)


@given(st.lists(st.lists(st.integers(50, 200), min_size=2, max_size=3), min_size=2, max_size=5))
def test_a_headline_calls_nothing_fastest_that_others_reached(speeds: list[list[int]]) -> None:
    names = ("single", "ddp", "torch-ddp", "dp", "quantize8")
    rows = [row(name, *map(float, each)) for name, each in zip(names, speeds, strict=False)]
    verdict = judge(comparison(*rows))
    if verdict.recommended is None:
        first = max(rows, key=lambda each: each.samples_per_s)
        assert any(each.fastest >= first.slowest for each in rows if each is not first)
        return
    taken = next(each for each in rows if each.name == verdict.recommended)
    others = [each for each in rows if each is not taken]
    reached = any(each.fastest >= taken.slowest for each in others)
    assert ("fastest" in verdict.headline) == (not reached)


def test_batch_norm_is_named_where_weights_differ() -> None:
    def with_batch_norms(distance: float, number: int) -> str:
        far = _far(distance)
        ranks = [tuple(replace(rank, num_batch_norms=number) for rank in one.ranks) for one in far.rounds]
        far = replace(far, rounds=tuple(replace(o, ranks=r) for o, r in zip(far.rounds, ranks, strict=True)))
        return " ".join(judge(comparison(row("single", 50, 51), far)).cautions)

    said = with_batch_norms(0.1, 3)
    assert (
        "3 BatchNorm layers" in said
        and "8 samples of one rank" in said
        and "all 16 under single" in said
        and "ddp ended 0.1" in said
    )
    assert "convert_sync_batchnorm" in said
    assert "BatchNorm" not in with_batch_norms(0.1, 0) + with_batch_norms(1e-9, 3)


def _late(row: StrategyRow, rank: int, share: float, number: int | None = None) -> StrategyRow:
    """A row of which one rank takes longer in forward, in all rounds or one; and steps that vary from rank to rank."""
    rounds = []
    for each in row.rounds:
        records = []
        for record in each.ranks:
            phases = record.phases
            if record.rank == rank and number in (None, each.number):
                phases = replace(phases, forward_s=phases.forward_s + share * phases.step_s)
            own = [phases.step_s * (1 + 0.1 * ((step + record.rank) % 2)) for step in range(record.num_steps)]
            records.append(replace(record, phases=phases, own_steps_s=tuple(own)))
        rounds.append(replace(each, ranks=tuple(records)))
    return replace(row, rounds=tuple(rounds))


def test_for_whom_ranks_wait() -> None:
    alike, bound = row("ddp", 100, 101, 102), row("none", 120, 121, 122)
    always = judge(comparison(_late(alike, 1, 0.2), bound)).cautions
    assert any("Under ddp, rank 1 is slow: its forward takes" in caution for caution in always)
    once = judge(comparison(_late(alike, 1, 0.2, number=2), bound)).cautions
    assert not any("is slow" in caution for caution in (*once, *judge(comparison(alike, bound)).cautions))
    drifting = judge(comparison(_late(alike, 1, 0.0), _late(bound, 1, 0.0)))
    (drift,) = (caution for caution in drifting.cautions if "ranks drift" in caution)
    assert "a step of ddp is longer than one of none" in drift
    assert not any("drift" in caution for caution in judge(comparison(alike, bound)).cautions)  # not known
