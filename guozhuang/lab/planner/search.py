"""Enumerates the layouts of a transformer on a cluster, with the time, memory and money of each. Nothing is guessed away.

[Note: what is enumerated] Every division of the ranks into tensor, pipeline and data ways, every micro-batch that divides what
a copy of the model gets of the batch, every number of stages a rank, what is recomputed, what is sharded over the copies.
Only what cannot be is left out: tensor ways that do not divide the heads or would leave a node, stages that do not divide the
layers, copies that do not divide the batch. Memory is computed for each, time for those that fit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from guozhuang.cost import memory
from guozhuang.cost.cluster import Cluster
from guozhuang.cost.step import step
from guozhuang.cost.transformer import RECOMPUTE, Transformer
from guozhuang.errors import UsageError

#: The share of the memory that a plan may fill: fragments of the allocator and workspaces need the rest.
USABLE = 0.9
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
        limit_bytes: what a rank's state may fill: ``USABLE`` of its memory.
        num_points: how many arrangements were looked at.
        fitting: those that fit, the fastest first.
        overflows: for each family the arrangement that misses the memory by least.
        impossible: arrangements that the cost model refuses, by its words.
    """

    limit_bytes: float
    num_points: int = 0
    fitting: list[Candidate] = field(default_factory=list)
    overflows: dict[str, Overflow] = field(default_factory=dict)
    impossible: dict[str, int] = field(default_factory=dict)


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
                            yield Arrangement(
                                ranks, tensor, pipeline, data, sharding, interleave, batch, micro_batch, recompute
                            )


def memory_of(
    model: Transformer, arrangement: Arrangement, precision: str = "mixed", flash: bool = False
) -> dict[str, float]:
    """Return the bytes of the fullest rank, by what they are for."""
    found = memory.peak(
        model,
        tensor=arrangement.tensor,
        pipeline=arrangement.pipeline,
        data=arrangement.data,
        sharding=arrangement.sharding,
        interleave=arrangement.interleave,
        micro_batch=arrangement.micro_batch,
        num_micro_batches=arrangement.num_micro_batches,
        recompute=arrangement.recompute,
        precision=precision,
        flash=flash,
    )
    return found.parts


def search(
    model: Transformer,
    cluster: Cluster,
    batches: Sequence[int],
    memory_bytes: float,
    precision: str = "mixed",
    flash: bool = False,
    slowdown: float = 1.0,
) -> SearchResult:
    """Return the time and memory of every arrangement on all ranks of a cluster.

    Args:
        model: what is trained.
        cluster: where; every rank of it is used.
        batches: samples of a step, on all ranks together; each is tried.
        memory_bytes: memory of a rank, of which ``USABLE`` may be filled.
        precision: "mixed" (16 bits with a copy of the weights in 32) or "fp32".
        flash: whether attention keeps no scores.
        slowdown: how many times as long as the cost model says a device computes; communication is not changed by it.
    """
    found = SearchResult(memory_bytes * USABLE)
    products = product_type(cluster, precision)
    for batch in batches:
        for each in arrangements(model, cluster, batch):
            found.num_points += 1
            needs = memory_of(model, each, precision, flash)
            total = sum(needs.values())
            if total > found.limit_bytes:
                least = found.overflows.get(each.family)
                if least is None or total < least.memory_bytes:
                    found.overflows[each.family] = Overflow(each, needs)
                continue
            try:
                cost = step(
                    model,
                    tensor=each.tensor,
                    pipeline=each.pipeline,
                    data=each.data,
                    interleave=each.interleave,
                    micro_batch=each.micro_batch,
                    global_batch=batch,
                    recompute=each.recompute,
                    sharding=each.sharding,
                    cluster=cluster,
                    flash=flash,
                    precision=products,
                    overlap=each.pipeline == 1,
                )
            except UsageError as error:
                reason = str(error).partition(" (got")[0]
                found.impossible[reason] = found.impossible.get(reason, 0) + 1
                continue
            parts = {name: value * (1 if name in _TRANSFERS else slowdown) for name, value in cost.parts.items()}
            found.fitting.append(Candidate(each, cluster, sum(parts.values()), parts, needs, cost.widened))
    found.fitting.sort(key=lambda one: one.step_s / one.arrangement.batch)
    return found


def product_type(cluster: Cluster, precision: str) -> str:
    """Return the number type of a cluster's matrix products: the device's best one of 16 bits, or of 32."""
    flops = cluster.device.flops if cluster.device is not None else {}
    wanted = ("bf16", "fp16") if precision == "mixed" else ("tf32", "fp32")
    return next((each for each in wanted if each in flops), wanted[-1])


def pareto(candidates: Sequence[Candidate], prices: Sequence[float]) -> list[Candidate]:
    """Return those of which no other one is as good in seconds a sample, memory and price, and better in one of them.

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
    for one, price in rows:  # whatever beats it in time stands before it
        if not any(other.memory_bytes <= one.memory_bytes and paid <= price for other, paid in front):
            front.append((one, price))
    return [one for one, _ in front]
