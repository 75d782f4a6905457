"""Enumerates the layouts of a transformer on a cluster, with the time, memory and money of each. Nothing is guessed away.

[Note: what is enumerated] Every division of the ranks into tensor, pipeline and data ways, every micro-batch that divides what
a copy of the model gets of the batch, every number of stages a rank, what is recomputed, what is sharded over the copies; where
gradients are averaged in buckets beside backward, the caps of ``CAPS_MB``, and without other ways ``EXCHANGES``.
Only what cannot be is left out: tensor ways that do not divide the heads or would leave a node, stages that do not divide the
layers, copies that do not divide the batch, caps above all gradients. Memory is computed for each, time for those that fit.
A device has one rank, so that ranks x threads is no choice here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from guozhuang.cost import memory
from guozhuang.cost.cluster import Cluster
from guozhuang.cost.memory import USABLE, MemoryFit, MemoryUse
from guozhuang.cost.step import step
from guozhuang.cost.transformer import RECOMPUTE, Transformer
from guozhuang.errors import UsageError

#: Caps of a bucket of gradients, in MiB; the first one is what ``guozhuang run`` takes by itself.
CAPS_MB = (25.0, 1.0, 5.0, 100.0, 400.0)
#: Bytes of a gradient on the wire, by what exchanges it; None are those that it has in memory. All but the first are inexact.
EXCHANGES: dict[str, float | None] = {"all-reduce": None, "bf16": 2.0, "quantize8": 1.0}
#: Layouts whose predicted times differ by less than this share are alike: the least complex of them is chosen.
ALIKE = 0.01

_TRANSFERS = ("tensor", "stages", "data")  # parts of a step that links decide, not how fast a device computes


class Arrangement(NamedTuple):
    """One layout of a training, with all that decides its time and memory.

    Attributes:
        num_ranks: how many ranks there are.
        tensor: how many ranks divide each matrix.
        pipeline: how many ranks hold stages of the layers.
        data: how many copies of the model there are.
        sharding: what is divided among the copies: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights.
        interleave: how many stages each rank has.
        batch: samples of a step, on all ranks together.
        micro_batch: samples that a copy computes at a time.
        recompute: what backward recomputes: one of ``RECOMPUTE``.
        cap_mb: of a bucket of gradients, in MiB.
        exchange: how gradients are averaged: one of ``EXCHANGES``.
    """

    num_ranks: int
    tensor: int
    pipeline: int
    data: int
    sharding: int
    interleave: int
    batch: int
    micro_batch: int
    recompute: str
    cap_mb: float = CAPS_MB[0]
    exchange: str = "all-reduce"

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of both ``memory.peak`` and ``step`` that it stands for."""
        names = ("tensor", "pipeline", "data", "sharding", "interleave", "micro_batch", "recompute")
        return {name: getattr(self, name) for name in names} | {"bucket_bytes": self.cap_mb * 2**20}

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches a copy computes in a step."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def family(self) -> str:
        """The kind of layout, in words; what lost is explained by kinds."""
        if self.tensor * self.pipeline > 1:
            return FAMILIES[3 + (self.tensor > 1) + 2 * (self.pipeline > 1)]
        return FAMILIES[self.sharding] if self.data > 1 else "one rank"

    @property
    def complexity(self) -> tuple[int, ...]:
        """What makes it harder to run, the hardest first; of layouts that are as fast the least complex is chosen."""
        return (
            self.tensor * self.pipeline,
            self.interleave,
            self.sharding,
            RECOMPUTE.index(self.recompute),
            self.num_micro_batches,
            CAPS_MB.index(self.cap_mb),
        )


#: The kinds of layout, by what is sharded among copies of a whole model, then by how a model is divided.
FAMILIES = (
    "pure data parallel (ddp)",
    "sharded optimizer state (ZeRO-1)",
    "sharded gradients (ZeRO-2)",
    "sharded weights (FSDP, ZeRO-3)",
    "tensor ways",
    "pipeline ways",
    "tensor and pipeline ways",
)


