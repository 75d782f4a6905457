"""``Race``: which of several ways to do the same work is the fastest, decided while they are measured, in few rounds.

In a round each contender is measured once, in rotating order, so that a slow drift of the machine hits all alike. What is
judged is the logarithm of the ratio of two times of the same round. The first contender is the *default*: it stays unless
another one is shown to be faster.

[Note: looking after every round] A test of 5 % that is repeated after every round finds a difference between equal contenders
far more often than in 5 % of the races. So the chance of a false win is shared out (Bonferroni): over the contenders that could
win, and over the rounds at which somebody looks (:data:`LOOKS`; they come more rarely later, when a round adds little). At each
look it is a one-sided t-test of the mean of the pair's own log-ratios without the outermost. Dropping a slow contender needs no
such care, as the worst that a mistake costs is the difference between the two: that test is not corrected, and its spread is
that of all contenders together, so that a contender that is far behind leaves after two rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from guozhuang.errors import UsageError, explain

#: The numbers of rounds after which a race looks for a winner.
LOOKS = (3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 24, 29, 35, 42, 50, 60)

_DROPS = 0.05  # the chance, at each look, that an equal contender is dropped as slower
_GIVES_UP = 0.1  # the chance, at each look, that one is dropped as no better that is better by just the margin
_LEAST = 1e-6  # equal times to the last digit come from a coarse clock
_FAR = 0.25  # a contender that is behind by more than this log-ratio in both of the first rounds is dropped


@dataclass(frozen=True)
class Rules:
    """When a race ends.

    Attributes:
        false_wins: the most races of equal contenders, as a share, in which another one than the default may win.
        margin: a contender that is faster by less than this share counts as no better than the default.
        most_rounds: the race ends then, and who was not shown to be slower stays.
    """

    false_wins: float = 0.05
    margin: float = 0.02
    most_rounds: int = 24

    def __post_init__(self) -> None:
        for name, low, high in (("false_wins", 0.0, 0.5), ("margin", 0.0, 1.0)):
            if not low < (value := getattr(self, name)) < high:
                raise UsageError(explain(f"{name} of a race is a share between {low:g} and {high:g}", value=value))
        if self.most_rounds < 1:
            raise UsageError(explain("most_rounds of a race is a count of at least 1", value=self.most_rounds))


@dataclass(frozen=True)
class RaceOutcome:
    """What a race has found.

    Attributes:
        chosen: the contender to use.
        default: the one that would be used without a race.
        is_win: whether another one than the default was shown to be faster than it.
        ratio: the default's time divided by that of ``chosen``, the mean over their common rounds; 1 without a win.
        interval: in which the ratio lies in 95 of 100 races, for one look; (1, 1) without a win.
        num_rounds: the rounds that were run.
        left: why each contender that is not chosen was left, by its name.
        seconds: the geometric mean of each contender's times; of those that finished a round.
    """

    chosen: str
    default: str
    is_win: bool
    ratio: float
    interval: tuple[float, float]
    num_rounds: int
    left: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """Return the outcome in a sentence."""
        after = f"after {self.num_rounds} round{'s' * (self.num_rounds != 1)}"
        if self.is_win:
            low, high = self.interval
            return f"{self.chosen}: {self.ratio:.2f} times as fast as {self.default} ({low:.2f} to {high:.2f}) {after}"
        if self.chosen != self.default:
            return f"{self.chosen}: {self.default} failed ({self.left.get(self.default, '')}) {after}"
        return f"{self.chosen}: no difference that counts, so the default stays, {after}"


class Race:
    """Decides, round by round, which contenders stay. Pure: the caller measures, and has the clock.

    Args:
        names: the contenders; the first is the default, and of equal ones the earlier stays.
        rules: when the race ends.

    Attributes:
        rules: when the race ends.
        num_rounds: the rounds that were added so far.
    """

    def __init__(self, names: Sequence[str], rules: Rules | None = None) -> None:
        if not names or len(set(names)) < len(names):
            raise UsageError(explain("a race needs contenders of different names", value=list(names)))
        self.rules = rules or Rules()
        self._names = tuple(names)
        self._alive = list(names)
        self._logs: dict[str, list[float]] = {name: [] for name in names}
        self._left: dict[str, str] = {}
        self.num_rounds, self._is_win = 0, False
        looks = [look for look in LOOKS if look <= self.rules.most_rounds]
        self._level = self.rules.false_wins / max(1, len(names) - 1) / max(1, len(looks))

    @property
    def alive(self) -> tuple[str, ...]:
        """The contenders that are still in the race, in the order in which they were given."""
        return tuple(self._alive)

    @property
    def is_over(self) -> bool:
        """Whether no further round is needed."""
        return len(self._alive) < 2 or self.num_rounds >= self.rules.most_rounds

    def turn(self) -> tuple[str, ...]:
        """Return the contenders in the order in which the next round measures them; it rotates."""
        first = self.num_rounds % max(1, len(self._alive))
        return (*self._alive[first:], *self._alive[:first])

    def drop(self, name: str, why: str) -> None:
        """Take a contender out that cannot go on, as one whose run has failed."""
        if name in self._alive:
            self._alive.remove(name)
            self._left[name] = why

    def add(self, seconds: Mapping[str, float]) -> None:
        """Take the times of a round, of every contender that is still in the race, and drop those that are behind.

        Raises:
            UsageError: a contender's time is missing, or is no time.
        """
        for name in self._alive:
            value = seconds.get(name, math.nan)
            if not (math.isfinite(value) and value > 0):
                what = f"the time of contender {name} in round {self.num_rounds + 1} of a race is a number of seconds above 0"
                raise UsageError(explain(what, value=value, fix="drop a contender that has failed"))
        for name in self._alive:
            self._logs[name].append(math.log(seconds[name]))
        self.num_rounds += 1
        while len(self._alive) > 1 and self._default_loses():
            pass
        self._drop_slow()

    def outcome(self) -> RaceOutcome:
        """Return what was found so far.

        Raises:
            UsageError: no contender is left, because all were dropped.
        """
        if not self._alive:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._left.items())
            raise UsageError(explain(f"every contender has failed: {reasons}", fix="see the first of these errors"))
        chosen, default = self._alive[0], self._names[0]
        left = dict(self._left)
        for name in self._alive[1:]:
            left[name] = self._in_words(name, chosen)
        ratio, interval = 1.0, (1.0, 1.0)
        if self._is_win:
            pairs = self._pairs(default, chosen)
            mean, error, df = _trimmed(pairs)
            half = _quantile(0.025, df) * error
            ratio, interval = math.exp(mean), (math.exp(mean - half), math.exp(mean + half))
        times = {name: math.exp(statistics.fmean(logs)) for name, logs in self._logs.items() if logs}
        return RaceOutcome(chosen, default, self._is_win, ratio, interval, self.num_rounds, left, times)

    def _pairs(self, slower: str, faster: str) -> list[float]:
        """Return the log-ratio of two contenders' times in each round that both have finished."""
        return [a - b for a, b in zip(self._logs[slower], self._logs[faster], strict=False)]

    def _default_loses(self) -> bool:
        """Drop the first contender if another one is shown to be faster; return whether."""
        if self.num_rounds not in LOOKS:
            return False
        first = self._alive[0]
        better = [name for name in self._alive[1:] if _is_above(self._pairs(first, name), 0.0, self._level)]
        if not better:
            return False
        best = min(better, key=lambda name: sum(self._logs[name]))
        self._is_win |= first == self._names[0]
        self.drop(first, self._in_words(first, best))
        return True

    def _drop_slow(self) -> None:
        """Drop contenders that are behind the leader, and those that cannot be better than the first by the margin."""
        first = self._alive[0]
        leader = min(self._alive, key=lambda name: sum(self._logs[name]))
        together = self._spread_of_all()
        for name in [name for name in self._alive if name not in (first, leader)]:
            behind = self._pairs(name, leader)
            is_far = len(behind) == 2 and min(behind) > _FAR
            if is_far or _is_above(behind, 0.0, _DROPS, together):
                self.drop(name, self._in_words(name, leader))
        margin = math.log1p(self.rules.margin)
        for name in self._alive[1:]:
            if _is_above([-gain for gain in self._pairs(first, name)], -margin, _GIVES_UP, together):
                self.drop(name, self._in_words(name, first))

    def _spread_of_all(self) -> tuple[float, int]:
        """Return the standard deviation of a log-ratio, as all contenders in the race show it, and its degrees of freedom."""
        n, k = self.num_rounds, len(self._alive)
        if n < 2 or k < 2:
            return math.nan, 0
        rows = [[self._logs[name][r] for name in self._alive] for r in range(n)]
        means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        total = 0.0
        for row in rows:
            own = statistics.fmean(row) - statistics.fmean(means)
            total += sum((value - mean - own) ** 2 for value, mean in zip(row, means, strict=True))
        df = (n - 1) * (k - 1)
        return math.sqrt(2 * total / df), df

    def _in_words(self, name: str, than: str) -> str:
        pairs = self._pairs(name, than)
        if not pairs:
            return "was not measured"
        ratio = math.exp(statistics.median(pairs))
        count = f"{len(pairs)} round{'s' * (len(pairs) != 1)}"
        if ratio > 1 + self.rules.margin:
            return f"{ratio:.2f} times as long as {than} in {count}"
        if ratio < 1 / (1 + self.rules.margin):
            return f"looks {1 / ratio:.2f} times as fast as {than}, which {count} that differ so much do not show"
        return f"no better than {than} by {100 * self.rules.margin:g} % ({1 / ratio:.3f} times as fast in {count})"


