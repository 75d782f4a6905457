"""How long a training step of a transformer takes on devices, for a layout of tensor, pipeline and data ways.

[Note: the model of a step]
A layer's time for one micro-batch is the larger of two. The host's: it launches kernels one by one, however small they are.
The device's: matrix products at a share of the device's peak, less for narrow matrices and few tokens; passes over
activations in its memory; the all-reduces of tensor ways, which nothing hides. Stages of a pipeline take turns: the slowest
stage (the last, which has the logits) works on every micro-batch, and the others add the time of one. After the last
micro-batch gradients are averaged over the data ways, within nodes and between them, where the groups of a node share its
network cards; then the optimizer passes over its states. All coefficients are fitted together to measured steps.

[Note: what data ways send]
Of S bytes of weights or gradients a gather or a scatter sends S·(n-1)/n, an all-reduce twice that. Stages 0 and 1 of sharding
send 2S a step: an all-reduce beside backward, or gradients scattered beside it and weights gathered after the optimizer. Under
stages 2 and 3 gradients have no room to wait whole: they are scattered after each of m micro-batches. Stage 2 gathers weights
as often, m·2S in all; stage 3 twice as often, for forward and backward, m·3S; the layers' work goes on beside both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guozhuang.cost.cluster import Cluster
from guozhuang.cost.collectives import MOST_EXTRAPOLATED, placed_cost
from guozhuang.cost.memory import BUCKET_BYTES, precision_of
from guozhuang.cost.transformer import RECOMPUTE, Transformer
from guozhuang.errors import UsageError, explain

_SHARPNESS = 12  # of the larger of two: 6 % above it where both are equal, as measured, because kernels differ in size
_OPTIMIZER_BYTES = {
    2: 40,
    4: 28,
}  # of a parameter that Adam reads and writes, by the width of weights; with 32-bit masters
_CAST_BYTES = 6  # of a parameter that autocast reads and writes in each forward


@dataclass(frozen=True)
class Coefficients:
    """What the model of a step has fitted; shares of a data sheet's number carry over to other devices and links.

    Attributes:
        matmul: share of the device's peak that large matrix products reach.
        narrow: width of a rank's part of ``hidden`` at which products take twice the time of wide ones.
        short: tokens of a micro-batch at which products take twice the time of long ones.
        memory: share of the memory's rate that passes over activations reach.
        scores: bytes moved for each score of attention, forward.
        inside: share of the link of a node that all-reduces reach.
        between: share of the network that all-reduces of tensor ways over several nodes reach.
        latencies: of the network, that such an all-reduce takes at least.
        host_s: host time of a layer's forward; a backward is two, as on the device.
        host_tensor: share that is added to it by tensor ways.
        micro_batch_s: host time of a micro-batch besides its layers.
        stage_s: host time of a micro-batch for sending and receiving between stages.
        logits: time of the logits and the loss, as a multiple of their products at the peak and 30 bytes a logit.
        stages: share of the time of sends between stages that is not hidden.
        data: share of links and network that the averaging of gradients reaches.
        gathers: share of links and network that gathers and scatters reach under stages 2 and 3 of sharding.
        sharded: share by which layers are slower whose weights are gathered. This one and the last are by published rates of
            ZeRO-3 and FSDP.
        optimizer: passes of the optimizer over its states, as a multiple of 40 bytes a parameter at the memory's rate.
        fixed_s: seconds of a step that depend on nothing.
        ranges: the smallest and the largest value of what the fit has seen, by name.
        device: the device that it was fitted on.
    """

    matmul: float = 0.85
    narrow: float = 64.0
    short: float = 400.0
    memory: float = 0.74
    scores: float = 10.0
    inside: float = 0.67
    between: float = 0.8
    latencies: float = 15.0
    host_s: float = 1.1e-3
    host_tensor: float = 0.1
    micro_batch_s: float = 3e-3
    stage_s: float = 0.5e-3
    logits: float = 1.3
    stages: float = 0.6
    data: float = 0.6
    gathers: float = 0.15
    sharded: float = 0.17
    optimizer: float = 1.0
    fixed_s: float = 10e-3
    ranges: tuple[tuple[str, float, float], ...] = ()
    device: str = ""


_FITTED = tuple(f.name for f in dataclasses.fields(Coefficients) if f.name not in ("ranges", "device"))


@dataclass(frozen=True)
class StepCost:
    """The predicted time of a step.

    Attributes:
        seconds: of the whole step.
        parts: its parts in seconds, which add up to it: ``"compute"`` (layers on the slowest stage), ``"host"`` (what launching
            adds to it), ``"tensor"``, ``"logits"``, ``"bubble"`` (waiting for other stages), ``"stages"`` (sends between them),
            ``"data"`` (gradients, and weights under sharding 3), ``"optimizer"``.
        widened: what lies outside of what the coefficients were fitted on; empty if nothing does.
    """

    seconds: float
    parts: dict[str, float]
    widened: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeasuredStep:
    """A step whose time was measured.

    Attributes:
        model: the transformer.
        cluster: the devices that it ran on.
        layout: the other arguments of :func:`step`: ``{"tensor": 2, "global_batch": 64, ...}``.
        seconds: the measured time.
    """

    model: Transformer
    cluster: Cluster
    layout: Mapping[str, Any]
    seconds: float


def _refuse(what: str, value: object, fix: str = "") -> UsageError:
    return UsageError(explain(what, value=value, fix=fix))


def _larger(one: float, other: float) -> float:
    """The larger of two times, a little more where they are near each other."""
    high, low = (one, other) if one > other else (other, one)
    return high * (1 + (low / high) ** _SHARPNESS) ** (1 / _SHARPNESS) if high else 0.0


class _Links:
    """The links of a cluster, as collectives of a step use them; remembers how far outside of measured ones these were."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.extrapolated = cluster, 1.0

    def all_reduce(
        self,
        num_bytes: float,
        ranks: int,
        near: int,
        inside: float,
        between: float,
        times: int = 1,
        latency_s: float = -1.0,
    ) -> float:
        """Seconds of so many all-reduces of so many bytes together; where they were measured, those.

        ``near`` of the ranks share a node, whose other ranks do the same at once. ``latency_s`` is of one; else a tree's.
        """
        cluster, nodes = self.cluster, ranks // near
        groups = cluster.ranks_per_node // near if nodes > 1 else 1
        if (cluster.between if nodes > 1 else cluster.inside).table:
            cost = placed_cost("all_reduce", num_bytes * groups / times, ranks, nodes, near, cluster)
            self.extrapolated = max(self.extrapolated, cost.extrapolated)
            return times * cost.seconds
        if latency_s < 0:
            latency_s = 2 * (math.log2(near) * cluster.inside.latency_s + math.log2(nodes) * cluster.between.latency_s)
        seconds = 2 * (near - 1) / near * num_bytes / (cluster.inside.bytes_per_s * inside) + times * latency_s
        if nodes > 1:
            seconds += 2 * (nodes - 1) / nodes * num_bytes * groups / (cluster.between.bytes_per_s * between)
        return seconds


