"""Predict published rates of data parallelism from those of fewer GPUs.

One law everywhere: a step of n ranks is work that does not depend on n, and a ring's 2(n-1)/n times one number. Both are fitted
to the smaller numbers of GPUs alone. Where the batch of all GPUs is fixed, the work is divided by n. Where fewer GPUs than a
node has were not published, n counts nodes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

from guozhuang.cost.fit import SHAPES, ScalingFit, conformal_factor, fit_scaling, relative_least_squares

from .points import Point, Protocol, Series, all_series, percent

#: A time per GPU that exceeds that of more GPUs by this share contradicts any cost that grows with them.
CONTRADICTION = 0.01
#: A change from one number of GPUs to the next that differs by this share from that of the other models is no scaling.
SIBLINGS = 0.10

PERFECT = "perfect scaling"
Law = Callable[[float], float]


def usable(times: dict[int, float]) -> dict[int, float]:
    """Return the times without those that exceed a time of more GPUs: no communication explains them."""
    return {n: t for n, t in times.items() if not any(m > n and t > times[m] * (1 + CONTRADICTION) for m in times)}


def predict_weak(
    series: Series, calibrating: Sequence[int], judged: Iterable[int], fit: Callable[[dict[int, float]], Law]
) -> list[Point]:
    """Return the points of one series whose batch a GPU is fixed, predicted from its smaller numbers of GPUs."""
    times = series.times
    step_s = fit({n: times[n] for n in calibrating})
    first = times[calibrating[0]]
    return [Point(series.name, series.at(n), step_s(n), times[n], first, series.work(n)) for n in judged if n in times]


def ring(times: dict[int, float]) -> Law:
    """Fit the law of this module; the smallest number of GPUs is its unit."""
    unit = min(times)
    return _of_unit(fit_scaling({n / unit: t for n, t in times.items()}).step_s, unit)  # type: ignore[misc]


def _of_unit(law: Law, unit: int) -> Law:
    return lambda n: law(n / unit)


def weak_series(*needed: int) -> list[Series]:
    """Return the series with a fixed batch a GPU which have all these numbers of GPUs, and more."""
    return [s for s in all_series("weak") if set(needed) <= s.points.keys() and max(s.points) > max(needed)]


def one_two_four() -> Protocol:
    """8 and 16 GPUs, from 1, 2 and 4."""
    found = Protocol("data parallel, same batch a GPU: 1, 2, 4 GPUs -> 8, 16", PERFECT, 0.02)
    groups: list[list[Point]] = []
    for series in weak_series(1, 2, 4):
        calibrating = {n: series.times[n] for n in (1, 2, 4)}
        kept = usable(calibrating)
        for n in sorted(calibrating.keys() - kept.keys()):
            slower = percent(calibrating[n] / calibrating[2 * n] - 1)
            found.outliers.append(f"{series.name}: at {n} GPUs a step takes {slower} longer than at {2 * n}")
        groups.append(predict_weak(series, list(kept), (8, 16), ring))
        found.num_calibrating += len(kept)
    found.points = [point for group in groups for point in group]
    if found.outliers:
        found.notes.append("a DGX-1 joins two GPUs by a single NVLink, and four or eight by rings of several")
    # The interval of a series comes from the other series.
    factors = []
    for group in groups:
        others = [point for other in groups if other is not group for point in other]
        factors += [
            (conformal_factor([p.predicted for p in others], [p.published for p in others]), point) for point in group
        ]
    inside = sum(1 / f <= p.predicted / p.published <= f for f, p in factors)
    width = percent(statistics.median(f for f, _ in factors) - 1)
    found.notes.append(f"90 % interval from the other series: ±{width}, covers {inside} of {len(factors)}")
    return found


def one_four() -> Protocol:
    """8 and 16 GPUs, from 1 and 4, where 2 was not published."""
    found = Protocol("data parallel, same batch a GPU: 1, 4 GPUs -> 8, 16", PERFECT)
    for series in weak_series(1, 4):
        if 2 not in series.points:
            found.points += predict_weak(series, (1, 4), (8, 16), ring)
            found.num_calibrating += 2
    return found


def one_only() -> Protocol:
    """8 GPUs, from one: what is added is the median of what it is in the other series, relative to the time of one GPU."""
    found = Protocol("data parallel, same batch a GPU: 1 GPU -> 8, added time as in other models", PERFECT)
    fits = [fit_scaling(usable({n: s.times[n] for n in (1, 2, 4)})) for s in weak_series(1, 2, 4)]
    added = statistics.median(fit.added_s / fit.one_rank_s for fit in fits)
    for series in all_series("weak"):
        if sorted(series.points) == [1, 8]:
            one = series.times[1]
            law = ScalingFit(one, added * one, "ring").step_s
            found.points += predict_weak(series, (1,), (8,), lambda _, law=law: law)  # type: ignore[misc]
            found.num_calibrating += 1
            if "note" in series.about:
                found.notes.append(f"{series.name}: {series.about['note']}")
    found.notes.append(
        f"median of the 19 series: one rank's step and {percent(added)} of it a unit of the ring's 2(n-1)/n"
    )
    return found


def strong_law(times: dict[int, float], unit: int = 1, shape: str = "ring") -> Law:
    """Fit steps of a fixed batch of all GPUs: work divided by the GPUs, and ``shape`` over groups of ``unit`` of them."""
    grow = SHAPES[shape]
    each = [(1 / n, grow(max(1.0, n / unit))) for n in times]
    work, added = relative_least_squares(each, list(times.values()))
    return lambda n: work / n + added * grow(max(1.0, n / unit))


def predict_strong(series: Series, seconds: dict[int, float], calibrating: Sequence[int], law: Law) -> list[Point]:
    """Return the points beyond those that calibrate, of a series whose batch of all GPUs is fixed."""
    last = max(calibrating)
    at_least = min(calibrating)
    return [
        Point(series.name, series.at(n), law(n), t, seconds[at_least] * at_least / n, series.points[n] * t)
        for n, t in seconds.items()
        if n > last
    ]


def bert_steps(series: Series) -> dict[int, float]:
    """Return the seconds of a step of BERT's pretraining, by GPUs."""
    return {n: series.about["global_batch"] / rate for n, rate in series.points.items()}


