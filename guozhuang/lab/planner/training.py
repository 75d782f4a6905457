"""The time and money of a whole training, in phases, on one cluster: the best layout of each phase, with failures."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from guozhuang.cost import laws
from guozhuang.cost.cluster import Cluster
from guozhuang.cost.describe import parse_cluster, parse_size
from guozhuang.cost.hardware import device
from guozhuang.cost.transformer import Transformer
from guozhuang.errors import UsageError, explain
from guozhuang.lab.planner.reasons import obstacle
from guozhuang.lab.planner.search import ALIKE, Candidate, SearchResult, search

#: No step has more samples.
MOST_SAMPLES = 2**30
_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Phase:
    """A part of a training with one model shape and batch.

    Attributes:
        name: the model as the command line names it.
        model: its shape.
        batch: samples of a step, on all ranks together.
        samples: how many samples it trains on; None if that was not said.
        rate: samples/s that one device was measured to reach; None if that was not measured.
        rate_on: the name of that device; "" where all devices are alike.
        peak: bytes of memory that one process was measured to reach, and the samples of its micro-batches; None without.
    """

    name: str
    model: Transformer
    batch: int
    samples: float | None
    rate: float | None = None
    rate_on: str = ""
    peak: tuple[float, float] | None = None


@dataclass(frozen=True)
class Failures:
    """What fails, and what that costs.

    Attributes:
        of_one_s: mean time between failures of one device, in seconds.
        checkpoint_s: seconds for which a checkpoint stops the training.
        restart_s: seconds from a failure to the next step.
    """

    of_one_s: float
    checkpoint_s: float
    restart_s: float

    def interval_s(self, num_ranks: int) -> float:
        """Return the seconds between checkpoints that lose least (Young)."""
        return laws.young_interval(self.checkpoint_s, laws.mean_time_between_failures(self.of_one_s, num_ranks))

    def useful(self, num_ranks: int) -> float:
        """Return the part of the time in which steps are made that last."""
        mean_s = laws.mean_time_between_failures(self.of_one_s, num_ranks)
        return laws.useful_share(self.checkpoint_s, self.interval_s(num_ranks), mean_s, self.restart_s)


@dataclass(frozen=True)
class Searched:
    """What was found on one cluster.

    Attributes:
        cluster: all of its ranks are used.
        founds: the result of the search, for each phase.
        best: the fastest candidate that ``guozhuang run`` can start, for each phase; None where nothing fits.
        seconds: of the whole training, with failures; None if the samples are not known.
        money: rent of the whole training; None if it is not known.
        money_per_second: rent of the cluster.
    """

    cluster: Cluster
    founds: tuple[SearchResult, ...]
    best: tuple[Candidate | None, ...]
    seconds: float | None = None
    money: float | None = None
    money_per_second: float | None = None

    @property
    def fits(self) -> bool:
        """Whether every phase has a layout."""
        return all(self.best)

    @property
    def seconds_of_samples(self) -> float:
        """The time of the whole training without failures, or of one sample of each phase where the samples are not known."""
        return sum(one.step_s / one.arrangement.batch for one in self.best if one is not None)


def search_cluster(
    cluster: Cluster,
    phases: Sequence[Phase],
    memory_bytes: float,
    failures: Failures,
    *,
    rent_per_hour: float | None = None,
    precision: str = "autocast",
    flash: bool = False,
    noise_batch: float | None = None,
) -> Searched:
    """Search the best layout of each phase of a training on all ranks of a cluster.

    Args:
        cluster: where.
        phases: of the training, which follow each other on the same ranks.
        memory_bytes: memory of a rank.
        failures: that are added to the time, and so to the money.
        rent_per_hour: of one device.
        precision, flash: as for :func:`search`.
        noise_batch: the critical batch: batches up to twice as large are tried, and worth less the larger they are.
    """
    founds, best = [], []
    for phase in phases:
        slowdown = _slowdown(phase, cluster, memory_bytes, precision, flash)
        batches = batches_of(phase.batch, noise_batch)
        found = search(phase.model, cluster, batches, memory_bytes, precision, flash, slowdown, phase.peak)
        if phase.rate_on and cluster.device is not None and phase.rate_on != cluster.device.name:
            note = f"--rate was measured on {phase.rate_on}, carried over to {cluster.device.name} by data sheets"
            found.fitting = [replace(one, widened=(*one.widened, note)) for one in found.fitting]
        if noise_batch is not None:
            found.fitting.sort(key=lambda one: _seconds(one, noise_batch))
        founds.append(found)
        best.append(simplest([one for one in found.fitting if not obstacle(one.arrangement)], noise_batch))
    seconds = None
    chosen = [one for one in best if one is not None]
    if len(chosen) == len(phases) and all(phase.samples is not None for phase in phases):
        seconds = sum(
            laws.training_seconds(
                _samples(phase, one.arrangement.batch, noise_batch),
                one.arrangement.batch,
                one.step_s,
                failures.useful(cluster.num_ranks),
            )
            if failures.useful(cluster.num_ranks)
            else math.inf
            for phase, one in zip(phases, chosen, strict=True)
        )
    per_second = None if rent_per_hour is None else rent_per_hour * cluster.num_ranks / 3600
    money = None if per_second is None or seconds is None else per_second * seconds
    return Searched(cluster, tuple(founds), tuple(best), seconds, money, per_second)


def _slowdown(phase: Phase, cluster: Cluster, memory_bytes: float, precision: str, flash: bool) -> float:
    """Return how many times as long as the cost model says one device computes, by its measured rate; 1 if none was measured.

    Raises:
        UsageError: the model does not fit on one device, so its rate there cannot have been measured.
    """
    if phase.rate is None:
        return 1.0
    where = cluster.with_ranks(1)
    if phase.rate_on:
        where = parse_cluster(f"1x1x{phase.rate_on}")
        memory_bytes = where.rank_memory_bytes or memory_bytes
    alone = search(phase.model, where, [phase.batch], memory_bytes, precision, flash)
    if not alone.fitting:
        what = f"--rate is of one device, and {phase.name} does not fit there"
        raise UsageError(explain(what, value=phase.rate, fix="leave it out"))
    return alone.fitting[0].samples_per_s / phase.rate


def _seconds(one: Candidate, noise_batch: float | None) -> float:
    """Return the time of a candidate in a unit that is the same for all batches: of a sample, or of the way to a loss."""
    if noise_batch is None:
        return one.step_s / one.arrangement.batch
    return one.step_s * laws.CriticalBatch(noise_batch).steps(one.arrangement.batch)


def simplest(candidates: Sequence[Candidate], noise_batch: float | None = None) -> Candidate | None:
    """Return the least complex of the candidates that are as fast as the first one, the fastest; None of none."""
    if not candidates:
        return None
    limit_s = (1 + ALIKE) * _seconds(candidates[0], noise_batch)
    alike = itertools.takewhile(lambda one: _seconds(one, noise_batch) <= limit_s, candidates)
    return min(alike, key=lambda one: (one.arrangement.complexity, _seconds(one, noise_batch)))


def batches_of(batch: int, noise_batch: float | None) -> tuple[int, ...]:
    """Return the batches that are tried: the given one, and its doubles up to twice the critical batch.

    Raises:
        UsageError: the critical batch is no number above 0, or larger than any batch.
    """
    if noise_batch is not None and not 0 < noise_batch <= MOST_SAMPLES:
        what = f"--noise-batch is a number of samples above 0, up to {MOST_SAMPLES:,}"
        raise UsageError(explain(what, value=noise_batch, fix="leave it out"))
    found = [batch]
    while noise_batch is not None and 2 * found[-1] <= 2 * noise_batch:
        found.append(2 * found[-1])
    return tuple(found)


def _samples(phase: Phase, batch: int, noise_batch: float | None) -> float:
    """Return how many samples of a batch do what the phase's samples do in its own batch."""
    assert phase.samples is not None
    if noise_batch is None or batch == phase.batch:
        return phase.samples
    critical = laws.CriticalBatch(noise_batch)
    return phase.samples * critical.samples(batch) / critical.samples(phase.batch)


