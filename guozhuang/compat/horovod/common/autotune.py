"""Autotuning: search, while the job runs, for the fusion threshold, cycle time and use of the cache with the best throughput.

A score is bytes per microsecond over some steps of training. A step ends when the name of a tensor is submitted again. Steps
are counted, not rounds of negotiation, because the searched values change how many rounds a step takes. A sample is the median
of five scores. The first sample after the warm-up measures the user's settings. Then threshold (0 to 64 MiB) and cycle (1 to
100 ms) are varied together: first four fixed points, then each time the point of the highest expected improvement under a
Gaussian process fitted to the samples so far (Jones, Schonlau and Welch 1998, doi:10.1023/A:1008306431147). At the best point
the cache is switched on or off, whichever it was not, for one sample. The best of all samples is kept.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import statistics
import warnings
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from guozhuang.errors import UsageError, explain
from guozhuang.gradients.named import Knobs, Settings

SCORES_PER_SAMPLE: Final = 5
# The search tries fusion thresholds from 0 to MAX_THRESHOLD_MB, and cycle times from MIN_CYCLE_MS to MAX_CYCLE_MS.
MAX_THRESHOLD_MB, MIN_CYCLE_MS, MAX_CYCLE_MS = 64.0, 1.0, 100.0
FIRST_POINTS: Final = ((4.0, 5.0), (32.0, 50.0), (16.0, 25.0), (8.0, 10.0))
HEADER: Final = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,"
    "cycle_time_ms,tensor_fusion_threshold,score"
)
# Each step of the search draws this many random points and tries the one with the highest expected improvement.
_NUM_CANDIDATES = 2000
_log = logging.getLogger("guozhuang")

_Search = Generator[Knobs, float, tuple[Knobs, float]]


def check_available() -> None:
    """Import scikit-learn, whose Gaussian process the tuner uses. Ranks call this in ``hvd.init``, before they connect.

    Raises:
        UsageError: scikit-learn is missing, or cannot be imported.
    """
    what = "autotuning needs scikit-learn, which is not installed"
    if importlib.util.find_spec("sklearn") is not None:
        try:
            importlib.import_module("sklearn.gaussian_process")
        except Exception as error:  # a broken installation may raise anything
            what = f"autotuning needs scikit-learn, which cannot be imported: {type(error).__name__}: {error}"
        else:
            return
    raise UsageError(explain(what, fix="install guozhuang[horovod], or unset HOROVOD_AUTOTUNE"))


@dataclass(frozen=True)
class AutotuneSettings:
    """The settings of autotuning, in which rank 0 searches for the best fusion threshold, cycle time and cache switch.

    Attributes:
        log: the path of a file that gets a line per sample; None: no file.
        warmup_samples: the number of samples that are thrown away at first.
        steps_per_sample: the training steps of one score; five scores make a sample.
        max_samples: the number of points to try for threshold and cycle.
        noise: the part, from 0 to 1, of the variance of all scores that the Gaussian process takes for noise of measurement.
        fixed: names of fields of ``Knobs`` that the user has set, and that are not searched for.
    """

    log: str | None = None
    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_samples: int = 20
    noise: float = 0.8
    fixed: frozenset[str] = field(default_factory=frozenset)

    def __call__(self, settings: Settings) -> GaussianTuner:
        """Return a tuner with these settings. The engine calls this on rank 0.

        Raises:
            UsageError: scikit-learn is missing; the log cannot be written.
        """
        check_available()
        start = Knobs(settings.fusion_threshold_bytes, settings.cycle_time_ms, settings.cache_capacity > 0)
        fixed = self.fixed | ({"use_cache"} if settings.cache_capacity == 0 else set())
        return GaussianTuner(self, start, fixed)


class GaussianTuner:
    """Searches for the engine settings with the best throughput, by a Gaussian process over measured scores. Not thread-safe.

    Args:
        settings: how to search.
        start: the values before the search, which the first sample measures.
        fixed: names of fields of ``Knobs`` that are not searched for.

    Attributes:
        best: the values that are kept, with their score; None while the search continues.
    """

    def __init__(self, settings: AutotuneSettings, start: Knobs, fixed: frozenset[str] | set[str]) -> None:
        self.best: tuple[Knobs, float] | None = None
        self._settings = settings
        self._warmups_left = settings.warmup_samples
        self._times: Counter[str] = Counter()  # by tensor name: its submissions since the last score
        self._bytes, self._seconds = 0, 0.0
        self._scores: list[float] = []
        self._log = Path(settings.log) if settings.log else None
        if self._log is not None:
            try:
                self._log.write_text(HEADER + "\n")
            except OSError as error:
                what = f"the log of autotuning cannot be written: {error}"
                raise UsageError(explain(what, value=settings.log, fix="set HOROVOD_AUTOTUNE_LOG to a file")) from error
        self._search = self._searching(start, frozenset(fixed))
        self._tried = next(self._search)

    def observe(self, names: Iterable[str], num_bytes: int, seconds: float) -> Knobs | None:
        """Count a round's tensors, bytes and seconds; return new engine settings, or None to keep the present ones."""
        if self.best is not None:
            return None
        names = list(names)
        is_over = any(self._times[name] >= self._settings.steps_per_sample for name in names) and self._seconds > 0
        score = self._bytes / (self._seconds * 1e6) if is_over else None  # in bytes/us, over the rounds before this one
        if is_over:
            self._times.clear()
            self._bytes, self._seconds = 0, 0.0
        self._times.update(names)
        self._bytes += num_bytes
        self._seconds += seconds
        return None if score is None else self._take(score)

    def _take(self, score: float) -> Knobs | None:
        self._scores.append(score)
        if len(self._scores) < SCORES_PER_SAMPLE:
            return None
        sample = statistics.median(self._scores)
        self._scores = []
        if self._warmups_left > 0:
            self._warmups_left -= 1
            return None
        self._write(self._tried, sample)
        before = self._tried
        try:
            self._tried = self._search.send(sample)
        except StopIteration as end:
            self.best = end.value
            self._tried = end.value[0]
            self._write(*end.value)
            _log.info("autotune keeps %s, which moved %.1f bytes/us", *end.value)
        return self._tried if self._tried != before else None

    def _searching(self, start: Knobs, fixed: frozenset[str]) -> _Search:
        """Yield engine settings to try, and receive the score of each by ``send``; return the best settings and their score."""
        samples = [(start, (yield start))]
        space = _Space(start, fixed)
        points: list[tuple[float, ...]] = []
        while space.num_dims and len(points) < self._settings.max_samples:
            if len(points) < len(FIRST_POINTS):
                point = space.first(len(points))
            else:
                scores = [score for _, score in samples[1:]]
                try:
                    point = _most_promising(points, scores, self._settings.noise)
                except Exception as error:  # a failed search must not end the training
                    _log.warning("autotune ends its search early: %s: %s", type(error).__name__, error)
                    return max(samples, key=lambda sample: sample[1])
            points.append(point)
            knobs = space.knobs(point)
            samples.append((knobs, (yield knobs)))
        best = max(samples, key=lambda sample: sample[1])
        if "use_cache" not in fixed:
            other = best[0]._replace(use_cache=not best[0].use_cache)
            samples.append((other, (yield other)))
        return max(samples, key=lambda sample: sample[1])

    def _write(self, knobs: Knobs, score: float) -> None:
        if self._log is None:
            return
        # The log's first three columns are Horovod's switches that this engine lacks, always 0. An adaptive cycle is 0, too.
        row = (0, 0, 0, int(knobs.use_cache), knobs.cycle_time_ms or 0, knobs.fusion_threshold_bytes, score)
        try:
            with self._log.open("a") as file:
                file.write(",".join(f"{each:.6g}" if isinstance(each, float) else str(each) for each in row) + "\n")
        except OSError as error:
            _log.warning("the log of autotuning ends here: %s", error)
            self._log = None


