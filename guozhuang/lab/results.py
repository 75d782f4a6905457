"""The records of a comparison, their summaries, and their conversion to and from ``results.json``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from guozhuang import records
from guozhuang.world.layout import StageTimes
from guozhuang.world.machine import Machine

SCHEMA_VERSION = 1

#: Number of last steps over which the final loss is averaged.
FINAL_LOSS_STEPS = 10

PHASES = ("data", "forward", "backward", "exchange", "optimizer")


@dataclass(frozen=True)
class Phases:
    """The durations of the parts of one step, in seconds; they add up to the whole step.

    Attributes:
        data_s: fetching the batch and moving it to the device.
        forward_s: the model's forward and the loss.
        backward_s: ``loss.backward()`` until the last gradient of this rank exists.
        exchange_s: from that gradient until ``backward()`` returns: communication that backward does not hide. None with one
            process or divided weights.
        optimizer_s: ``optimizer.step()`` and ``zero_grad()``.
    """

    data_s: float
    forward_s: float
    backward_s: float
    exchange_s: float | None
    optimizer_s: float

    def parts(self) -> tuple[float, ...]:
        """Return the five durations in the order of :data:`PHASES`, with 0 for an absent exchange."""
        return (self.data_s, self.forward_s, self.backward_s, self.exchange_s or 0.0, self.optimizer_s)

    @property
    def step_s(self) -> float:
        """Return the duration of the whole step, in seconds."""
        return sum(self.parts())


@dataclass(frozen=True)
class RankRecord:
    """The measurements of one rank in one run; times in seconds, sizes in bytes.

    Attributes:
        rank: the rank that was measured.
        num_steps: the number of measured steps, without the warm-up.
        elapsed_s: wall time of the measured steps on this rank.
        phases: the mean durations of the parts of a measured step.
        losses: this rank's loss at each step, warm-up included.
        sent_bytes: bytes that this rank wrote to TCP sockets during the measured steps; None where they cannot be counted.
        peak_bytes: the peak main memory of this process.
        peak_whole_life: whether ``peak_bytes`` includes start-up, because the kernel did not allow a reset.
        pss_bytes: this process's proportional share (PSS) of main memory after a backward pass; None where it is not known.
        peak_device_bytes: the peak accelerator memory that PyTorch allocated; None on the CPU.
        main_share: for a forward over several devices in one process, the share of time in which one device works and the
            others wait; None elsewhere.
        gradient_bytes: the size of all gradients.
        weights_digest: a hash of all parameters at the end, to test whether ranks have bit-identical weights.
        metrics: the result of the workload's evaluation (rank 0 of the first round only).
        num_threads: compute threads of this process.
        device: the device that this rank trained on.
        dataset_size: the number of training samples.
        batch_size: the samples of one step on this rank; its share of them where ranks hold one copy of the model together.
        backend: the backend of this rank's collectives; empty in a strategy of one process, which has none.
        median_step_s: the median of the measured steps, which another program's burst changes less than the mean.
        num_batch_norms: the model's batch normalization layers whose statistics are those of one rank's samples alone.
        noise_scale: the gradient noise scale in samples at the end of the run; None where it was not measured.
        stages: the stages of a pipeline that this rank computed.
        own_steps_s: of each measured step the time without the exchange that backward does not hide; empty where not known.
    """

    rank: int
    num_steps: int
    elapsed_s: float
    phases: Phases
    losses: tuple[float, ...]
    sent_bytes: int | None
    peak_bytes: int | None
    peak_whole_life: bool
    pss_bytes: int | None
    peak_device_bytes: int | None
    main_share: float | None
    gradient_bytes: int
    weights_digest: str
    metrics: dict[str, float]
    num_threads: int
    device: str
    dataset_size: int
    batch_size: int
    backend: str = ""
    num_batch_norms: int = 0
    median_step_s: float = 0.0
    noise_scale: float | None = None
    stages: tuple[StageTimes, ...] = ()
    own_steps_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class MeasuredRound:
    """The measurements of one run of one strategy, in fresh processes.

    Attributes:
        number: the number of the round, from 1.
        samples_per_s: samples of all ranks divided by the wall time of the slowest rank.
        phases: the durations of a step's parts, the mean over the ranks.
        ranks: the record of every rank.
    """

    number: int
    samples_per_s: float
    phases: Phases
    ranks: tuple[RankRecord, ...]


@dataclass(frozen=True)
class Difference:
    """The difference between a strategy's weights and those of ``single`` after the same samples.

    Attributes:
        largest: the largest absolute difference of any element.
        tensor: the name of the parameter with the largest difference.
        relative: the largest difference over the largest weight of the same tensor, the maximum over all tensors.
        distance: the Euclidean norm of all differences over that of all weights.
    """

    largest: float
    tensor: str
    relative: float
    distance: float


@dataclass(frozen=True)
class RunFailure:
    """The failure of a strategy's run: its first cause in a few lines, the log file of its processes, and the round."""

    cause: str
    log: str
    round: int