def rank_counts(cluster: Cluster, asked: str | None, with_fewer: bool) -> list[Cluster]:
    """Return the parts of a cluster that are searched: those asked for, else all of it, and its halves where fewer may pay.

    Raises:
        UsageError: the numbers of ranks cannot be read, or the cluster has fewer.
    """
    if asked is None:
        counts = [cluster.num_ranks]
        while with_fewer and counts[-1] % 2 == 0:
            counts.append(counts[-1] // 2)
        return [cluster.with_ranks(count) if count < cluster.num_ranks else cluster for count in counts]
    counts = []
    for word in asked.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= cluster.num_ranks:
            fix = f"give numbers of ranks from 1 to {cluster.num_ranks}, as in --ranks 8,16"
            raise UsageError(explain(f"--ranks does not fit {cluster.name}", value=word, fix=fix))
        counts.append(int(word))
    return [cluster.with_ranks(count) for count in dict.fromkeys(counts)]


def count(option: str, text: str) -> float:
    """Return a count, of ``461M``, ``65,536`` or ``3e11``.

    Raises:
        UsageError: it is none, or not above 0; the text names the option.
    """
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]+)?)([a-z]?)", text.strip().lower())
    if match is None or match[2] not in _SUFFIXES or not float(match[1].replace(",", "")) > 0:
        raise UsageError(explain(f"{option} is a count", value=text, fix="write it as 65536, 461M or 300B"))
    return float(match[1].replace(",", "")) * _SUFFIXES[match[2]]