def check_layout(
    model: Transformer, *, tensor: int, pipeline: int, data: int, interleave: int, micro_batch: int, global_batch: int,
    num_ranks: int,
) -> int:  # fmt: skip
    """Return the number of micro-batches of a step, or refuse a layout that cannot be.

    Raises:
        UsageError: a number is not positive, the ways do not multiply to the number of ranks, the batch is not a multiple, or
            layers or heads do not divide.
    """
    ways = {"tensor": tensor, "pipeline": pipeline, "data": data, "interleave": interleave}
    for name, value in (ways | {"micro_batch": micro_batch, "global_batch": global_batch}).items():
        if value < 1:
            raise _refuse(f"{name} is a positive number", value)
    if tensor * pipeline * data != num_ranks:
        fix = f"make tensor * pipeline * data equal to {num_ranks}"
        raise _refuse(f"The ways of the layout do not multiply to the number of devices, {num_ranks}", ways, fix)
    if global_batch % (data * micro_batch):
        sizes = {"global_batch": global_batch, "data": data, "micro_batch": micro_batch}
        raise _refuse("The batch is not a multiple of data * micro_batch", sizes)
    if model.heads % tensor:
        raise _refuse("Tensor ways do not divide the heads of attention", {"heads": model.heads, "tensor": tensor})
    if pipeline * interleave > model.layers:
        raise _refuse("There are more stages than layers", ways | {"layers": model.layers})
    micro_batches = global_batch // (data * micro_batch)
    if interleave > 1 and (pipeline == 1 or model.layers % (pipeline * interleave) or micro_batches % pipeline):
        sizes = ways | {"layers": model.layers, "micro_batches": micro_batches}
        fix = "interleave where pipeline divides the micro-batches, and pipeline * interleave the layers"
        raise _refuse("These stages cannot be interleaved", sizes, fix)
    return micro_batches


