"""The memory of a rank of a transformer's training, by formulas: model states, activations, logits, buffers.

[Note: what is counted] Sources: Rajbhandari and others, ZeRO, 2020, for states; Korthikanti and others, Reducing Activation
Recomputation in Large Transformer Models, 2022, for activations, whose figures these formulas give to the last digit. b samples
of s tokens, h hidden, a heads, t tensor ways. Activations of anything but a transformer have to be measured: two sizes of batch
give what is fixed and what a sample adds.
"""

from __future__ import annotations

from dataclasses import dataclass

from guozhuang.cost.transformer import Transformer
from guozhuang.errors import UsageError, explain

GIB = 2.0**30
#: Bytes of a parameter by what they hold, for Adam: (weights, gradients, the optimizer's state and its copy of the weights). In
#: "mixed-fp32" gradients are added up in 32 bits.
STATES = {"mixed": (2.0, 2.0, 12.0), "mixed-fp32": (2.0, 4.0, 12.0), "fp32": (4.0, 4.0, 8.0)}
#: Bytes of a parameter that the state of an optimizer takes, without a copy of the weights.
OPTIMIZERS = {"adam": 8.0, "momentum": 4.0, "sgd": 0.0}
#: The share of a memory that may be used: fragments of the allocator, and workspaces, need the rest.
USABLE = 0.9
#: What the process of a device holds before any tensor is there: its context and the buffers of collectives.
CONTEXT_BYTES = 1.0 * GIB
#: The cap of a bucket of gradients; while it travels there is a second one.
BUCKET_BYTES = 25.0 * 2**20