def phases_of(
    names: Sequence[str],
    batches: Sequence[str],
    samples: Sequence[str] | None,
    tokens: Sequence[str] | None,
    rates: Sequence[str] | None = None,
    peaks: Sequence[str] | None = None,
) -> tuple[Phase, ...]:
    """Return the phases of a training, as ``--model``, ``--batch``, ``--samples`` or ``--tokens`` and the measured say them.

    One ``--batch`` counts for all phases.

    Raises:
        UsageError: one of them is missing, cannot be read, or is given for some phases only.
    """
    if samples and tokens:
        raise UsageError(explain("--samples and --tokens were both given", fix="give one of them"))
    if not batches:
        fix = "give the samples of a step on all ranks together: --batch 1024"
        raise UsageError(explain("--batch is missing, and which layout is best depends on it", fix=fix))
    option, given = ("--tokens", tokens) if tokens else ("--samples", samples or [])
    for name, values in (
        ("--batch", batches),
        (option, given),
        ("--rate", rates or ()),
        ("--measured-peak", peaks or ()),
    ):
        if len(values) not in (len(names), 1) and values:
            what = f"{name} is given {len(values)} times for {len(names)} phases (--model)"
            raise UsageError(explain(what, fix="give it once for all, or once for each phase"))
    for name, values in ((option, given), ("--rate", rates or ()), ("--measured-peak", peaks or ())):
        if len(values) == 1 and len(names) > 1:
            raise UsageError(
                explain(f"{name} is given once for {len(names)} phases", fix="give it once for each phase")
            )
    phases = []
    for number, name in enumerate(names):
        model = Transformer.parse(name)
        batch = count("--batch", batches[number if len(batches) > 1 else 0])
        if batch != int(batch) or batch > MOST_SAMPLES:
            what = f"--batch is a whole number of samples, up to {MOST_SAMPLES:,}"
            raise UsageError(explain(what, value=batch, fix="write --batch 1024"))
        num = count(option, given[number]) if given else None
        rate, _, rate_on = rates[number].partition("@") if rates else ("", "", "")
        phases.append(
            Phase(
                name, model, int(batch), num if num is None or not tokens else num / model.sequence,
                count("--rate", rate) if rates else None, device(rate_on).name if rate_on else "",
                _peak(peaks[number]) if peaks else None,
            )
        )  # fmt: skip
    return tuple(phases)


def _peak(text: str) -> tuple[float, float]:
    size, at, samples = text.partition("@")
    if not at:
        fix = "write --measured-peak 31GiB@16, for micro-batches of 16 samples"
        raise UsageError(explain("--measured-peak needs the samples of the measured micro-batch", value=text, fix=fix))
    return parse_size(size, "--measured-peak "), count("--measured-peak", samples)


def check_rates(phases: Sequence[Phase], names: Iterable[str]) -> None:
    """Raise if devices differ, and a measured rate does not say on which of them it was measured.

    Raises:
        UsageError: that is so; the text names the devices.
    """
    kinds = list(dict.fromkeys(names))
    for phase in phases:
        if phase.rate is not None and not phase.rate_on and len(kinds) > 1:
            what = f"--rate is of one device, and there are {', '.join(kinds)}"
            raise UsageError(explain(what, value=phase.rate, fix=f"say of which: --rate {phase.rate:g}@{kinds[0]}"))
