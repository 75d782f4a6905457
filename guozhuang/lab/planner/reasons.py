"""Says why a layout lost, and what would have to change for a model that fits nowhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from guozhuang import units
from guozhuang.cost import memory
from guozhuang.cost.cluster import Cluster
from guozhuang.cost.transformer import Transformer
from guozhuang.lab.planner.search import (
    ALIKE,
    CAPS_MB,
    FAMILIES,
    Arrangement,
    Candidate,
    Overflow,
    SearchResult,
    arrangements,
    memory_of,
)

PLUS_MINUS = "\u00b1"
_NOT_BY_RUN, INEXACT = "not by `guozhuang run`", "inexact"
# What the parts of a step are, for people; the names are those of cost.step.StepCost.
_PARTS = {
    "compute": "computing the layers",
    "host": "launching kernels one by one",
    "tensor": "the all-reduces of tensor ways",
    "bubble": "the pipeline's idle time",
    "stages": "sending between stages",
    "data": "exchanging gradients and weights between copies",
    "logits": "the logits",
    "optimizer": "the optimizer",
}


def described(arrangement: Arrangement) -> str:
    """Return the ways of an arrangement, and the stage of its sharding, as in "pp=2,dp=8,tp=2 ZeRO-1"."""
    ways = {"pp": arrangement.pipeline, "dp": arrangement.data, "tp": arrangement.tensor}
    text = ",".join(f"{axis}={size}" for axis, size in ways.items() if size > 1) or "one rank"
    return f"{text} ZeRO-{arrangement.sharding}" if arrangement.sharding else text


def settings(arrangement: Arrangement) -> str:
    """Return how a copy cuts its batch, and what is recomputed, as in "8 of 4, cap 1 MiB, 3 stages a rank, recompute full"."""
    text = f"{arrangement.num_micro_batches} of {arrangement.micro_batch}"
    if arrangement.exchange != "all-reduce":
        text += f", {arrangement.exchange}"
    if arrangement.cap_mb != CAPS_MB[0]:
        text += f", cap {arrangement.cap_mb:g} MiB"
    if arrangement.interleave > 1:
        text += f", {arrangement.interleave} stages a rank"
    return text if arrangement.recompute == "none" else f"{text}, recompute {arrangement.recompute}"


def obstacle(arrangement: Arrangement) -> str:
    """Return what keeps a plan from an arrangement: no run can start it, or it is inexact; empty if nothing does."""
    if arrangement.exchange != "all-reduce":
        return f"{INEXACT}: gradients travel as --strategy {arrangement.exchange}; try it on your own loss curve"
    if arrangement.sharding > 1 and arrangement.tensor * arrangement.pipeline > 1:
        return "PyTorch's fully_shard, which shards gradients and weights here, goes with no other axis"
    return ""


def mark(arrangement: Arrangement) -> str:
    """Return in a word or two what keeps a plan from an arrangement; empty if nothing does."""
    text = obstacle(arrangement)
    return "" if not text else INEXACT if text.startswith(INEXACT) else _NOT_BY_RUN


def slower(loser: Candidate, winner: Candidate) -> str:
    """Return by how much one candidate is slower than another, and which parts of the step make it so."""
    scale = winner.arrangement.batch / loser.arrangement.batch  # of one batch
    excess = {
        name: loser.parts.get(name, 0.0) * scale - winner.parts.get(name, 0.0)
        for name in dict.fromkeys((*loser.parts, *winner.parts))
    }
    ratio = loser.step_s * scale / winner.step_s
    reasons = sorted((one for one in excess.items() if one[1] > 0.1 * max(excess.values())), key=lambda one: -one[1])[
        :2
    ]
    if ratio < 1 + ALIKE or not reasons:
        return "as fast, and more to set up" if ratio > 1 - ALIKE else "faster"
    texts = [f"{_PARTS.get(name, name)}: {units.duration(more)} more" for name, more in reasons]
    text = f"{units.times(ratio)} the time: " + ", ".join(texts)
    if reasons[0][0] == "compute" and loser.arrangement.recompute != winner.arrangement.recompute:
        text += f" (recomputation: {loser.arrangement.recompute})"
    return text


def overflowing(found: SearchResult, missed: Overflow) -> str:
    """Return by how much an arrangement misses the memory, and what fills it most."""
    name, most = max(missed.memory.items(), key=lambda one: one[1])
    fit = found.fit(missed.memory_bytes)
    short = units.size(fit.high_bytes - found.limit_bytes)
    return (
        f"{'runs' if fit.cannot else 'may run'} out of memory by {short}: it needs {units.size(missed.memory_bytes)} "
        f"{PLUS_MINUS} {found.error:.0%} at least ({described(missed.arrangement)}; micro-batches "
        f"{settings(missed.arrangement)}), {name} {units.size(most)} of it"
    )


def why_not(found: SearchResult, winner: Candidate, model: Transformer, batch: int) -> dict[str, str]:
    """Return for each kind of layout that lost why its best one did, by the kind."""
    best: dict[str, Candidate] = {}
    for one in sorted(
        found.fitting, key=lambda each: bool(mark(each.arrangement))
    ):  # what can be started before the rest
        best.setdefault(one.arrangement.family, one)
    reasons = {}
    for family in FAMILIES:
        if family == winner.arrangement.family:
            continue
        if family in best:
            loser = best[family]
            reasons[family] = (
                f"{slower(loser, winner)} ({described(loser.arrangement)}; micro-batches {settings(loser.arrangement)})"
            )
            if text := mark(loser.arrangement):
                reasons[family] += f", and {text}"
        elif family in found.overflows:
            missed = found.overflows[family]
            reasons[family] = overflowing(found, missed)
        else:
            reasons[family] = _cannot_be(family, winner.arrangement.num_ranks, model, batch)
    return {family: text for family, text in reasons.items() if text}


def _cannot_be(family: str, num_ranks: int, model: Transformer, batch: int) -> str:
    if num_ranks == 1:
        return ""
    if family in FAMILIES[4:]:
        numbers = f"{model.heads} heads, {model.layers} layers or the batch of {batch}"
        return f"cannot be: no such ways of {num_ranks} ranks divide {numbers}, or tensor ways would leave their node"
    return f"cannot be: {num_ranks} copies do not divide a batch of {batch}"


def smallest_change(
    model: Transformer,
    cluster: Cluster,
    batch: int,
    memory_bytes: float,
    precision: str,
    flash: bool,
    measured: tuple[float, float] | None = None,
) -> tuple[Arrangement | None, str]:
    """Return the arrangement that misses the memory by least, and the smallest changes that would let it fit, in words."""

    def least(where: Cluster, of: int) -> tuple[float, Arrangement] | None:
        needs = (
            (sum(memory_of(model, each, precision, flash, measured).values()), each)
            for each in arrangements(model, where, of)
            if (each.cap_mb, each.exchange) == (CAPS_MB[0], "all-reduce")
        )
        return min(needs, default=None, key=lambda one: one[0])

    error = memory.ERROR if measured is None else memory.MEASURED_ERROR
    nearest = least(cluster, batch)
    changes = []
    if nearest is None:
        factors = f"the {model.heads} heads, the {model.layers} layers or the batch of {batch}"
        return None, f"give a number of ranks (now {cluster.num_ranks}) whose factors divide {factors}"
    for factor in (2, 4, 8, 16, 32, 64, 128):
        more = dataclasses.replace(cluster, num_nodes=cluster.num_nodes * factor)
        of = batch * factor if batch % more.num_ranks else batch
        found = least(more, of)
        if found is not None and SearchResult(memory_bytes, error).fit(found[0]).fits:
            changes.append(f"take {more.num_nodes} nodes ({described(found[1])})")
            break
    changes.append(f"take ranks with {units.size(nearest[0] * (1 + error) / memory.USABLE)} of memory")
    return nearest[1], ", or ".join(changes)


def table_of(front: Sequence[Candidate]) -> list[dict[str, object]]:
    """Return candidates as plain records, for JSON."""
    return [
        {
            **one.arrangement._asdict(),
            "step_s": one.step_s,
            "samples_per_s": one.samples_per_s,
            "memory_bytes": one.memory_bytes,
            "memory": one.memory,
            "parts": one.parts,
            "widened": one.widened,
        }
        for one in front
    ]