@dataclass(frozen=True)
class MemoryUse:
    """The bytes of the fullest rank.

    Attributes:
        weights: the rank's weights, as they are computed with, and those gathered for a while.
        gradients: the rank's gradients.
        optimizer: the optimizer's state and its copy of the weights.
        activations: what forward keeps for backward.
        logits: the outputs over the vocabulary and their gradient, in 32 bits.
        buffers: buckets under way.
        context: what the process holds in any case.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    context: float = CONTEXT_BYTES

    @property
    def parts(self) -> dict[str, float]:
        """The bytes by what they are for."""
        return dict(vars(self))

    @property
    def total(self) -> float:
        """All bytes together."""
        return sum(self.parts.values())


def states(
    parameters: float, *, data: int = 1, sharding: int = 0, precision: str = "mixed", optimizer: str = "adam"
) -> tuple[float, float, float]:
    """Return the bytes of a rank's weights, gradients, and optimizer state.

    Args:
        parameters: that the rank holds before anything is sharded.
        data: copies of the model, among which they are sharded.
        sharding: 0 nothing, 1 the optimizer's state, 2 and gradients, 3 and weights.
        precision: "mixed" (16 bits with a copy of the weights in 32), "mixed-fp32" (and gradients in 32) or "fp32".
        optimizer: one of ``OPTIMIZERS``.

    Raises:
        UsageError: there is no such stage, precision or optimizer.
    """
    if precision not in STATES:
        raise UsageError(explain("no such precision", value=precision, fix=f"choose {' or '.join(STATES)}"))
    if sharding not in range(4):
        raise UsageError(explain("a stage of sharding is 0, 1, 2 or 3", value=sharding))
    if optimizer not in OPTIMIZERS:
        raise UsageError(explain("no such optimizer", value=optimizer, fix=f"choose {', '.join(OPTIMIZERS)}"))
    weights, gradients, kept = STATES[precision]
    kept += OPTIMIZERS[optimizer] - OPTIMIZERS["adam"]
    return (
        weights * parameters / (data if sharding == 3 else 1),
        gradients * parameters / (data if sharding >= 2 else 1),
        kept * parameters / (data if sharding >= 1 else 1),
    )


def activations_of_layer(
    model: Transformer,
    samples: float,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    flash: bool = False,
    precision: str = "mixed",
) -> float:
    """Return the bytes that one layer keeps of so many samples until their backward.

    Args:
        model: its hidden width, heads and tokens count; its feed-forward part may be of any width.
        samples: of a micro-batch.
        tensor: ways that divide each matrix.
        sequence_parallel: whether what lies between matrices is divided by tokens.
        recompute: "none", "selective" (the scores of attention) or "full" (all but a layer's input).
        flash: whether attention keeps no scores.
        precision: of activations; masks are 1 byte in either.
    """
    tokens_hidden = samples * model.sequence * model.hidden
    inner = (
        model.inner / (4 * model.hidden) * (2 if model.gated else 1)
    )  # a gate: its input, its output and the product are kept too
    wide = 2.0 if precision == "fp32" else 1.0
    if recompute == "full":
        return 2 * wide * tokens_hidden / (tensor if sequence_parallel else 1)
    outside = 8 * wide + 2  # inputs of both parts and of both norms; two masks
    inside = 8 * wide + 16 * inner * wide  # queries, keys, values, input of the projection; the feed-forward part
    scores = 0.0
    if recompute != "selective" and not flash:
        scores = (4 * wide + 1) * model.heads * model.sequence / model.hidden
    return tokens_hidden * (outside / (tensor if sequence_parallel else 1) + (inside + scores) / tensor)


def activations(
    model: Transformer,
    samples: float,
    *,
    pipeline: int = 1,
    interleave: int = 1,
    num_micro_batches: int | None = None,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    flash: bool = False,
    precision: str = "mixed",
    schedule: str = "1f1b",
) -> float:
    """Return the bytes that the first stage of a pipeline keeps, which is the fullest.

    Under the schedule 1F1B it holds as many micro-batches as there are stages, or all of them if they are fewer; with several
    stages a rank 1 + (p-1)/(p·v) times as much. Under GPipe it holds all micro-batches.

    Args:
        model: of which the stage has its layers.
        samples: of a micro-batch.
        pipeline: stages' ranks.
        interleave: stages of a rank.
        num_micro_batches: of a step; None: enough to fill the pipeline (which GPipe's memory needs to know).
        schedule: "1f1b" or "gpipe".
        tensor, sequence_parallel, recompute, flash, precision: as for :func:`activations_of_layer`.
    """
    of_layer = activations_of_layer(
        model,
        samples,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        flash=flash,
        precision=precision,
    )
    if schedule == "gpipe":
        if num_micro_batches is None:
            raise UsageError(explain("GPipe keeps all micro-batches", value=None, fix="say how many there are"))
        return of_layer * model.layers / pipeline * num_micro_batches
    num_stages = pipeline * interleave
    held = (
        model.layers * (num_stages + pipeline - 1) / num_stages if interleave > 1 else float(model.layers)
    )  # layers, once each
    if num_micro_batches is not None:
        held = min(held, num_micro_batches * model.layers / pipeline)
    return of_layer * held


def peak(
    model: Transformer,
    *,
    micro_batch: float,
    num_micro_batches: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    sharding: int = 0,
    interleave: int = 1,
    recompute: str = "none",
    sequence_parallel: bool = False,
    flash: bool = False,
    precision: str = "mixed",
    optimizer: str = "adam",
    schedule: str = "1f1b",
) -> MemoryUse:
    """Return the bytes of the fullest rank: the first stage keeps most micro-batches, the last one has the logits.

    Args:
        model: the transformer.
        micro_batch: samples that a copy of the model computes at a time.
        num_micro_batches: of a step.
        tensor, pipeline, data: ways.
        sharding: what is divided among the ``data`` copies, as for :func:`states`.
        interleave: stages of a rank.
        recompute, sequence_parallel, flash, precision: as for :func:`activations_of_layer`.
        optimizer: as for :func:`states`.
        schedule: as for :func:`activations`.
    """
    layers = model.layers / pipeline
    width = {"tensor": tensor, "sequence_parallel": sequence_parallel, "flash": flash, "precision": precision}
    of_layer = activations_of_layer(model, micro_batch, recompute=recompute, **width)  # type: ignore[arg-type]
    kept = activations(
        model, micro_batch, pipeline=pipeline, interleave=interleave, num_micro_batches=num_micro_batches, recompute=recompute,
        schedule=schedule, **width,  # type: ignore[arg-type]
    )  # fmt: skip
    if recompute == "full":  # while a layer is computed again it is there whole
        kept += activations_of_layer(model, micro_batch, **width) - of_layer  # type: ignore[arg-type]
    logits = 8.0 * micro_batch * model.sequence * model.vocabulary / tensor
    unit = max(model.layer_parameters, model.embedding_parameters if pipeline == 1 else 0) / tensor
    weight_bytes = STATES[precision][0] if precision in STATES else 0.0
    found = []
    for is_first, is_last in {(True, pipeline == 1), (pipeline == 1, True)}:
        parameters = (
            layers * model.layer_parameters + (model.embedding_parameters if is_first or is_last else 0)
        ) / tensor
        weights, gradients, state = states(
            parameters, data=data, sharding=sharding, precision=precision, optimizer=optimizer
        )
        if sharding == 3:
            weights += min(
                2 * unit * weight_bytes, parameters * weight_bytes
            )  # one is computed with, the next one arrives
            gradients += min(unit * weight_bytes, parameters * weight_bytes)
        held = kept if is_first or schedule == "gpipe" else kept / max(1, min(pipeline, num_micro_batches))
        found.append(
            MemoryUse(
                weights, gradients, state, held, logits if is_last else 0.0, 2 * BUCKET_BYTES if data > 1 else 0.0
            )
        )
    return max(found, key=lambda one: one.total)


@dataclass(frozen=True)
class MemoryFit:
    """Whether a training fits into a memory.

    Attributes:
        low_bytes: what it needs at least, as far as is known.
        high_bytes: what it needs at most.
        usable_bytes: what may be used of the memory.
    """

    low_bytes: float
    high_bytes: float
    usable_bytes: float

    @property
    def fits(self) -> bool:
        """Whether it fits even if it needs the most: only then is it recommended."""
        return self.high_bytes <= self.usable_bytes

    @property
    def cannot(self) -> bool:
        """Whether it does not fit even if it needs the least; where neither holds it has to be tried."""
        return self.low_bytes > self.usable_bytes


def fit(needed_bytes: float, limit_bytes: float, error: float = 0.05) -> MemoryFit:
    """Return whether a training fits into ``USABLE`` of a memory.

    Args:
        needed_bytes: what was predicted.
        limit_bytes: the memory of a rank.
        error: by which share the prediction may be wrong, either way.
    """
    return MemoryFit(needed_bytes * (1 - error), needed_bytes * (1 + error), limit_bytes * USABLE)
