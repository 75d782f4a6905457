"""The records of a comparison, their summaries, and their form as ``results.json``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from guozhuang.errors import UsageError, explain
from guozhuang.records import build, plain

SCHEMA_VERSION = 1

#: How many of the last steps the final loss is the mean of.
FINAL_LOSS_STEPS = 10

PHASES = ("data", "forward", "backward", "exchange", "optimizer")


@dataclass(frozen=True)
class Phases:
    """The parts of one step, in seconds; they add up to the step.

    Attributes:
        data_s: fetching the batch and bringing it to the device.
        forward_s: the model's forward and the loss.
        backward_s: ``loss.backward()`` until the last gradient of this rank exists.
        exchange_s: from then until ``backward()`` returns: communication that nothing hid. None with one process.
        optimizer_s: ``optimizer.step()`` and ``zero_grad()``.
    """

    data_s: float
    forward_s: float
    backward_s: float
    exchange_s: float | None
    optimizer_s: float

    def parts(self) -> tuple[float, ...]:
        """Return the five parts in the order of :data:`PHASES`, 0 where there is no exchange."""
        return (self.data_s, self.forward_s, self.backward_s, self.exchange_s or 0.0, self.optimizer_s)

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self.parts())


@dataclass(frozen=True)
class RankRecord:
    """The measurements of one rank in one run; times in seconds, sizes in bytes.

    Attributes:
        rank: whose record it is.
        num_steps: the measured steps, warm-up not included.
        elapsed_s: wall time of the measured steps on this rank.
        phases: the mean division of the measured steps.
        losses: this rank's loss at each step, warm-up included.
        sent_bytes: what this rank wrote to TCP sockets during the measured steps; None where that cannot be counted.
        peak_bytes: the most main memory this process held.
        peak_whole_life: ``peak_bytes`` includes start-up, because the kernel did not let the mark be reset.
        pss_bytes: its proportional share of main memory after a backward pass; None where the kernel does not tell.
        peak_device_bytes: the most accelerator memory that PyTorch gave out; None on the CPU.
        main_share: of a forward over several devices in one process, the share of the time in which one works and the
            others wait; None elsewhere.
        gradient_bytes: the size of all gradients.
        weights_digest: a hash of all parameters at the end.
        metrics: what the workload's evaluation returned (rank 0 of the first round only).
        num_threads: compute threads of this process.
        device: the device it trained on.
        dataset_size: the number of training samples.
        batch_size: the samples of one step on this rank.
        backend: what carried its collectives; empty in a strategy of one process, which has none.
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


@dataclass(frozen=True)
class MeasuredRound:
    """One run of one strategy in fresh processes.

    Attributes:
        number: from 1.
        samples_per_s: samples of all ranks over the wall time of the slowest rank.
        phases: the mean over the ranks.
        ranks: every rank's record.
    """

    number: int
    samples_per_s: float
    phases: Phases
    ranks: tuple[RankRecord, ...]


@dataclass(frozen=True)
class Difference:
    """The distance of the weights from those of ``single`` after the same samples.

    Attributes:
        largest: the largest difference of any weight.
        tensor: the parameter it is in.
        relative: the largest difference over the largest weight of the same tensor, the worst over all tensors.
        distance: the Euclidean norm of all differences over that of all weights.
    """

    largest: float
    tensor: str
    relative: float
    distance: float


@dataclass(frozen=True)
class RunFailure:
    """Why a strategy has no numbers: the first cause in a line or a few, and the file with everything it printed."""

    cause: str
    log: str
    round: int


@dataclass(frozen=True)
class StrategyRow:
    """The outcome of one strategy.

    Attributes:
        name: what it is called in this comparison: the strategy's name, or ``strategy@backend``.
        strategy: the strategy's name; empty where it is ``name``.
        asked_backend: the backend it was to use; None: what ``gz.init`` chose, see ``backend``.
        num_groups: how many process groups took its buckets in turn.
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

    @property
    def ok(self) -> bool:
        """Whether every round came to its end."""
        return self.failure is None and bool(self.rounds)

    @property
    def backend(self) -> str:
        """The backend of the collectives; empty without any."""
        return self.rounds[0].ranks[0].backend

    @property
    def samples_per_s(self) -> float:
        """The median over the rounds."""
        return statistics.median(r.samples_per_s for r in self.rounds)

    @property
    def slowest(self) -> float:
        """Samples/s of the slowest round."""
        return min(r.samples_per_s for r in self.rounds)

    @property
    def fastest(self) -> float:
        """Samples/s of the fastest round."""
        return max(r.samples_per_s for r in self.rounds)

    @property
    def phases(self) -> Phases:
        """The division of the step in the median round (of the slower of the two middle ones when they are even)."""
        ordered = sorted(self.rounds, key=lambda r: r.samples_per_s)
        return ordered[(len(ordered) - 1) // 2].phases

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss at each step of the first round, the mean over the ranks."""
        return tuple(statistics.fmean(step) for step in zip(*(r.losses for r in self.rounds[0].ranks), strict=True))

    @property
    def final_loss(self) -> float:
        """The mean of the last :data:`FINAL_LOSS_STEPS` values of :attr:`losses`."""
        return statistics.fmean(self.losses[-FINAL_LOSS_STEPS:])

    @property
    def metrics(self) -> Mapping[str, float]:
        """The evaluation of rank 0's model at the end of the first round."""
        return self.rounds[0].ranks[0].metrics

    @property
    def sent_bytes_per_step(self) -> float | None:
        """Bytes that one rank wrote to the network per step: the most of any rank, the median over the rounds."""
        return self._median(lambda r: None if r.sent_bytes is None else r.sent_bytes / r.num_steps, max)

    @property
    def peak_rank_bytes(self) -> float | None:
        """Peak main memory of the largest rank, the median over the rounds."""
        return self._median(lambda r: r.peak_bytes, max)

    @property
    def peak_device_bytes(self) -> float | None:
        """Peak accelerator memory of the largest rank, the median over the rounds."""
        return self._median(lambda r: r.peak_device_bytes, max)

    @property
    def main_share(self) -> float | None:
        """The share of a forward over several devices in which one works and the others wait, the median."""
        return self._median(lambda r: r.main_share, max)

    @property
    def machine_bytes(self) -> float | None:
        """Main memory of all ranks together, shared pages once: the sum of PSS, the median over the rounds."""
        return self._median(lambda r: r.pss_bytes, sum)

    @property
    def ranks_identical(self) -> bool | None:
        """Whether all ranks ended every round with bit-identical weights; None with one process."""
        if self.num_processes == 1 or not self.rounds:
            return None
        return all(len({r.weights_digest for r in one.ranks}) == 1 for one in self.rounds)

    def _median(self, value: Any, over_ranks: Any) -> float | None:
        found = []
        for one in self.rounds:
            values = [value(record) for record in one.ranks]
            if not values or None in values:
                return None
            found.append(over_ranks(values))
        return float(statistics.median(found)) if found else None