@dataclass(frozen=True)
class Candidate:
    """An arrangement that fits, and what is expected of it.

    Attributes:
        arrangement: the layout.
        cluster: the part of the cluster that its ranks take.
        step_s: seconds of a step.
        parts: where they go, in seconds.
        memory: bytes of the fullest rank, by what they are for.
        widened: in which respects it is outside of what the cost model was calibrated on.
    """

    arrangement: Arrangement
    cluster: Cluster
    step_s: float
    parts: dict[str, float]
    memory: dict[str, float]
    widened: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks together a second."""
        return self.arrangement.batch / self.step_s


@dataclass(frozen=True)
class Overflow:
    """An arrangement that does not fit, and the bytes that its fullest rank would need, by what they are for."""

    arrangement: Arrangement
    memory: dict[str, float]

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        memory_bytes: of a rank, of which ``USABLE`` may be filled.
        error: by which share memory may be more than predicted.
        num_points: how many arrangements were looked at.
        fitting: those that fit, the fastest first.
        overflows: for each family the arrangement that misses the memory by least.
        impossible: arrangements that the cost model refuses, by its words.
    """

    memory_bytes: float
    error: float = memory.ERROR
    num_points: int = 0
    fitting: list[Candidate] = field(default_factory=list)
    overflows: dict[str, Overflow] = field(default_factory=dict)
    impossible: dict[str, int] = field(default_factory=dict)

    @property
    def limit_bytes(self) -> float:
        """What may be filled of a rank's memory."""
        return self.memory_bytes * USABLE

    def fit(self, needed_bytes: float) -> MemoryFit:
        """Return whether so much fits."""
        return memory.fit(needed_bytes, self.memory_bytes, self.error)


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, rising."""
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*low, *(number // each for each in low)}))


def arrangements(model: Transformer, cluster: Cluster, batch: int) -> Iterator[Arrangement]:
    """Yield every arrangement of a transformer on all ranks of a cluster that can be; see [Note: what is enumerated]."""
    ranks, heads = cluster.num_ranks, model.heads
    for tensor in divisors(ranks):
        if heads % tensor or (model.key_value_heads or heads) % tensor or cluster.ranks_per_node % tensor:
            continue
        for pipeline in divisors(ranks // tensor):
            data = ranks // tensor // pipeline
            if model.layers % pipeline or batch % data:
                continue
            stages = divisors(model.layers // pipeline) if pipeline > 1 else (1,)
            for micro_batch in divisors(batch // data):
                num = batch // data // micro_batch
                for interleave in stages:
                    if interleave > 1 and num % pipeline:
                        continue
                    for sharding in range(4 if data > 1 else 1):
                        for recompute in RECOMPUTE:
                            one = Arrangement(
                                ranks, tensor, pipeline, data, sharding, interleave, batch, micro_batch, recompute
                            )
                            yield one
                            if data > 1 and pipeline == 1 and not sharding:
                                yield from _exchanged(one, 4 * model.parameters / tensor / 2**20)


def _exchanged(one: Arrangement, most_mb: float) -> Iterator[Arrangement]:
    """Yield an arrangement with all other caps and exchanges."""
    for cap_mb in CAPS_MB:
        for exchange in EXCHANGES if one.tensor == 1 else ("all-reduce",):
            changed = one._replace(cap_mb=cap_mb, exchange=exchange)
            if changed != one and (cap_mb < most_mb or cap_mb == CAPS_MB[0]):
                yield changed


def memory_of(
    model: Transformer,
    arrangement: Arrangement,
    precision: str = "autocast",
    flash: bool = False,
    measured: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Return the bytes of the fullest rank, by what they are for; the arguments are those of :func:`search`."""
    found = memory.peak(
        model, **arrangement.keywords, num_micro_batches=arrangement.num_micro_batches, precision=precision, flash=flash
    )
    if measured is not None:
        found = memory.corrected(found, _alone(model, measured[1], precision, flash), measured[0])
    return found.parts