def to_256(shape: str = "ring") -> Protocol:
    """Many nodes from 1, 2 and 4 nodes: BERT-Large to 256 GPUs, Transformer-XL to 128."""
    found = Protocol("data parallel, 1, 2, 4 nodes -> up to 32 nodes (256 GPUs)", PERFECT, 0.05)
    for series in all_series("bert"):
        steps = bert_steps(series)
        calibrating = (8, 16, 32)
        law = strong_law({n: steps[n] for n in calibrating}, 8, shape)
        found.points += predict_strong(series, steps, calibrating, law)
        found.num_calibrating += 3
    for series in all_series("weak"):
        if min(series.points) == 16:
            fitted = fit_scaling({n // 16: series.times[n] for n in (16, 32, 64)}, shape).step_s
            found.points += predict_weak(series, (16, 32, 64), (128,), lambda _, f=fitted: _of_unit(f, 16))  # type: ignore[misc]
            found.num_calibrating += 3
    if shape == "ring":
        errors = to_256("constant").errors()
        mean, worst = percent(errors.mean), percent(errors.worst)
        found.notes.append(f"with a constant for every number of nodes in place of the ring: {mean} (worst {worst})")
    return found


def minutes() -> Protocol:
    """DeepSpeed's minutes of a whole training, from two numbers of GPUs."""
    found = Protocol("whole BERT trainings, minutes: 16, 64 GPUs -> 256, 1,024", PERFECT)
    for series in all_series("minutes"):
        law = strong_law({n: series.points[n] for n in (16, 64)}, 16)
        found.points += [
            Point(series.name, series.at(n), law(n), t, series.points[16] * 16 / n)
            for n, t in series.points.items()
            if n > 64
        ]
        found.num_calibrating += 2
    return found


def strong() -> Protocol:
    """NCF, a fixed batch of all GPUs, 16 GPUs from 1 and 8."""
    found = Protocol("fixed batch of all GPUs (NCF): 1, 8 GPUs -> 16", PERFECT)
    for series in all_series("strong"):
        steps = {n: 1048576 / rate for n, rate in series.points.items()}
        calibrating = (1, 8)
        found.points += predict_strong(series, steps, calibrating, strong_law({n: steps[n] for n in calibrating}))
        found.num_calibrating += 2
    return found


def efficiencies() -> Protocol:
    """Horovod's efficiencies on 512 GPUs from those on 128, whose loss is all a ring's."""
    found = Protocol("Horovod's efficiency: 128 GPUs -> 512, the loss growing as a ring's", "the same efficiency")
    for series in all_series("efficiency"):
        lost = (1 / series.points[128] - 1) / SHAPES["ring"](128)
        time = 1 + lost * SHAPES["ring"](512)
        found.points.append(Point(series.name, "512 GPUs", time, 1 / series.points[512], 1 / series.points[128], 1.0))
        found.num_calibrating += 1
    return found


def _micro_batches(series: Series) -> dict[int, int]:
    return {int(n): b for n, b in series.about["micro_batches"].items()}


def fsdp_outliers(all_of: Sequence[Series]) -> dict[str, dict[int, float]]:
    """Return by how much a series gets slower than the others of its machine, where that is more than ``SIBLINGS``.

    What is compared is the change of a token's time from the number of GPUs before. Changes with another micro-batch, by
    more than a quarter, are left out, because a larger one is faster by itself.
    """
    changes: dict[tuple[str, int], list[tuple[str, float]]] = {}
    for series in all_of:
        sizes, ns = _micro_batches(series), sorted(series.points)
        for before, n in itertools.pairwise(ns):
            if 0.8 <= sizes[n] / sizes[before] <= 1.25:
                change = series.times[n] / series.times[before]
                changes.setdefault((series.about["machine"], n), []).append((series.name, change))
    found: dict[str, dict[int, float]] = {}
    for (_, n), each in changes.items():
        usual = statistics.median(change for _, change in each)
        for name, change in each:
            if change / usual - 1 > SIBLINGS:
                found.setdefault(name, {})[n] = change / usual - 1
    return found


def fully_sharded() -> Protocol:
    """64 and 128 GPUs of full sharding, from 32 and fewer: weights travel for each micro-batch, so larger ones pay less."""
    found = Protocol("full sharding: up to 32 GPUs -> 64, 128", "the rate of the most GPUs that calibrate")
    with_sizes = [s for s in all_series("fsdp") if "micro_batches" in s.about]
    wrong = fsdp_outliers(with_sizes)
    for series in with_sizes:
        times, sizes = series.times, _micro_batches(series)
        small = [n for n in times if n <= 32 and n not in wrong.get(series.name, ())]
        for n, much in wrong.get(series.name, {}).items():
            found.outliers.append(
                f"{series.name}: at {n} GPUs {percent(much)} slower than the change of its neighbours says"
            )
        if not small or max(times) <= 32:
            continue
        row = lambda n, b=sizes: (1.0, (n - 1) / n / b[n])  # noqa: E731
        if len(small) > 1:
            coefficients = relative_least_squares([row(n) for n in small], [times[n] for n in small], robust=True)
        else:
            coefficients = [times[small[0]], 0.0]
        found.num_calibrating += len(small)
        null = times[max(n for n in times if n <= 32)]
        for n in times:
            if n > 32:
                predicted = sum(c * x for c, x in zip(coefficients, row(n), strict=True))
                found.points.append(Point(series.name, series.at(n), predicted, times[n], null, 1.0))
    return found


def one_rate() -> Protocol:
    """Full sharding on 128 GPUs where only 8 were published before: nothing but the rate of 8 can be said."""
    found = Protocol("full sharding: 8 GPUs -> 128, the same rate a GPU", "the same")
    for series in all_series("fsdp"):
        if "micro_batches" not in series.about:
            found.points += predict_weak(series, (8,), (128,), lambda times: lambda _: next(iter(times.values())))
            found.num_calibrating += 1
    return found


def large_weak() -> Protocol:
    """Llama 3.1 on up to 2,048 GPUs, from the two smallest numbers of them."""
    found = Protocol("Llama 3.1, same batch a GPU: two smallest -> up to 2,048 GPUs", PERFECT)
    for series in all_series("weak-large"):
        first, second, *rest = sorted(series.points)
        found.points += predict_weak(series, (first, second), rest, ring)
        found.num_calibrating += 2
    return found


def pipeline() -> Protocol:
    """A pipeline of 4 and 8 stages, from those of 1 and 2: the number of micro-batches is what those two say it was."""
    found = Protocol("pipeline: 1, 2 stages -> 4, 8, all stages equal", PERFECT)
    for series in all_series("pipeline"):
        rate = series.points
        # rate(p) = rate(1)·p·m/(m + p - 1), so that rate(2)/rate(1) = 2m/(m + 1).
        gain = rate[2] / rate[1]
        m = gain / (2 - gain)
        for p in (4, 8):
            found.points.append(
                Point(series.name, series.at(p), (m + p - 1) / (p * m) / rate[1], 1 / rate[p], 1 / (p * rate[1]), 1.0)
            )
        found.num_calibrating += 2
        naive = series.about["naive_rate"]
        found.points.append(Point(series.name, "recomputed", 4 / 3 / naive, 1 / rate[1], 1 / naive, 1.0))
        found.notes.append(
            f"{m:.1f} micro-batches fit the step from 1 to 2 stages; recomputation counted as 4/3 of the work"
        )
    return found


def by_calibration() -> list[list[str]]:
    """Return a table of the mean (worst) error by the points that calibrate, with the same points judged in a column."""
    lines = [["calibrated on", "19 series at 8 GPUs", "8 series at 16 GPUs"]]
    for calibrating in ((1,), (1, 2), (1, 2, 4), (1, 2, 4, 8)):
        cells = [", ".join(map(str, calibrating)) + (" (perfect scaling)" if len(calibrating) == 1 else "")]
        for judged in (8, 16):
            errors = []
            for series in weak_series(1, 2, 4):
                if judged in series.points and judged not in calibrating:
                    times = usable({n: series.times[n] for n in calibrating})
                    law = ring(times) if len(times) > 1 else lambda _, t=times: next(iter(t.values()))
                    errors.append(abs(law(judged) / series.times[judged] - 1))
            cells.append(f"{percent(statistics.fmean(errors))} ({percent(max(errors))})" if errors else "-")
        lines.append(cells)
    return lines


def bert_by_calibration() -> list[list[str]]:
    """Return a table of the mean (worst) error of the four BERT series at 256 GPUs by the points that calibrate."""
    lines = [["calibrated on", "ring over nodes", "constant over nodes"]]
    for last in (8, 16, 32, 64, 128):
        cells = []
        for shape in ("ring", "constant"):
            errors = []
            for series in all_series("bert"):
                steps = bert_steps(series)
                known = {n: t for n, t in steps.items() if n <= last}
                law = strong_law(known, 8, shape) if len(known) > 1 else lambda n, t=known[8]: t * 8 / n
                errors.append(abs(law(256) / steps[256] - 1))
            cells.append(f"{percent(statistics.fmean(errors))} ({percent(max(errors))})")
        lines.append([", ".join(str(n) for n in (8, 16, 32, 64, 128) if n <= last), *cells])
    lines[1][0] += " (perfect scaling)"
    return lines


def laws_compared() -> list[list[str]]:
    """Return a table of the mean (worst) error of several laws, all published points taken as they are."""
    lines = [["law of the added time", "1, 2 -> 4, 8, 16", "1, 2, 4 -> 8, 16"]]
    laws: dict[str, Callable[[dict[int, float]], Law]] = {"none (perfect scaling)": lambda times: lambda _: times[1]}
    words = {"constant": "constant", "ring": "2(n-1)/n, a ring", "tree": "log2 n, a tree", "linear": "n-1"}
    for shape, name in words.items():
        laws[name] = lambda times, shape=shape: fit_scaling(times, shape).step_s  # type: ignore[misc]
    laws["universal scalability law"] = _universal
    for name, fit in laws.items():
        cells = []
        for calibrating in ((1, 2), (1, 2, 4)):
            if name.startswith("universal") and len(calibrating) < 3:
                cells.append("-")
                continue
            errors = []
            for series in weak_series(1, 2, 4):
                law = fit({n: series.times[n] for n in calibrating})
                errors += [abs(law(n) / t - 1) for n, t in series.times.items() if n > max(calibrating)]
            cells.append(f"{percent(statistics.fmean(errors))} ({percent(max(errors), 0)})")
        lines.append([name, *cells])
    return lines


def _universal(times: dict[int, float]) -> Law:
    """Fit the universal scalability law through three points, its numbers unconstrained: exact at them."""
    import numpy as np

    rows = np.array([(1.0, n - 1.0, n * (n - 1.0)) for n in times])
    a, b, c = np.linalg.lstsq(rows, np.array(list(times.values())), rcond=None)[0]
    return lambda n: float(a + b * (n - 1) + c * n * (n - 1))


def alone() -> list[str]:
    """Return the names of what is published with nothing to predict it from."""
    return [
        f"{s.name}: {v:g} {s.about['quantity']} on {n} GPUs" for s in all_series("alone") for n, v in s.points.items()
    ]


PROTOCOLS: Sequence[Callable[[], Protocol]] = (
    one_two_four, one_four, one_only, to_256, minutes, strong, efficiencies, fully_sharded, one_rate, large_weak, pipeline,
)  # fmt: skip