@dataclass(frozen=True)
class StrategyRow:
    """The results of one strategy with one backend: a row of the comparison's tables.

    Attributes:
        name: the name of the row in this comparison: the strategy's name, or ``strategy@backend``.
        strategy: the strategy's name; empty if it equals ``name``.
        asked_backend: the requested backend; None: ``gz.init`` chose one, see ``backend``.
        num_groups: the number of process groups that exchanged the strategy's buckets in turn.
        layout: the requested sizes of axes, as ``--layout`` takes them; empty: the strategy's own.
        schedule: that of a pipeline, as ``--schedule`` takes it; empty: the order of the script's own loop.
    """

    name: str
    summary: str
    exact: bool
    trains: bool
    one_process: bool
    source: str
    simplicity: int
    num_processes: int
    rounds: tuple[MeasuredRound, ...]
    difference: Difference | None = None
    failure: RunFailure | None = None
    timeline: str | None = None
    strategy: str = ""
    asked_backend: str | None = None
    num_groups: int = 1
    layout: str = ""
    schedule: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the strategy finished all its rounds."""
        return self.failure is None and bool(self.rounds)

    @property
    def title(self) -> str:
        """Return the name of the row for tables and plots, where that of a bound says so."""
        return self.name if self.trains else f"{self.name} (bound)"

    @property
    def backend(self) -> str:
        """Return the name of the backend of the strategy's collectives; empty for a strategy of one process."""
        return self.rounds[0].ranks[0].backend

    @property
    def samples_per_s(self) -> float:
        """Return the strategy's samples/s: the median over the rounds."""
        return statistics.median(r.samples_per_s for r in self.rounds)

    @property
    def slowest(self) -> float:
        """Return the samples/s of the strategy's slowest round."""
        return min(r.samples_per_s for r in self.rounds)

    @property
    def fastest(self) -> float:
        """Return the samples/s of the strategy's fastest round."""
        return max(r.samples_per_s for r in self.rounds)

    @property
    def phases(self) -> Phases:
        """Return the durations of a step's parts in the round of median speed (of two middle rounds, the slower one)."""
        ordered = sorted(self.rounds, key=lambda r: r.samples_per_s)
        return ordered[(len(ordered) - 1) // 2].phases

    @property
    def losses(self) -> tuple[float, ...]:
        """Return the loss at each step of the first round, the mean over the ranks."""
        return tuple(statistics.fmean(step) for step in zip(*(r.losses for r in self.rounds[0].ranks), strict=True))

    @property
    def final_loss(self) -> float:
        """Return the mean of the last :data:`FINAL_LOSS_STEPS` values of :attr:`losses`."""
        return statistics.fmean(self.losses[-FINAL_LOSS_STEPS:])

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of rank 0's model, evaluated at the end of the first round."""
        return self.rounds[0].ranks[0].metrics

    @property
    def sent_bytes_per_step(self) -> float | None:
        """Return the bytes that a rank wrote to TCP sockets per step: the maximum over ranks, the median over the rounds."""
        return self._median(lambda r: None if r.sent_bytes is None else r.sent_bytes / r.num_steps, max)

    @property
    def peak_rank_bytes(self) -> float | None:
        """Return the peak main memory of the rank with the highest peak, the median over the rounds."""
        return self._median(lambda r: r.peak_bytes, max)

    @property
    def peak_device_bytes(self) -> float | None:
        """Return the peak accelerator memory of the rank with the highest peak, the median over the rounds."""
        return self._median(lambda r: r.peak_device_bytes, max)

    @property
    def main_share(self) -> float | None:
        """Return the share of a multi-device forward in which one device works and the others wait; median over the rounds."""
        return self._median(lambda r: r.main_share, max)

    @property
    def machine_bytes(self) -> float | None:
        """Return the main memory of all ranks together, shared pages counted once: the sum of PSS, median over the rounds."""
        return self._median(lambda r: r.pss_bytes, sum)

    @property
    def stages(self) -> list[StageTimes]:
        """Return the stages of a pipeline, each with the mean time over its copies, in the round of median speed."""
        ordered = sorted(self.rounds, key=lambda r: r.samples_per_s)
        found: dict[int, list[StageTimes]] = {}
        for rank in ordered[(len(ordered) - 1) // 2].ranks:
            for stage in rank.stages:
                found.setdefault(stage.number, []).append(stage)
        return [replace(same[0], busy_s=statistics.fmean(s.busy_s for s in same)) for _, same in sorted(found.items())]

    @property
    def ranks_identical(self) -> bool | None:
        """Return whether all ranks ended every round with bit-identical weights; None with one process."""
        if self.num_processes == 1 or not self.rounds:
            return None
        return all(len({r.weights_digest for r in one.ranks}) == 1 for one in self.rounds)

    @property
    def drift_s(self) -> float | None:
        """Return by how much steps grow if all ranks wait for the slowest in each step, instead of once at the end.

        It is the mean over the steps of the longest own time of any rank, less the longest mean of any rank; the median over
        the rounds. None where the own times are not known.
        """
        found = []
        for one in self.rounds:
            steps = [rank.own_steps_s for rank in one.ranks]
            if not all(steps):
                return None
            together = statistics.fmean(max(each) for each in zip(*steps, strict=True))
            found.append(together - max(statistics.fmean(each) for each in steps))
        return statistics.median(found) if found else None

    def _median(self, value: Any, over_ranks: Any) -> float | None:
        found = []
        for one in self.rounds:
            values = [value(record) for record in one.ranks]
            if not values or None in values:
                return None
            found.append(over_ranks(values))
        return float(statistics.median(found)) if found else None


@dataclass(frozen=True)
class ComparisonSettings:
    """The settings of a comparison, given on the command line or chosen by default.

    Attributes:
        num_ranks: the ranks of strategies of several processes; it also sets the global batch of every strategy.
        num_steps: the number of measured steps of a run.
        num_warmup_steps: the number of steps before the measured ones.
        num_rounds: the number of runs of each strategy.
        num_epochs: the option ``--epochs``, from which ``num_steps`` was computed; None without it.
        seed: seed of the initial weights and of the order of the samples.
        threads_per_rank: compute threads of each rank; by default the cores divided by the ranks.
        batch_size: samples of one step on one rank.
        dataset_size: number of training samples.
    """

    num_ranks: int
    num_steps: int
    num_warmup_steps: int
    num_rounds: int
    num_epochs: float | None
    seed: int
    threads_per_rank: int
    batch_size: int
    dataset_size: int

    @property
    def global_batch_size(self) -> int:
        """Return how many samples one step uses over all ranks."""
        return self.num_ranks * self.batch_size


@dataclass(frozen=True)
class Results:
    """All results of a comparison, as ``results.json`` holds them.

    ``busy`` is the share of the cores that other programs used when it began or when it ended, the larger one.
    """

    created: str
    command: str
    workload: str
    workload_details: dict[str, str | int | float]
    settings: ComparisonSettings
    machine: Machine
    rows: tuple[StrategyRow, ...]
    notes: tuple[str, ...] = ()
    duration_s: float = 0.0
    busy: float = 0.0
    schema_version: int = field(default=SCHEMA_VERSION)

    def row(self, name: str) -> StrategyRow | None:
        """Return the row of a strategy; None if it was not compared or failed."""
        return next((r for r in self.rows if r.name == name and r.ok), None)

    def backends(self) -> dict[str, list[str]]:
        """Return a mapping backend -> the names of the rows whose collectives used that backend."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row.ok and row.backend:
                found.setdefault(row.backend, []).append(row.name)
        return found

    def ratio(self, row: StrategyRow, to: str) -> float | None:
        """Return the row's samples/s divided by those of the strategy ``to``; None if either has no results."""
        other = self.row(to)
        return row.samples_per_s / other.samples_per_s if other is not None and row.ok else None

    @property
    def largest_batch(self) -> float | None:
        """Return the global batch, in samples, up to which a larger one still pays: the gradient noise scale, if measured."""
        found = (one.ranks[0].noise_scale for row in self.rows if row.ok for one in row.rounds)
        return next((each for each in found if each is not None), None)

    def epoch_s(self, row: StrategyRow) -> float:
        """Return the seconds that one pass over the training data takes at the row's median speed."""
        return self.settings.dataset_size / row.samples_per_s


def summarize_round(number: int, ranks: Iterable[RankRecord]) -> MeasuredRound:
    """Combine the ranks' records of one run into the measurements of a round."""
    records = tuple(sorted(ranks, key=lambda r: r.rank))
    num_samples = sum(r.num_steps * r.batch_size for r in records)
    columns = zip(*(r.phases.parts() for r in records), strict=True)
    data_s, forward_s, backward_s, exchange_s, optimizer_s = (statistics.fmean(column) for column in columns)
    no_exchange = any(r.phases.exchange_s is None for r in records)
    phases = Phases(data_s, forward_s, backward_s, None if no_exchange else exchange_s, optimizer_s)
    return MeasuredRound(number, num_samples / max(r.elapsed_s for r in records), phases, records)


def to_json(results: Results) -> str:
    """Return the text of ``results.json``: every record, and in each row the derived values that the report shows.

    A number that JSON cannot represent is written as text: ``"nan"``, ``"inf"``.
    """
    document = asdict(results)
    document["largest_batch_that_pays"] = results.largest_batch
    for row, out in zip(results.rows, document["rows"], strict=True):
        out["derived"] = _derived(results, row) if row.ok else None
    return records.to_json(document)


def from_json(text: str) -> Results:
    """Rebuild the results from the text that :func:`to_json` returned; derived values are computed again, not read.

    Raises:
        UsageError: the text is not a ``results.json``, or has another schema version.
    """
    fix = "run the comparison again with this version"
    return records.from_json(Results, text, SCHEMA_VERSION, "results.json", fix)


def _derived(results: Results, row: StrategyRow) -> dict[str, Any]:
    return {
        "samples_per_s": {"median": row.samples_per_s, "min": row.slowest, "max": row.fastest},
        "epoch_s": results.epoch_s(row),
        "speedup_over_single": results.ratio(row, "single"),
        "speedup_over_torch_ddp": results.ratio(row, "torch-ddp"),
        "efficiency_against_none": results.ratio(row, "none"),
        "step": asdict(row.phases),
        "sent_bytes_per_rank_and_step": row.sent_bytes_per_step,
        "peak_rank_bytes": row.peak_rank_bytes,
        "peak_device_bytes": row.peak_device_bytes,
        "machine_bytes": row.machine_bytes,
        "main_share": row.main_share,
        "final_loss": row.final_loss,
        "metrics": dict(row.metrics),
        "ranks_identical": row.ranks_identical,
    }