def step(
    model: Transformer,
    *,
    cluster: Cluster,
    global_batch: int,
    micro_batch: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    interleave: int = 1,
    recompute: str = "none",
    sharding: int = 0,
    sequence_parallel: bool = False,
    flash: bool = False,
    overlap: bool = False,
    precision: str = "bf16",
    kept: str = "",
    bucket_bytes: float = BUCKET_BYTES,
    wire_bytes: float | None = None,
    coefficients: Coefficients | None = None,
) -> StepCost:
    """Return the predicted time of a training step; [Note: the model of a step] says how.

    Ranks of a tensor group are neighbours, then those of a data group, then stages.

    Args:
        model: the transformer.
        cluster: the devices, with ``tensor * pipeline * data`` ranks.
        global_batch: samples of a step on all ranks.
        micro_batch: samples of one forward.
        tensor: ways that a layer's matrices are divided.
        pipeline: number of stages.
        data: ways that the batch is divided.
        interleave: virtual stages on each rank.
        recompute: what backward computes again: one of ``RECOMPUTE``.
        sharding: 0 to 3: nothing, optimizer states, also gradients, also weights are divided over the data ways.
        sequence_parallel: what tensor ways leave whole is divided among them by tokens.
        flash: attention keeps its scores out of memory.
        overlap: gradients are averaged in buckets beside the last micro-batch's backward, as far as that lasts; nothing hides
            the last bucket.
        precision: the type of products; ``device.flops`` names those that a device has.
        kept: in how many bytes numbers are kept, a name of ``memory.PRECISIONS``; by default "fp32" for products of "fp32" and
            "tf32", else "mixed".
        bucket_bytes: the cap of a bucket, where there is overlap.
        wire_bytes: of a gradient on the wire, where it is compressed; by default those of ``kept``.
        coefficients: those of :func:`fit`; by default those of A100.

    Raises:
        UsageError: the layout cannot be (:func:`check_layout`), or the cluster has no devices of that precision.
    """
    c = A100 if coefficients is None else coefficients
    micro_batches = check_layout(
        model, tensor=tensor, pipeline=pipeline, data=data, interleave=interleave, micro_batch=micro_batch,
        global_batch=global_batch, num_ranks=cluster.num_ranks,
    )  # fmt: skip
    if recompute not in RECOMPUTE or sharding not in (0, 1, 2, 3):
        raise _refuse("recompute is none, selective or full; sharding is 0 to 3", (recompute, sharding))
    device = cluster.device
    if device is None:
        fix = (
            "name a device in the cluster, as in 2x8xA100-80; for processors use guozhuang predict, which measures them"
        )
        raise _refuse("This model of a step is for accelerators, and the cluster has none", cluster.name, fix)
    if precision not in device.flops:
        raise _refuse(f"{device.name} has no peak for this precision", precision, f"use one of {sorted(device.flops)}")
    peak, rate = device.flops[precision], device.bytes_per_s * c.memory
    bytes_of = precision_of(kept or ("fp32" if precision in ("fp32", "tf32") else "mixed"))
    width, links = bytes_of.operand, _Links(cluster)
    per_node = min(cluster.ranks_per_node, cluster.num_ranks)
    tokens = micro_batch * model.sequence

    # One layer, one micro-batch: forward, backward of two forwards, and what is computed again.
    passes = 4.0 if recompute == "full" else 3.0
    products = model.layer_flops(micro_batch) / tensor / (peak * c.matmul)
    products *= 1 + c.narrow * tensor / model.hidden + c.short / tokens
    outside = (9 / tensor if sequence_parallel else 9) * bytes_of.residual
    activations = tokens * model.hidden * (outside + 5 / tensor * width) / rate
    scores = 0.0
    if not flash:
        scores = micro_batch * model.heads * model.sequence**2 / tensor * c.scores * (bytes_of.score - 1) / 4 / rate
    device_s = passes * (products + activations + scores) + (scores if recompute == "selective" else 0.0)
    if bytes_of.casts:
        device_s += (2 if recompute == "full" else 1) * _CAST_BYTES * model.layer_parameters / tensor / rate
    message = tokens * model.hidden * width
    tensor_s = 0.0
    if tensor > 1:
        near = min(tensor, per_node)
        if tensor % near:
            raise _refuse("Tensor ways over several nodes fill each of them", {"tensor": tensor, "per node": per_node})
        # Inside a node, four of its latencies.
        latency_s = c.latencies * cluster.between.latency_s if tensor > per_node else 4 * cluster.inside.latency_s
        tensor_s = links.all_reduce(message, tensor, near, c.inside, c.between, latency_s=latency_s)
        tensor_s *= 6 if recompute == "full" else 4
    host_s = c.host_s * passes * (1 + c.host_tensor if tensor > 1 else 1)
    layer = _larger(host_s, device_s + tensor_s)

    # Stages take turns. Each holds layers // pipeline layers, the first ones may hold one more; the last has the logits.
    logits_flops, logits_bytes = 3 * model.logits_flops(micro_batch), 15 * width * tokens * model.vocabulary
    logits = c.logits * (logits_flops / peak + logits_bytes / device.bytes_per_s) / tensor
    head = _larger(logits, c.micro_batch_s + (c.stage_s if pipeline > 1 else 0.0))
    most, last = -(-model.layers // pipeline), model.layers // pipeline
    busiest = most if most * layer > last * layer + head else last
    head_there = head if busiest == last else 0.0
    others = model.layers * layer + head - busiest * layer - head_there
    is_far = tensor * data >= per_node and cluster.num_nodes > 1
    hop = cluster.between if is_far else cluster.inside
    hop_s = message / tensor / (hop.bytes_per_s / (per_node if is_far else 1)) + hop.latency_s
    stages = 2 * c.stages * (micro_batches * interleave + pipeline - 1) * hop_s if pipeline > 1 else 0.0

    # Gradients, weights, optimizer: of the stage with most parameters. [Note: what data ways send]
    parameters = max(model.stage_parameters(pipeline)) + (most - model.layers / pipeline) * model.layer_parameters
    parameters /= tensor
    near = math.gcd(data, max(1, per_node // tensor))
    work = busiest * layer + head_there
    sent = parameters * (bytes_of.gradients if wire_bytes is None else wire_bytes)
    words = (
        model.vocabulary * model.hidden / tensor / parameters if pipeline == 1 else 0.0
    )  # the last gradient, in one piece
    if data == 1:
        exchange = 0.0
    elif sharding >= 2:  # in one of each layer and for the rest; an all-reduce sends what a gather and a scatter do
        turns = micro_batches * (1.0 if sharding == 2 else 1.5)
        moved = links.all_reduce(parameters * bytes_of.weights, data, near, c.data, c.gathers, most + 1)
        beside = micro_batches * most * layer
        exchange = max(turns * moved - beside, turns * moved * words, c.sharded * beside)
    else:
        times = math.ceil(sent / bucket_bytes) if overlap else 1
        exchange = links.all_reduce(sent, data, near, c.data, c.data, times)
        if overlap:
            # Stages of a pipeline idle about as long as a forward takes.
            hidden = work * ((passes - 1) / passes if pipeline == 1 else 1.0)
            moved = exchange / 2 if sharding else exchange
            exchange += max(moved * max(1 / times, words), moved - hidden) - moved
        if wire_bytes is not None:  # two passes there and back
            exchange += 2 * parameters * (bytes_of.gradients + wire_bytes) / rate
    stepped = parameters / (data if sharding else 1)
    optimizer = c.fixed_s + c.optimizer * stepped * _OPTIMIZER_BYTES[int(bytes_of.weights)] / device.bytes_per_s

    busy, hidden_host = micro_batches * busiest, layer - device_s - tensor_s
    parts = {
        "compute": busy * device_s,
        "host": busy * hidden_host,
        "tensor": busy * tensor_s,
        "logits": micro_batches * head_there,
        "bubble": others / interleave,
        "stages": stages,
        "data": exchange,
        "optimizer": optimizer,
    }
    seen = {
        "hidden": model.hidden, "sequence": model.sequence, "micro_batch": micro_batch, "devices": cluster.num_ranks,
        "tensor": tensor, "pipeline": pipeline,
    }  # fmt: skip
    widened = [
        f"{name} {seen[name]:g} was not measured (from {low:g} to {high:g})"
        for name, low, high in c.ranges
        if name in seen and not low <= seen[name] <= high
    ]
    if c.device and device.name.split("-")[0] != c.device.split("-")[0]:
        widened.append(f"measured on {c.device}, carried over to {device.name} by data sheets")
    if sharding >= 2 and data > 1:
        widened.append("sharded gradients and weights: two coefficients are set by hand between published rates")
    if links.extrapolated > MOST_EXTRAPOLATED:
        widened.append(
            f"all-reduces are {links.extrapolated:.1f} times outside of the sizes and ranks that were measured"
        )
    return StepCost(sum(parts.values()), parts, tuple(widened))


_SEEN = ("hidden", "sequence", "micro_batch", "devices", "tensor", "pipeline")
# Logarithms: the usual error of a prediction; how far a coefficient usually is from its default. What data sheets and
# benchmarks of single kernels have told well is held nearer.
_USUAL_ERROR, _USUAL_FACTOR = 0.04, {"matmul": 0.02, "memory": 0.2, "inside": 0.3}


def fit(measured: Sequence[MeasuredStep], device: str = "") -> Coefficients:
    """Return the coefficients with which :func:`step` comes nearest to measured times.

    Errors are relative. A row far off counts less, so that a run on a slow node does not move the rest. Each coefficient is
    drawn to its usual value (the default of ``Coefficients``): a factor of 1.8 from it weighs as much as an error of 4 % in
    one row. Rows that say nothing of a coefficient leave it there, and few rows make no wild ones.

    Args:
        measured: at least one row.
        device: the name of the device, for ``StepCost.widened``.

    Raises:
        UsageError: there is no row, or a layout cannot be.
    """
    import numpy as np
    from scipy.optimize import least_squares

    if not measured:
        raise _refuse("There is no measured step to fit", 0, "give measured rows")
    usual = np.array([getattr(Coefficients(), name) for name in _FITTED])
    spread = np.array([_USUAL_FACTOR.get(name, 0.6) for name in _FITTED])

    def with_factors(logs: Any) -> Coefficients:
        return Coefficients(**dict(zip(_FITTED, (usual * np.exp(logs)).tolist(), strict=True)))

    def errors(logs: Any) -> Any:
        c = with_factors(logs)
        times = [step(m.model, cluster=m.cluster, coefficients=c, **m.layout).seconds / m.seconds for m in measured]
        return np.concatenate([np.log(times) / _USUAL_ERROR, logs / spread])

    found = with_factors(least_squares(errors, np.zeros(len(_FITTED)), loss="soft_l1").x)
    columns: dict[str, list[float]] = {name: [] for name in _SEEN}
    for m in measured:
        sizes = {"hidden": m.model.hidden, "sequence": m.model.sequence, "devices": m.cluster.num_ranks, **m.layout}
        for name, column in columns.items():
            column.append(sizes.get(name, 1))
    ranges = tuple((name, min(column), max(column)) for name, column in columns.items())
    return dataclasses.replace(found, ranges=ranges, device=device)


#: Fitted to 80 measured steps on A100, of 1 to 64 nodes; ``python -m benchmarks.published --calibration FILE --fit`` prints it.
A100 = Coefficients(
    matmul=0.908, narrow=70.7, short=354.0, memory=0.681, scores=14.6, inside=0.953, between=0.863, latencies=13.4,
    host_s=0.982e-3, host_tensor=0.0902, micro_batch_s=2.65e-3, stage_s=0.483e-3, logits=3.34, stages=0.383, data=0.53,
    optimizer=1.41, fixed_s=5.42e-3, ranges=(("hidden", 1024, 12288), ("sequence", 1024, 2048), ("micro_batch", 1, 64),
    ("devices", 2, 512), ("tensor", 1, 16), ("pipeline", 1, 32),), device="A100-80",
)  # fmt: skip
