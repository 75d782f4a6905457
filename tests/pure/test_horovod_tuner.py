"""The search for fusion threshold, cycle and cache, against made-up machines whose best point is known."""

from __future__ import annotations

import csv
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

from guozhuang.compat.horovod.common import autotune
from guozhuang.compat.horovod.common.autotune import AutotuneSettings, GaussianTuner
from guozhuang.errors import UsageError
from guozhuang.gradients.named import Knobs, Settings

MB = 1 << 20
HAS_SKLEARN = importlib.util.find_spec("sklearn") is not None
needs_sklearn = pytest.mark.skipif(
    not HAS_SKLEARN, reason="scikit-learn is not installed: pip install guozhuang[horovod]"
)
QUICK = AutotuneSettings(warmup_samples=0, steps_per_sample=2, max_samples=6)


@pytest.fixture(autouse=True, scope="module")
def sklearn() -> None:
    """Not imported in a test, since that sets environment variables; nor above, where each worker would import it."""
    if HAS_SKLEARN:
        importlib.import_module("sklearn.gaussian_process")


def made(settings: Settings) -> GaussianTuner:
    assert isinstance(settings.autotune, AutotuneSettings)
    return settings.autotune(settings)


def run(tuner, speed_of, knobs, limit=20000):
    """Feed rounds until the tuner has ended; return the knobs that were tried, in order."""
    tried = [knobs]
    for _ in range(limit):
        if tuner.best is not None:
            return tried
        num_bytes = 1_000_000
        new = tuner.observe(["x"], num_bytes, num_bytes / speed_of(knobs) / 1e6)
        if new is not None:
            knobs = new
            tried.append(new)
    raise AssertionError("the search does not end")


@needs_sklearn
def test_it_comes_near_the_best_point():

    def speed(knobs: Knobs) -> float:  # bytes/us; best at 48 MiB and 20 ms, with the cache
        threshold = (knobs.fusion_threshold_bytes / MB - 48) / 64
        cycle = (knobs.cycle_time_ms - 20) / 100 if knobs.cycle_time_ms is not None else 2.0
        return 100 * math.exp(-4 * (threshold**2 + cycle**2)) * (1.0 if knobs.use_cache else 0.7)

    settings = Settings(autotune=AutotuneSettings(warmup_samples=0, steps_per_sample=1, max_samples=20, noise=0.01))
    tuner = made(settings)
    run(tuner, speed, Knobs(settings.fusion_threshold_bytes, None, True))
    best, score = tuner.best
    assert best.use_cache
    assert speed(best) == pytest.approx(score)
    fixed = [Knobs(round(mb * MB), ms, True) for mb, ms in autotune.FIRST_POINTS]
    assert score > 97 > max(speed(each) for each in fixed)


@needs_sklearn
def test_it_never_ends_worse_than_it_began():
    """What the settings say is a sample too, and is kept if nothing else is better."""
    settings = Settings(autotune=QUICK)
    start = Knobs(settings.fusion_threshold_bytes, None, True)
    tuner = made(settings)
    tried = run(tuner, lambda knobs: 50.0 if knobs == start else 10.0, start)
    assert tuner.best == (start, pytest.approx(50.0))
    assert tried[-1] == start  # and the engine is told so
    assert tuner.observe(["x"], 1, 1.0) is None


@needs_sklearn
def test_the_cache_is_left_out_where_it_harms():
    settings = Settings(autotune=QUICK)
    tuner = made(settings)
    run(tuner, lambda knobs: 10.0 if knobs.use_cache else 20.0, Knobs(settings.fusion_threshold_bytes, None, True))
    assert tuner.best[0].use_cache is False


@needs_sklearn
def test_points_come_in_order_and_what_is_fixed_stays(tmp_path: Path):
    path = tmp_path / "log.csv"
    fixed = frozenset({"fusion_threshold_bytes", "use_cache"})
    chosen = AutotuneSettings(str(path), warmup_samples=1, steps_per_sample=2, max_samples=6, fixed=fixed)
    settings = Settings(fusion_threshold_bytes=5 * MB, autotune=chosen)
    tuner = made(settings)
    start = Knobs(5 * MB, None, True)
    # A score ends as its first name comes for the third time. Five are thrown away, five make the first sample.
    assert [tuner.observe(["x"], 1000, 0.001) for _ in range(20)] == [None] * 20
    assert tuner.observe(["x"], 1000, 0.001) == Knobs(5 * MB, 5.0, True)
    tried = run(tuner, lambda knobs: knobs.cycle_time_ms or 1.0, Knobs(5 * MB, 5.0, True))
    assert [each.cycle_time_ms for each in tried[:4]] == [5.0, 50.0, 25.0, 10.0]
    assert all((each.fusion_threshold_bytes, each.use_cache) == (5 * MB, True) for each in tried)
    assert all(1.0 <= each.cycle_time_ms <= 100.0 for each in tried)
    rows = list(csv.DictReader(path.open()))
    assert ",".join(rows[0]) == autotune.HEADER
    assert len(rows) == 1 + 6 + 1
    assert (rows[0]["cycle_time_ms"], rows[0]["score"]) == ("0", "1")
    assert all(row["hierarchical_allreduce"] == row["torus_allreduce"] == "0" for row in rows)
    assert rows[-1]["score"] == max((row["score"] for row in rows), key=float)
    assert start != tuner.best[0]