class _Space:
    """The search space of autotuning. Fusion threshold and cycle time are one dimension each, from 0 to 1, unless fixed."""

    def __init__(self, start: Knobs, fixed: frozenset[str]) -> None:
        self._start = start
        self._has_threshold = "fusion_threshold_bytes" not in fixed
        self._has_cycle = "cycle_time_ms" not in fixed
        self.num_dims = self._has_threshold + self._has_cycle

    def first(self, number: int) -> tuple[float, ...]:
        """Return point ``number`` of ``FIRST_POINTS``, with which the search begins, scaled to 0..1."""
        threshold_mb, cycle_ms = FIRST_POINTS[number]
        point = [threshold_mb / MAX_THRESHOLD_MB] if self._has_threshold else []
        if self._has_cycle:
            point.append((cycle_ms - MIN_CYCLE_MS) / (MAX_CYCLE_MS - MIN_CYCLE_MS))
        return tuple(point)

    def knobs(self, point: tuple[float, ...]) -> Knobs:
        """Return the engine settings at a point of the search space."""
        knobs = self._start
        if self._has_threshold:
            knobs = knobs._replace(fusion_threshold_bytes=round(point[0] * MAX_THRESHOLD_MB * 2**20))
        if self._has_cycle:
            cycle_ms = MIN_CYCLE_MS + point[-1] * (MAX_CYCLE_MS - MIN_CYCLE_MS)
            knobs = knobs._replace(cycle_time_ms=round(cycle_ms, 3))
        return knobs


def _most_promising(points: list[tuple[float, ...]], scores: list[float], noise: float) -> tuple[float, ...]:
    """Return the point to try next: of many random ones, that with the highest expected improvement over the best score.

    Args:
        points: the points that were tried, from 0 to 1 in each dimension.
        scores: the score of each point.
        noise: variance of a score, as a part of the variance of all scores.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from sklearn.gaussian_process.kernels import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        RBF,
        ConstantKernel,
    )

    kernel = ConstantKernel(1.0) * RBF(0.3, (0.05, 5.0))
    process: Any = GaussianProcessRegressor(kernel, alpha=max(noise, 1e-6), normalize_y=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with few points scikit-learn warns that fitted parameters are at their bounds
        process.fit(np.array(points), np.array(scores))
    # With this seed the same scores always lead to the same choice.
    candidates = np.random.default_rng(len(points)).random((_NUM_CANDIDATES, len(points[0])))
    mean, deviation = process.predict(candidates, return_std=True)
    improvement = expected_improvement(mean, deviation, float(np.max(process.predict(np.array(points)))))
    return tuple(float(each) for each in candidates[int(np.argmax(improvement))])


def expected_improvement(mean: Any, deviation: Any, best: float) -> Any:
    """Return E[max(0, score - best)] for normally distributed scores, element by element; arguments are numpy arrays."""
    deviation = np.maximum(deviation, 1e-12)
    z = (mean - best) / deviation
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return (mean - best) * torch.special.ndtr(torch.from_numpy(z)).numpy() + deviation * density