@dataclass(frozen=True)
class Machine:
    """The machine of a comparison, and its software."""

    cpu: str
    num_cores: int
    memory_bytes: int
    accelerators: tuple[str, ...]
    system: str
    python: str
    torch: str
    guozhuang: str


@dataclass(frozen=True)
class ComparisonSettings:
    """The settings of a comparison, as they were asked for or chosen.

    Attributes:
        num_ranks: the ranks of strategies of several processes; the global batch is for this number everywhere.
        num_steps: the measured steps of a run.
        num_warmup_steps: the steps before them.
        num_rounds: the runs of each strategy.
        num_epochs: given when the number of steps came from epochs.
        seed: of the initial weights and of the order of the samples.
        threads_per_rank: None: the cores divided by the ranks.
        batch_size: per rank.
        dataset_size: training samples.
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
        """Samples of one step over all ranks."""
        return self.num_ranks * self.batch_size


@dataclass(frozen=True)
class Results:
    """A whole comparison."""

    created: str
    command: str
    workload: str
    workload_details: dict[str, str | int | float]
    settings: ComparisonSettings
    machine: Machine
    rows: tuple[StrategyRow, ...]
    notes: tuple[str, ...] = ()
    duration_s: float = 0.0
    schema_version: int = field(default=SCHEMA_VERSION)

    def row(self, name: str) -> StrategyRow | None:
        """Return the row of that strategy if it was compared and did not fail."""
        return next((r for r in self.rows if r.name == name and r.ok), None)

    def backends(self) -> dict[str, list[str]]:
        """Return for each backend that carried collectives the names of the rows that it did so for."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row.ok and row.backend:
                found.setdefault(row.backend, []).append(row.name)
        return found

    def ratio(self, row: StrategyRow, to: str) -> float | None:
        """Return the row's samples/s over those of the strategy ``to``; None where that one has none."""
        other = self.row(to)
        return row.samples_per_s / other.samples_per_s if other is not None and row.ok else None

    def epoch_s(self, row: StrategyRow) -> float:
        """Seconds that one pass over the training data takes at the row's median speed."""
        return self.settings.dataset_size / row.samples_per_s


def summarize_round(number: int, ranks: Iterable[RankRecord]) -> MeasuredRound:
    """Put the ranks' records of one run together."""
    records = tuple(sorted(ranks, key=lambda r: r.rank))
    num_samples = sum(r.num_steps * r.batch_size for r in records)
    columns = zip(*(r.phases.parts() for r in records), strict=True)
    data_s, forward_s, backward_s, exchange_s, optimizer_s = (statistics.fmean(column) for column in columns)
    no_exchange = any(r.phases.exchange_s is None for r in records)
    phases = Phases(data_s, forward_s, backward_s, None if no_exchange else exchange_s, optimizer_s)
    return MeasuredRound(number, num_samples / max(r.elapsed_s for r in records), phases, records)


def to_json(results: Results) -> str:
    """Return the text of ``results.json``: every record, and under each row the values the report shows.

    A number that JSON does not know stands there as text: ``"nan"``, ``"inf"``.
    """
    document = asdict(results)
    for row, out in zip(results.rows, document["rows"], strict=True):
        out["derived"] = _derived(results, row) if row.ok else None
    return json.dumps(plain(document), indent=1, allow_nan=False)


def from_json(text: str) -> Results:
    """Rebuild what :func:`to_json` wrote; derived values are computed again, not read.

    Raises:
        UsageError: the text is no such document or of another schema.
    """
    try:
        document = json.loads(text)
        version = document["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(explain(f"this is no results.json: {error}")) from error
    if version != SCHEMA_VERSION:
        raise UsageError(
            explain(
                "results.json is of another version", value=version, fix="run the comparison again with this version"
            )
        )
    try:
        return build(Results, document)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(explain(f"results.json is not complete: {error!r}")) from error


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
