"""The facts about one process of a training from which its time on other machines and on more ranks is predicted."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from guozhuang.cost.trace import PARTS, Compute, Start, Trace
from guozhuang.errors import UsageError, explain

SCHEMA_VERSION = 1
#: Main memory that gloo's code, threads and connections take, as measured with two ranks.
GLOO_BYTES = 20e6
_EXTENDED = ", extended "


@dataclass(frozen=True)
class BatchTime:
    """The step of one process at one batch size.

    Attributes:
        batch_size: samples of a step.
        parts: the median seconds of each part of the step, by the names in ``trace.PARTS``.
        peak_bytes: peak memory of the process (of its device, where it has one); None if the kernel does not tell.
        num_steps: how many steps were measured.
    """

    batch_size: int
    parts: dict[str, float]
    peak_bytes: int | None
    num_steps: int

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class GradientTime:
    """When one parameter's gradient is there, in seconds after backward began, and its size; ``inf`` if there never is one."""

    name: str
    num_bytes: int
    ready_s: float


@dataclass(frozen=True)
class Crowding:
    """The same step on several processes of one machine at a time, which do not communicate.

    Attributes:
        num_ranks: how many there were.
        num_threads: compute threads of each.
        parts: the median seconds of each part, the mean over the processes.
        steps: the seconds of every step of every process: ``steps[rank][number]``, all ranks' steps of equal number together.
    """

    num_ranks: int
    num_threads: int
    parts: dict[str, float]
    steps: tuple[tuple[float, ...], ...]

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class CollectiveTime:
    """One collective on ranks of this machine that do nothing else.

    Attributes:
        transport: ``"shm"`` or ``"gloo"`` (``"nccl"`` on devices).
        num_ranks: how many ranks took part.
        num_bytes: size of the tensor.
        seconds: median time of a call.
        processor_s: processor time of one rank for a call, of all its threads.
    """

    transport: str
    num_ranks: int
    num_bytes: int
    seconds: float
    processor_s: float
    operation: str = "all_reduce"