def _is_above(values: Sequence[float], bound: float, level: float, spread: tuple[float, int] | None = None) -> bool:
    """Return whether the mean of a population is above a bound, by a one-sided t-test of a sample of it.

    Args:
        values: the sample.
        bound: the bound.
        level: the chance of a wrong yes.
        spread: standard deviation of the population and its degrees of freedom; None: as the sample shows it.
    """
    n = len(values)
    if n < 2:
        return False
    if spread is None:
        mean, error, df = _trimmed(values)
    else:
        mean, error, df = statistics.fmean(values), max(spread[0], _LEAST) / math.sqrt(n), spread[1]
    return df > 0 and _tail((mean - bound) / error, df) <= level


def _trimmed(values: Sequence[float]) -> tuple[float, float, int]:
    """Return the mean of a sample without a sixth of its values at each end, its standard error and degrees of freedom.

    A burst of another program so counts little. Source: Yuen 1974, The two-sample trimmed t for unequal population variances,
    Biometrika 61, for one sample: the error is that of the sample whose ends are replaced by the nearest values that stay.
    """
    n, cut = len(values), len(values) // 6
    ordered = sorted(values)
    kept = ordered[cut : n - cut]
    replaced = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = max(statistics.stdev(replaced), _LEAST) * math.sqrt(n) / len(kept)
    return statistics.fmean(kept), error, len(kept) - 1


def _tail(t: float, df: int) -> float:
    """Return the chance that Student's t with ``df`` degrees of freedom (a whole number) exceeds ``t``."""
    if t < 0:
        return 1 - _tail(-t, df)
    angle = math.atan2(t, math.sqrt(df))
    cosine = math.cos(angle)
    if df % 2:  # the series of Abramowitz and Stegun, 26.7.3 and 26.7.4
        term, total = cosine, 0.0
        for i in range(1, df - 1, 2):
            total += term
            term *= cosine * cosine * (i + 1) / (i + 2)
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        term, total = 1.0, 0.0
        for i in range(0, df - 1, 2):
            total += term
            term *= cosine * cosine * (i + 1) / (i + 2)
        inside = math.sin(angle) * total
    return max(0.0, (1 - inside) / 2)


def _quantile(level: float, df: int) -> float:
    """Return the ``t`` that Student's t exceeds with the chance ``level``."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, df) > level else (low, middle)
    return high