@needs_sklearn
def test_a_score_is_of_whole_steps_however_many_rounds_they_take():
    """Else settings that need more rounds for a step would be judged by less of it."""
    settings = Settings(autotune=AutotuneSettings(warmup_samples=0, steps_per_sample=2, max_samples=0))
    for rounds in ([["a", "b", "c", "d"]], [["a", "b"], ["c"], ["d"]], [["d"], ["a", "b", "c"]]):
        tuner = made(settings)
        told = []
        for _ in range(20):
            for names in rounds:  # the last one of a step comes after a pause
                seconds = 0.7 if names is rounds[-1] else 0.1
                told.append(tuner.observe(names, 1_000_000 * len(names), seconds))
        step_s = 0.7 + 0.1 * (len(rounds) - 1)
        knobs = [each for each in told if each is not None]
        assert knobs == [Knobs(settings.fusion_threshold_bytes, None, False)]
        assert told.index(knobs[0]) == 10 * len(rounds), "with the first round after ten steps"
        for _ in range(2):
            for names in rounds:
                tuner.observe(names, 1_000_000 * len(names), 0.7 if names is rounds[-1] else 0.1)
        assert tuner.best[1] == pytest.approx(4 / step_s)


@needs_sklearn
def test_the_median_counts():
    """Two slow scores of five do not make a point look slow."""
    settings = Settings(autotune=AutotuneSettings(warmup_samples=0, steps_per_sample=1, max_samples=0))
    tuner = made(settings)
    for speed in (10.0, 0.1, 11.0, 0.1, 12.0, 9.0):
        knobs = tuner.observe(["x"], 1_000_000, 1.0 / speed)
    assert knobs == Knobs(settings.fusion_threshold_bytes, None, False)
    for _ in range(5):
        knobs = tuner.observe(["x"], 1_000_000, 1.0 / 9.0)
    assert tuner.best == (Knobs(settings.fusion_threshold_bytes, None, True), pytest.approx(10.0))


@needs_sklearn
def test_without_a_cache_none_is_tried():
    settings = Settings(cache_capacity=0, autotune=QUICK)
    tuner = made(settings)
    tried = run(tuner, lambda _: 1.0, Knobs(settings.fusion_threshold_bytes, None, False))
    assert not any(each.use_cache for each in tried)


def test_expected_improvement_against_sampling():
    generator = np.random.default_rng(0)
    for mean, deviation, best in ((0.0, 1.0, 0.0), (1.0, 0.5, 1.5), (-1.0, 2.0, 0.3), (2.0, 1e-15, 1.0)):
        sampled = np.maximum(generator.normal(mean, deviation, 400_000) - best, 0).mean()
        found = autotune.expected_improvement(np.array([mean]), np.array([deviation]), best)[0]
        assert found == pytest.approx(sampled, rel=0.02, abs=2e-3)


def test_without_scikit_learn_it_says_so(monkeypatch):
    monkeypatch.setattr(autotune.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"scikit-learn.*guozhuang\[horovod\]"):
        autotune.check_available()


def test_a_scikit_learn_that_cannot_be_imported(monkeypatch):
    """It is said before anybody waits, not in the thread that needs it."""
    wanted = []

    def fail(name):
        wanted.append(name)
        raise ImportError("undefined symbol")

    monkeypatch.setattr(autotune.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(autotune.importlib, "import_module", fail)
    with pytest.raises(UsageError, match=r"cannot be imported: ImportError: undefined symbol"):
        autotune.check_available()
    assert wanted == ["sklearn.gaussian_process"]


@needs_sklearn
def test_a_fit_that_fails_ends_the_search_with_the_best_so_far(monkeypatch, caplog):
    monkeypatch.setattr(autotune, "_most_promising", lambda *_: (_ for _ in ()).throw(ValueError("no fit")))
    settings = Settings(autotune=QUICK)
    tuner = made(settings)
    tried = run(tuner, lambda knobs: knobs.cycle_time_ms or 1.0, Knobs(settings.fusion_threshold_bytes, None, True))
    assert tuner.best == (Knobs(32 * MB, 50.0, True), pytest.approx(50.0))
    assert tried[-1] == tuner.best[0] and len(tried) == 1 + len(autotune.FIRST_POINTS) + 1
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        "autotune ends its search early: ValueError: no fit"
    ]


@needs_sklearn
def test_a_log_that_cannot_be_written(tmp_path: Path):
    chosen = AutotuneSettings(log=str(tmp_path / "no" / "folder.csv"))
    with pytest.raises(UsageError, match="HOROVOD_AUTOTUNE_LOG"):
        made(Settings(autotune=chosen))