@functools.lru_cache(maxsize=8)
def _alone(model: Transformer, samples: float, precision: str, flash: bool) -> MemoryUse:
    """Return the memory of one process without others, by the formula."""
    return memory.peak(model, micro_batch=samples, precision=precision, flash=flash)


def search(
    model: Transformer,
    cluster: Cluster,
    batches: Sequence[int],
    memory_bytes: float,
    precision: str = "autocast",
    flash: bool = False,
    slowdown: float = 1.0,
    measured: tuple[float, float] | None = None,
) -> SearchResult:
    """Return the time and memory of every arrangement on all ranks of a cluster.

    Args:
        model: what is trained.
        cluster: where; every rank of it is used.
        batches: samples of a step, on all ranks together; each is tried.
        memory_bytes: memory of a rank, of which ``USABLE`` may be filled.
        precision: "autocast" (weights of 32 bits, products in 16) or "fp32".
        flash: whether attention keeps no scores.
        slowdown: how many times as long as the cost model says a device computes; communication is not changed by it.
        measured: the peak in bytes of one process, and the samples of its micro-batch: what the formula is corrected by.

    Raises:
        UsageError: the measured peak cannot be one of this training.
    """
    found = SearchResult(memory_bytes, memory.ERROR if measured is None else memory.MEASURED_ERROR)
    products = product_type(cluster, precision)
    needs: dict[str, float] = {}
    for batch in batches:
        for each in arrangements(model, cluster, batch):
            found.num_points += 1
            if each.exchange == "all-reduce":  # other exchanges come after it, and need as much
                needs = memory_of(model, each, precision, flash, measured)
            total = sum(needs.values())
            if not found.fit(total).fits:
                least = found.overflows.get(each.family)
                if least is None or (total < least.memory_bytes and each.cap_mb == CAPS_MB[0]):
                    found.overflows[each.family] = Overflow(each, needs)
                continue
            try:
                cost = step(
                    model, **each.keywords, global_batch=batch, cluster=cluster, flash=flash, precision=products,
                    kept=precision, wire_bytes=EXCHANGES[each.exchange], overlap=each.pipeline == 1,
                )  # fmt: skip
            except UsageError as error:
                reason = str(error).partition(" (got")[0]
                found.impossible[reason] = found.impossible.get(reason, 0) + 1
                continue
            parts = {name: value * (1 if name in _TRANSFERS else slowdown) for name, value in cost.parts.items()}
            found.fitting.append(Candidate(each, cluster, sum(parts.values()), parts, needs, cost.widened))
    found.fitting.sort(key=lambda one: one.step_s / one.arrangement.batch)
    return found


def product_type(cluster: Cluster, precision: str) -> str:
    """Return the number type of a cluster's matrix products: under autocast the device's best one of 16 bits, else of 32."""
    flops = cluster.device.flops if cluster.device is not None else {}
    wanted = ("bf16", "fp16") if precision == "autocast" else ("tf32", "fp32")
    return next((each for each in wanted if each in flops), wanted[-1])


def pareto(candidates: Sequence[Candidate], prices: Sequence[float]) -> list[Candidate]:
    """Return those of which no other one is as good in seconds a sample, memory and price, and better in one of them.

    What is slower and saves less than ``ALIKE`` of memory and of price is left out too.

    Args:
        candidates: any, in any order.
        prices: the price of a sample under each; all 0 where there are no prices.

    Returns:
        The fastest first. Of those that are equal in all three, the first.
    """
    rows = sorted(
        zip(candidates, prices, strict=True),
        key=lambda row: (row[0].step_s / row[0].arrangement.batch, row[0].memory_bytes, row[1]),
    )
    front: list[tuple[Candidate, float]] = []
    saved = 1 - ALIKE
    for one, price in rows:  # whatever beats it in time stands before it
        if not any(saved * other.memory_bytes <= one.memory_bytes and saved * paid <= price for other, paid in front):
            front.append((one, price))
    return [one for one, _ in front]