@dataclass(frozen=True)
class Profile:
    """What a minute of measuring found out about a training and a machine.

    Attributes:
        workload: its title.
        conditions: what must be the same for the profile to be used again: machine, versions, workload and its options.
        device: what computed: ``"cpu"``, or the name of a CUDA device.
        num_threads: compute threads of one process.
        num_cores: cores of the machine.
        batch_size: samples of a rank's step, if a prediction asks for no other.
        batches: the step of one process at two or more batch sizes, in their order.
        gradients: every trainable parameter, in the order in which gradients were ready.
        crowding: the same step on 1, 2, ... processes at a time.
        collectives: what collectives cost on this machine.
        traces: what one rank of a strategy does, by :func:`trace_name`; recorded in a fake world.
        busy: the share of the cores that other programs kept busy when measuring began.
        refused: why there are no traces of a strategy, by the same names.
        created: when it was measured.
    """

    workload: str
    conditions: dict[str, str]
    device: str
    num_threads: int
    num_cores: int
    batch_size: int
    batches: tuple[BatchTime, ...]
    gradients: tuple[GradientTime, ...]
    crowding: tuple[Crowding, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    traces: dict[str, tuple[Trace, ...]] = field(default_factory=dict)
    busy: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    created: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.batches or not self.crowding:
            raise UsageError(explain("a profile has the step of one process", fix="measure it again"))

    def extended(self, by: Profile) -> Profile:
        """Return this profile with the crowds, collectives and traces of another one of the same training.

        A machine is not equally fast at all times: what the other has timed counts as much longer as a step of one process was
        here than there.

        Args:
            by: the other; the first of its ``crowding`` is one process of as many threads as the first of this profile's.
        """
        factor = self.crowding[0].step_s / by.crowding[0].step_s
        slower = dict.fromkeys(PARTS, factor)
        crowding = tuple(
            replace(
                each,
                parts={part: seconds * factor for part, seconds in each.parts.items()},
                steps=tuple(tuple(seconds * factor for seconds in rank) for rank in each.steps),
            )
            for each in by.crowding[1:]
        )
        traces = {name: tuple(scaled(each, slower) for each in several) for name, several in by.traces.items()}
        return replace(
            self,
            crowding=self.crowding + crowding,
            collectives=self.collectives + by.collectives,
            traces=self.traces | traces,
            refused=self.refused | by.refused,
            busy=max(self.busy, by.busy),
            created=f"{self.created.partition(_EXTENDED)[0]}{_EXTENDED}{by.created}",
        )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients that one backward makes."""
        return sum(each.num_bytes for each in self.gradients if each.ready_s < float("inf"))

    @property
    def correlation(self) -> float:
        """The correlation, from 0 to 1, of the times of two processes' steps that ran side by side; 0 if none did."""
        pair = next((each.steps for each in self.crowding if each.num_ranks == 2), None)
        if pair is None:
            return 0.0
        one, other = (list(each)[: min(map(len, pair))] for each in pair)
        flat = len(one) < 3 or max(one) == min(one) or max(other) == min(other)
        return 0.0 if flat else max(0.0, statistics.correlation(one, other))

    @property
    def lone_steps(self) -> tuple[float, ...]:
        """The seconds of every step of one process that had the machine for itself."""
        return self.crowding[0].steps[0]

    def parts(self, batch_size: int | None = None) -> dict[str, float]:
        """Return the seconds of each part of a step of one process: measured, or on the line through two batch sizes."""
        wanted = self.batch_size if batch_size is None else batch_size
        measured = next((each for each in self.batches if each.batch_size == wanted), None)
        if measured is not None:
            return dict(measured.parts)
        points = [(float(each.batch_size), each.parts) for each in self.batches]
        return {part: _line([(b, parts.get(part, 0.0)) for b, parts in points], wanted) for part in PARTS}

    def memory_bytes(self, batch_size: int | None = None) -> float | None:
        """Return the peak memory of one process, on the line through two batch sizes; None if it was not measured."""
        points = [
            (float(each.batch_size), float(each.peak_bytes)) for each in self.batches if each.peak_bytes is not None
        ]
        return _line(points, self.batch_size if batch_size is None else batch_size) if points else None

    def rank_memory_bytes(self, trace: Trace, batch_size: int) -> float | None:
        """Return the peak memory of a rank: that of the recorded process, with what a sample adds in one process alone.

        A trace that was not recorded is that of buckets: while the largest gradient is copied into its bucket both are there,
        and gloo takes some room.

        Args:
            trace: of the rank.
            batch_size: samples of its step.

        Returns:
            Bytes, or None if the process was not measured.
        """
        own, wanted = self.memory_bytes(), self.memory_bytes(batch_size)
        if own is None or wanted is None:
            return None
        if trace.peak_bytes is not None:
            return trace.peak_bytes + wanted - own
        largest = max((each.num_bytes for each in self.gradients), default=0)
        return wanted + (largest + GLOO_BYTES if any(isinstance(each, Start) for each in trace.events) else 0.0)

    def measured_batches(self) -> tuple[int, int]:
        """Return the smallest and the largest batch size that was measured."""
        sizes = [each.batch_size for each in self.batches]
        return min(sizes), max(sizes)

    def crowd(self, num_ranks: int, num_threads: int | None = None) -> dict[str, float]:
        """Return by what factor each part of a step takes longer when so many processes work on one machine.

        Where that was measured it is what was measured, between two numbers of processes interpolated. Beyond the largest the
        factor grows as the ranks do, because they take turns on the cores.

        Args:
            num_ranks: processes on the machine.
            num_threads: compute threads of each; None: those of the profile.

        Raises:
            UsageError: no process with so many threads was measured.
        """
        threads = self.num_threads if num_threads is None else num_threads
        alone = self.crowding[0].parts
        found = sorted((each.num_ranks, each) for each in self.crowding if each.num_threads == threads)
        if not found:
            measured = sorted({each.num_threads for each in self.crowding})
            what = f"the profile has no process of {threads} threads, only of {', '.join(map(str, measured))}"
            raise UsageError(explain(what, fix=f"profile with --threads-per-rank {threads}"))
        factors = [(float(n), {part: _ratio(each.parts, alone, part) for part in PARTS}) for n, each in found]
        (least, first), (most, last) = factors[0], factors[-1]
        cores = self.num_cores / threads

        def turns(ranks: float) -> float:
            return max(1.0, ranks / cores)

        if num_ranks >= most:
            return {part: factor * turns(num_ranks) / turns(most) for part, factor in last.items()}
        if num_ranks < least:
            return {part: factor * turns(num_ranks) / turns(least) for part, factor in first.items()}
        return {part: _between([(n, each[part]) for n, each in factors], num_ranks) for part in PARTS}

    def most_ranks(self, num_threads: int) -> int:
        """Return the largest number of processes of so many threads that were measured together; 0 if there were none."""
        return max((each.num_ranks for each in self.crowding if each.num_threads == num_threads), default=0)


def trace_name(strategy: str, num_ranks: int, num_nodes: int, transport: str) -> str:
    """Return the key of a strategy's traces on so many ranks of so many nodes in ``Profile.traces``."""
    return f"{strategy} on {num_ranks} ranks of {num_nodes} over {transport}"


def scaled(trace: Trace, factors: Mapping[str, float]) -> Trace:
    """Return a trace in which the work of each part takes ``factors[part]`` times as long (1 where there is none)."""
    events = tuple(
        replace(each, seconds=each.seconds * factors.get(each.part, 1.0)) if isinstance(each, Compute) else each
        for each in trace.events
    )
    return replace(trace, events=events)


def _ratio(parts: Mapping[str, float], alone: Mapping[str, float], part: str) -> float:
    """Return how much longer a part took; of parts that hardly take any time that of the whole step."""
    whole, each = sum(alone.values()), alone.get(part, 0.0)
    return parts.get(part, 0.0) / each if each > 0.02 * whole else sum(parts.values()) / whole


def _line(points: list[tuple[float, float]], at: float) -> float:
    """Return the value at ``at`` of the line through points, by least squares relative to their size; never negative."""
    if len(points) == 1:
        return points[0][1] * at / points[0][0]
    weights = [1 / max(y, 1e-12) ** 2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    square = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / square
    slope = max(0.0, slope)
    return max(0.0, mean_y + slope * (at - mean_x))


def _between(points: list[tuple[float, float]], at: float) -> float:
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        if x <= at <= next_x:
            return y + (next_y - y) * (at - x) / (next_x - x)
    return points[0][1]
