"""Laws of scaling, fits and intervals, against values worked out by hand and against what they are equivalent to."""

from __future__ import annotations

import math
import random

import pytest

from guozhuang.cost import fit, laws
from guozhuang.errors import UsageError


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (laws.amdahl(0.9, 10), 1 / 0.19),
        (laws.amdahl(0.95, math.inf), 20),
        (laws.amdahl(1, 64), 64),
        (laws.gustafson(0.9, 10), 9.1),
        (laws.karp_flatt(laws.amdahl(0.93, 24), 24), 0.07),  # serial work: the same share on any number of ranks
        (laws.universal_scalability(8, 0, 0), 8),
        (laws.universal_scalability(8, 0.1, 0), laws.amdahl(0.9, 8)),  # without coherence it is Amdahl's law
        (laws.weak_efficiency(0.100, 0.104), 0.9615384615),
        (laws.strong_efficiency(8.0, 1.25, 8), 0.8),
        (laws.isoefficiency_batch(0.9, 0.010, 0.001), 90),
        (laws.isoefficiency_batch(0.9, 0.010, 0.001, fixed_s=0.030), 60),
        (laws.young_interval(60, 7.9 * 3600), math.sqrt(120 * 28440)),
        (laws.useful_share(60, 1800, 28440, restart_s=300), 1 - 60 / 1800 - 1800 / 56880 - 300 / 28440),
        (laws.mean_time_between_failures(1024 * 7.9, 16384), 7.9 / 16),
        (laws.training_seconds(1001, 10, 0.5, useful=0.5, other_s=3), 104),
        (laws.rental(7200, 16, 2.5), 80),
    ],
)
def test_value(found: float, expected: float) -> None:
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_amdahl_and_gustafson_agree_where_each_share_is_measured_in_its_place(n: int) -> None:
    for share in (0.0, 0.3, 0.99, 1.0):
        on_n = laws.share_on_n(share, n)
        assert laws.gustafson(on_n, n) == pytest.approx(laws.amdahl(share, n))
        assert laws.share_on_one(on_n, n) == pytest.approx(share)


@pytest.mark.parametrize("call", [
    lambda: laws.amdahl(1.2, 2), lambda: laws.gustafson(0.5, 0), lambda: laws.karp_flatt(1.5, 1),
    lambda: laws.karp_flatt(0, 4), lambda: laws.isoefficiency_batch(1.0, 1, 1),
    lambda: fit.conformal_factor([1.0] * 8, [1.0] * 8), lambda: fit.conformal_factor([1.0] * 18, [1.0] * 18, 0.95),
    lambda: fit.relative_least_squares([(1.0, 2.0)], [1.0]), lambda: fit.relative_least_squares([(1.0,)], [0.0]),
])  # fmt: skip
def test_what_cannot_work_is_refused(call: object) -> None:
    with pytest.raises(UsageError, match="Fix:"):
        call()  # type: ignore[operator]


def test_the_smallest_batch_is_the_first_that_keeps_the_efficiency() -> None:
    alone, among = lambda b: 0.030 + b * 0.001, lambda b: 0.030 + b * 0.001 + 0.010
    assert laws.smallest_batch(0.9, alone, among) == 60  # isoefficiency_batch says the same
    assert laws.smallest_batch(0.5, alone, among) == 1
    assert laws.smallest_batch(0.9, alone, lambda b: 1.5 * alone(b), largest=1000) is None


def test_steps_and_samples_are_a_trade() -> None:
    critical = laws.CriticalBatch(noise_batch=1000, least_steps=500)
    for batch in (10, 1000, 10**6):
        steps, samples = critical.steps(batch) / 500, critical.samples(batch) / 500_000
        assert (steps - 1) * (samples - 1) == pytest.approx(1)
    assert critical.steps(1000) / critical.steps(2000) == pytest.approx(4 / 3)  # past the critical batch less than this
    assert critical.seconds(1000, 0.1) == pytest.approx(100)


def test_the_noise_scale_is_found_from_gradients_of_ranks() -> None:
    draw, own, mean, num_steps = random.Random(3), 0.0, 0.0, 2000
    truth, spread, batch, num_ranks = [0.3] * 10, 2.0, 4, 8  # |G|² = 0.9, tr Σ = 40: the noise scale is 44.4 samples
    for _ in range(num_steps):
        ranks = [[g + draw.gauss(0, spread / math.sqrt(batch)) for g in truth] for _ in range(num_ranks)]
        own += sum(sum(g * g for g in rank) for rank in ranks) / num_ranks / num_steps
        mean += sum((sum(column) / num_ranks) ** 2 for column in zip(*ranks, strict=True)) / num_steps
    assert laws.noise_scale_of(own, mean, num_ranks, batch) == pytest.approx(40 / 0.9, rel=0.1)


def test_coefficients_are_found_and_none_is_negative() -> None:
    rows = [(1.0, float(size)) for size in (1e3, 1e6, 1e8, 1e9)]
    seconds = [50e-6 + 2e-10 * row[1] for row in rows]
    assert fit.relative_least_squares(rows, seconds) == pytest.approx([50e-6, 2e-10])
    falling = fit.fit_scaling({1: 1.0, 2: 0.9, 4: 0.9})
    assert falling.added_s == 0 and falling.step_s(64) == pytest.approx(0.93, abs=0.01)
    assert fit.fit_scaling({1: 0.100, 2: 0.103}).step_s(16) == pytest.approx(0.100 + 0.003 * 15 / 8)


def test_one_wrong_row_does_not_move_a_robust_fit() -> None:
    rows = [(1.0, float(n)) for n in range(1, 9)]
    seconds = [2 + 0.1 * n + 0.001 * (-1) ** n for n in range(1, 9)]
    seconds[4] *= 1.24
    plain, robust = (fit.relative_least_squares(rows, seconds, robust=each)[0] for each in (False, True))
    assert abs(robust - 2) < 0.01 < abs(plain - 2)


def test_the_interval_holds_the_share_that_it_states() -> None:
    draw, held = random.Random(5), 0
    for _ in range(400):
        measured = [math.exp(draw.gauss(0, 0.1)) for _ in range(20)]
        held += abs(math.log(measured[0])) <= math.log(fit.conformal_factor([1.0] * 19, measured[1:]))
    assert 0.87 < held / 400 < 0.95
    assert fit.least_held_out() == 9 and fit.least_held_out(0.95) == 19


def test_the_bootstrap_keeps_rounds_together() -> None:
    rounds = [(slow * 1.0, slow * 1.1) for slow in (1.0, 1.3, 0.8, 1.1, 2.0)]  # a slow round is slow for both
    draws = fit.bootstrap(rounds, lambda chosen: sum(b for _, b in chosen) / sum(a for a, _ in chosen))
    assert len(draws) == 200 and draws[0] == pytest.approx(1.1) and draws[-1] == pytest.approx(1.1)
    spread = fit.bootstrap(rounds, lambda chosen: sum(a for a, _ in chosen) / len(chosen))
    assert fit.percentile(spread, 0.05) < 1.24 < fit.percentile(spread, 0.95)


def test_errors_are_summed_up() -> None:
    summary = fit.summarize_errors([1.1, 0.9, 1.0], [1.0, 1.0, 1.0])
    assert (summary.num, summary.mean, summary.worst, summary.bias) == pytest.approx((3, 0.2 / 3, 0.1, 0))
