"""Fit cost models to measured times, and say how far a prediction of them may be off.

Times are fitted, never speed-ups: an error of the time on one rank would enter every point. Errors are relative, and no
coefficient is negative, because no part of a step takes less than no time.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from guozhuang.errors import UsageError, explain

Round = TypeVar("Round")

#: How the time that ranks add to a step grows with their number, as a function that is 0 for one rank.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda n: float(n > 1),
    "ring": lambda n: 2 * (n - 1) / n,
    "tree": lambda n: math.log2(n),
    "linear": lambda n: n - 1.0,
}


def relative_least_squares(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], *, robust: bool = False
) -> list[float]:
    """Return coefficients x, none negative, with which ``rows @ x`` differs least from ``seconds``, relatively.

    Args:
        rows: one row for each measured time, one column for each coefficient.
        seconds: the measured times, each larger than 0.
        robust: count a time that is far from what the others say (Huber's weights) less, so that one wrong row does not
            move the rest.

    Raises:
        UsageError: there are fewer times than coefficients, or a time is not positive.
    """
    import numpy as np
    from scipy.optimize import nnls

    if not rows or len(rows) < len(rows[0]) or len(rows) != len(seconds):
        fix = "measure as many times as there are coefficients, better twice as many"
        raise UsageError(explain("too few times to fit", value=(len(rows), len(rows[0]) if rows else 0), fix=fix))
    if not min(seconds) > 0:
        raise UsageError(explain("a measured time is larger than 0", value=min(seconds), fix="leave that row out"))
    scaled = np.asarray(rows, float) / np.asarray(seconds, float)[:, None]
    target, weights = np.ones(len(rows)), np.ones(len(rows))
    # Columns of similar size: else a coefficient in seconds and one in seconds per byte lose digits to each other.
    sizes = np.linalg.norm(scaled, axis=0)
    sizes[sizes == 0] = 1
    found, _ = nnls(scaled / sizes, target)
    for _ in range(20 if robust else 0):
        off = np.abs(scaled / sizes @ found - target)
        width = 1.345 * 1.4826 * float(np.median(off))
        if width <= 0:
            break
        weights = np.sqrt(np.minimum(1, width / np.maximum(off, width)))
        before, (found, _) = found, nnls(scaled / sizes * weights[:, None], target * weights)
        if np.allclose(before, found, rtol=1e-9, atol=0):
            break
    return [float(x) for x in found / sizes]


@dataclass(frozen=True)
class ScalingFit:
    """A step of n ranks whose batch each is fixed: ``one_rank_s + added_s * SHAPES[shape](n)``."""

    one_rank_s: float
    added_s: float
    shape: str

    def step_s(self, num_ranks: int) -> float:
        """Return the predicted seconds of a step of ``num_ranks``."""
        return self.one_rank_s + self.added_s * SHAPES[self.shape](num_ranks)


def fit_scaling(step_s: Mapping[int, float], shape: str = "ring") -> ScalingFit:
    """Fit steps of equal batches a rank, by their number of ranks, with one number for what communication adds.

    Two times give the two coefficients exactly if ranks cost time at all; "ring" predicts published scaling best.
    """
    rows = [(1.0, SHAPES[shape](n)) for n in step_s]
    one_rank_s, added_s = relative_least_squares(rows, list(step_s.values()))
    return ScalingFit(one_rank_s, added_s, shape)


def bootstrap(
    rounds: Sequence[Round], estimate: Callable[[Sequence[Round]], float], num_draws: int = 200, seed: int = 0
) -> list[float]:
    """Draw whole rounds with replacement, and return the estimate of each draw, in ascending order.

    A round holds the times of all configurations in it, so that what slowed a whole round stays together.
    """
    draw = random.Random(seed)
    return sorted(estimate([draw.choice(rounds) for _ in rounds]) for _ in range(num_draws))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the ordered numbers lie, linear between two of them."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def least_held_out(coverage: float = 0.9) -> int:
    """Return how many held-out configurations an interval needs: 9 for 90 %, 19 for 95 %."""
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def conformal_factor(predicted: Sequence[float], measured: Sequence[float], coverage: float = 0.9) -> float:
    """Return the factor by which a measured time may differ from a prediction, by split conformal prediction.

    The interval is from prediction / factor to prediction × factor. It covers the share that it states only if the new
    configuration could as well have been one of these: beyond the ranks, sizes or links of them it must be widened.

    Args:
        predicted: predicted times of configurations that no coefficient was fitted to.
        measured: the measured times of the same.
        coverage: the share of such configurations whose time the interval is to hold.

    Raises:
        UsageError: there are too few configurations for this coverage.
    """
    off = sorted(abs(math.log(p / m)) for p, m in zip(predicted, measured, strict=True))
    place = math.ceil((len(off) + 1) * coverage - 1e-9)
    if place > len(off):
        raise UsageError(
            explain(
                f"an interval for {coverage:.0%} needs {least_held_out(coverage)} measured configurations or more that "
                "nothing was fitted to", value=len(off), fix="measure more of them, or ask for a lower coverage",
            )
        )  # fmt: skip
    return math.exp(off[place - 1])


@dataclass(frozen=True)
class ErrorSummary:
    """Relative errors of predicted times: ``mean`` and ``median`` of their sizes, ``p95``, ``worst``, signed ``bias``."""

    num: int
    mean: float
    median: float
    p95: float
    worst: float
    bias: float


def summarize_errors(predicted: Sequence[float], measured: Sequence[float]) -> ErrorSummary:
    """Return how far predicted / measured - 1 is from 0 over all configurations; there must be one at least."""
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    sizes = sorted(map(abs, errors))
    return ErrorSummary(
        len(errors), statistics.fmean(sizes), statistics.median(sizes), percentile(sizes, 0.95), sizes[-1],
        statistics.fmean(errors),
    )  # fmt: skip
