"""The rule by which a race of contenders ends: wrong wins, regret and time, on made-up times; and what it says."""

import math
import random
from collections.abc import Callable, Sequence

import pytest

from guozhuang.cost.race import Race, RaceOutcome, Rules, _quantile, _tail
from guozhuang.errors import UsageError

Noise = Callable[[random.Random, float], float]


def heavy(rng: random.Random, spread: float) -> float:
    """Student's t with three degrees of freedom, of standard deviation ``spread``."""
    return spread / math.sqrt(3) * rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)


def spiky(rng: random.Random, spread: float) -> float:
    """Now and then another program takes much of the machine."""
    return 0.7 * rng.gauss(0, spread) + (rng.expovariate(1 / (4 * spread)) if rng.random() < 0.1 else 0)


NOISES: dict[str, Noise] = {"normal": lambda rng, spread: rng.gauss(0, spread), "heavy": heavy, "spiky": spiky}


def run(
    costs: Sequence[float], rng: random.Random, noise: Noise, spread: float, drift: float = 0.0
) -> tuple[RaceOutcome, float]:
    """Race contenders of these costs (logarithms); return the outcome, and its time as a share of all rounds of all."""
    names = [str(i) for i in range(len(costs))]
    race, now, spent = Race(names), 0.0, 0.0
    while not race.is_over:
        times = {}
        for name in race.turn():
            now += rng.gauss(0, drift)
            times[name] = math.exp(costs[int(name)] + now + noise(rng, spread))
        spent += sum(times.values()) / math.exp(now)
        race.add(times)
    return race.outcome(), spent / (race.rules.most_rounds * sum(map(math.exp, costs)))


def check(
    num_races: int, spreads: Sequence[float], counts: Sequence[int], most_regret: Callable[[float], float]
) -> None:
    for kind, noise in NOISES.items():
        for spread in spreads:
            for count in counts:
                rng, where = random.Random(f"{kind} {spread} {count}"), f"{kind}, spread {spread}, {count} contenders"
                wins = sum(run([0.0] * count, rng, noise, spread, spread / 3)[0].is_win for _ in range(num_races))
                # Above the promised share only by what so few races can tell.
                most = 0.05 * num_races + 2.3 * math.sqrt(0.05 * 0.95 * num_races)
                assert wins <= most, f"{where}: {wins} false wins in {num_races}"
                regrets, shares = [], []
                for _ in range(num_races):
                    costs = [rng.uniform(0, 0.4) for _ in range(count)]
                    outcome, share = run(costs, rng, noise, spread, spread / 3)
                    regrets.append(math.exp(costs[int(outcome.chosen)] - min(costs)) - 1)
                    shares.append(share)
                regret, share = sum(regrets) / num_races, sum(shares) / num_races
                assert regret <= most_regret(spread), f"{where}: regret {regret:.3f}"
                assert share <= (0.5 if spread > 0.05 else 0.3), f"{where}: {share:.2f} of the exhaustive time"


def test_equal_contenders_do_not_win_and_different_ones_are_told_apart_early() -> None:
    check(60, [0.04], [2, 5], lambda spread: 0.02)


@pytest.mark.slow
def test_false_wins_and_regret_over_thousands_of_races() -> None:
    check(500, [0.02, 0.05, 0.1], [2, 4, 8], lambda spread: 0.02 if spread <= 0.05 else 0.05)


def test_looking_after_every_round_without_a_correction_would_win_too_often() -> None:
    """The simulation finds what the correction is for: a test of 5 % at each look wins in far more races."""

    class Careless(Race):
        def __init__(self, names: Sequence[str]) -> None:
            super().__init__(names)
            self._level = self.rules.false_wins

    rng, wins = random.Random(1), 0
    for _ in range(100):
        race = Careless(["a", "b", "c"])
        while not race.is_over:
            race.add({name: math.exp(rng.gauss(0, 0.04)) for name in race.alive})
        wins += race.outcome().is_win
    assert wins > 20


def test_rounds_rotate_and_a_far_contender_leaves_after_two() -> None:
    race = Race(["a", "b", "c"], Rules(most_rounds=6))
    assert race.turn() == ("a", "b", "c")
    race.add({"a": 1.0, "b": 1.01, "c": 2.0})
    assert race.turn() == ("b", "c", "a")  # once may be another program's burst
    race.add({"a": 1.0, "b": 0.9, "c": 2.0})
    assert race.alive == ("a", "b") and race.turn() == ("a", "b")
    for ratio in (0.91, 0.89, 0.9, 0.9):
        race.add({"a": 1.0, "b": ratio}) if not race.is_over else None
    found = race.outcome()
    assert (found.chosen, found.is_win) == ("b", True)
    assert found.interval[0] < found.ratio < found.interval[1]
    assert found.left["c"].startswith("2.10 times as long as b in 2 rounds")
    assert "times as fast as a" in found.headline and "c" in found.seconds


def test_a_default_that_fails_is_no_win_for_the_next() -> None:
    race = Race(["a", "b", "c"])
    race.add({"a": 1.0, "b": 1.0, "c": 1.0})
    race.drop("a", "no memory")
    race.add({"b": 1.0, "c": 1.02})
    race.drop("c", "killed")
    found = race.outcome()
    assert race.is_over and (found.chosen, found.is_win, found.ratio) == ("b", False, 1.0)
    assert "a failed (no memory)" in found.headline and found.left["c"] == "killed"
    race.drop("b", "killed too")
    with pytest.raises(UsageError, match="every contender has failed: a: no memory; c: killed; b: killed too"):
        race.outcome()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Race([]), "different names"),
        (lambda: Race(["a", "a"]), "different names"),
        (lambda: Rules(false_wins=0.0), "false_wins of a race is a share between 0 and 0.5"),
        (lambda: Rules(margin=1.5), "margin of a race"),
        (lambda: Rules(most_rounds=0), "most_rounds of a race"),
        (lambda: Race(["a", "b"]).add({"a": 1.0}), "time of contender b in round 1"),
        (lambda: Race(["a"]).add({"a": 0.0}), "time of contender a in round 1"),
    ],
)
def test_what_makes_no_race(make: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


@pytest.mark.parametrize(
    ("t", "df", "tail"), [(6.314, 1, 0.05), (2.920, 2, 0.05), (4.541, 3, 0.01), (2.015, 5, 0.05), (2.764, 10, 0.01)]
)
def test_students_t_as_in_its_tables(t: float, df: int, tail: float) -> None:
    assert _tail(t, df) == pytest.approx(tail, rel=1e-3)
    assert _quantile(tail, df) == pytest.approx(t, rel=1e-3)
    assert _tail(-t, df) == pytest.approx(1 - tail, rel=1e-3)
