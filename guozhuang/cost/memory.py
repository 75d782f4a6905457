"""The memory of a rank of a transformer's training, by formulas: model states, activations, logits, buffers.

[Note: what is counted] Sources: Rajbhandari and others, ZeRO, 2020, for states; Korthikanti and others, Reducing Activation
Recomputation in Large Transformer Models, 2022, for activations, whose figures these formulas give to the last digit. b samples
of s tokens, h hidden, a heads, t tensor ways. Activations of anything but a transformer have to be measured: two sizes of batch
give what is fixed and what a sample adds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from guozhuang.cost.transformer import Transformer
from guozhuang.errors import UsageError, explain

GIB = 2.0**30


@dataclass(frozen=True)
class NumberBytes:
    """What is kept in how many bytes, for Adam.

    Attributes:
        weights: of a parameter.
        gradients: of a parameter's gradient, in memory and on the wire.
        optimizer: of a parameter's optimizer state, and of a copy of the weights in 32 bits where there is one.
        casts: of a parameter's copy that autocast makes in forward and keeps for backward, whole also under sharded weights;
            where whole layers are computed again, and autocast has no cache, of one layer at a time.
        residual: of a number that goes from layer to layer, and into a norm.
        operand: of a number that goes into a matrix product.
        score: of one of attention's, for one pair of tokens, with its mask of 1 byte.
        logit: of one, with what the loss and its backward make of it.
    """

    weights: float
    gradients: float
    optimizer: float
    casts: float = 0.0
    residual: float = 2.0
    operand: float = 2.0
    score: float = 5.0
    logit: float = 8.0


#: How a training may keep its numbers. "autocast" is what a script does under torch.autocast: weights and gradients of 32 bits,
#: products in 16, norms and softmax in 32. "mixed" has weights of 16 bits and an optimizer with a copy in 32, as Megatron-LM
#: and DeepSpeed do; "mixed-fp32" adds up gradients in 32 bits beside it.
PRECISIONS = {
    "autocast": NumberBytes(4.0, 4.0, 8.0, casts=2.0, residual=4.0, score=7.0, logit=14.0),
    "fp32": NumberBytes(4.0, 4.0, 8.0, residual=4.0, operand=4.0, score=9.0, logit=16.0),
    "mixed": NumberBytes(2.0, 2.0, 12.0),
    "mixed-fp32": NumberBytes(2.0, 4.0, 12.0),
}
#: Bytes of a parameter that the state of an optimizer takes, without a copy of the weights.
OPTIMIZERS = {"adam": 8.0, "momentum": 4.0, "sgd": 0.0}
#: The share of a memory that may be used: fragments of the allocator, and workspaces, need the rest.
USABLE = 0.9
#: By which share a peak may be more than predicted: by formula, and where it follows from a measured one.
ERROR, MEASURED_ERROR = 0.05, 0.02
#: What the process of a device holds before any tensor is there: its context and the buffers of collectives.
CONTEXT_BYTES = 1.0 * GIB
#: A measured peak whose activations are more than so many times the formula's is of something else.
MOST_CORRECTED = 8.0
#: The cap of a bucket of gradients; while it travels there is a second one.
BUCKET_BYTES = 25.0 * 2**20


@dataclass(frozen=True)
class MemoryUse:
    """The bytes of the fullest rank.

    Attributes:
        weights: the rank's weights, those gathered for a while, and copies in 16 bits under autocast.
        gradients: the rank's gradients.
        optimizer: the optimizer's state and its copy of the weights.
        activations: what forward keeps for backward.
        logits: the outputs over the vocabulary, the loss's copies of them and their gradients.
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


def precision_of(name: str) -> NumberBytes:
    """Return the precision of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in PRECISIONS:
        raise UsageError(explain("no such precision", value=name, fix=f"choose {' or '.join(PRECISIONS)}"))
    return PRECISIONS[name]


def states(
    parameters: float, *, data: int = 1, sharding: int = 0, precision: str = "mixed", optimizer: str = "adam"
) -> tuple[float, float, float]:
    """Return the bytes of a rank's weights, gradients, and optimizer state.

    Args:
        parameters: that the rank holds before anything is sharded.
        data: copies of the model, among which they are sharded.
        sharding: 0 nothing, 1 the optimizer's state, 2 and gradients, 3 and weights.
        precision: one of ``PRECISIONS``.
        optimizer: one of ``OPTIMIZERS``.

    Raises:
        UsageError: there is no such stage, precision or optimizer.
    """
    bytes_of = precision_of(precision)
    if sharding not in range(4):
        raise UsageError(explain("a stage of sharding is 0, 1, 2 or 3", value=sharding))
    if optimizer not in OPTIMIZERS:
        raise UsageError(explain("no such optimizer", value=optimizer, fix=f"choose {', '.join(OPTIMIZERS)}"))
    kept = bytes_of.optimizer + OPTIMIZERS[optimizer] - OPTIMIZERS["adam"]
    return (
        bytes_of.weights * parameters / (data if sharding == 3 else 1),
        bytes_of.gradients * parameters / (data if sharding >= 2 else 1),
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
        precision: one of ``PRECISIONS``; masks are 1 byte in any.
    """
    bytes_of, tokens_hidden = precision_of(precision), samples * model.sequence * model.hidden
    # A gate: its input, its output and the product are kept too.
    inner = model.inner / (4 * model.hidden) * (2 if model.gated else 1)
    if recompute == "full":
        return bytes_of.residual * tokens_hidden / (tensor if sequence_parallel else 1)
    outside = 2 * bytes_of.operand + 2 * bytes_of.residual + 2  # inputs of both parts and of both norms; two masks
    # Queries, keys, values, input of the projection; the feed-forward part.
    inside = (4 + 8 * inner) * bytes_of.operand
    scores = 0.0
    if recompute != "selective" and not flash:
        scores = bytes_of.score * model.heads * model.sequence / model.hidden
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
    held = float(model.layers)  # layers, once each
    if interleave > 1:
        held *= (num_stages + pipeline - 1) / num_stages
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
    bucket_bytes: float = BUCKET_BYTES,
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
        bucket_bytes: the cap of a bucket of gradients.
    """
    bytes_of = precision_of(precision)
    width = {"tensor": tensor, "sequence_parallel": sequence_parallel, "flash": flash, "precision": precision}
    of_layer = activations_of_layer(model, micro_batch, recompute=recompute, **width)  # type: ignore[arg-type]
    kept = activations(
        model, micro_batch, pipeline=pipeline, interleave=interleave, num_micro_batches=num_micro_batches, recompute=recompute,
        schedule=schedule, **width,  # type: ignore[arg-type]
    )  # fmt: skip
    if recompute == "full":  # while a layer is computed again it is there whole
        kept += activations_of_layer(model, micro_batch, **width) - of_layer  # type: ignore[arg-type]
    logits = bytes_of.logit * micro_batch * model.sequence * model.vocabulary / tensor
    of_stages = model.stage_parameters(pipeline)
    unit = max(model.layer_parameters, model.embedding_parameters if pipeline == 1 else 0) / tensor
    found = []
    for number in {0, pipeline - 1}:
        parameters = of_stages[number] / tensor
        weights, gradients, state = states(
            parameters, data=data, sharding=sharding, precision=precision, optimizer=optimizer
        )
        weights += bytes_of.casts * (min(unit, parameters) if recompute == "full" else parameters)
        if sharding == 3:  # one unit is computed with, the next one arrives
            weights += min(2 * unit, parameters) * bytes_of.weights
        if sharding == 2:  # weights stay whole from a block's forward to its backward, beside the rank's part
            weights += bytes_of.weights * parameters / data
        if sharding >= 2:  # a unit's gradients are whole until they are scattered
            gradients += min(unit, parameters) * bytes_of.gradients
        held = kept if number == 0 or schedule == "gpipe" else kept / max(1, min(pipeline, num_micro_batches))
        buffers = 2 * min(bucket_bytes, parameters * bytes_of.gradients) if data > 1 else 0.0
        found.append(MemoryUse(weights, gradients, state, held, logits if number == pipeline - 1 else 0.0, buffers))
    return max(found, key=lambda one: one.total)


def corrected(formula: MemoryUse, alone: MemoryUse, measured_bytes: float) -> MemoryUse:
    """Return what a measured peak makes of a formula's: what activations and logits were off by there, they are here.

    Args:
        formula: of a layout.
        alone: by the formula, of what was measured: one process without other ranks.
        measured_bytes: the peak of that process.

    Raises:
        UsageError: it is less than weights, gradients and the optimizer's state take, or many times what the formula says.
    """
    varies = alone.activations + alone.logits
    share = (measured_bytes - (alone.total - varies)) / varies
    if not 0 < share <= MOST_CORRECTED:
        what = f"the measured peak is not one of this training: the formula says {alone.total / GIB:.4g} GiB"
        fix = "measure a whole step with its optimizer, and say of how many samples"
        raise UsageError(explain(what, value=f"{measured_bytes / GIB:.4g} GiB", fix=fix))
    return replace(formula, activations=formula.activations * share, logits=formula.logits * share)


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


def fit(needed_bytes: float, limit_bytes: float, error: float = ERROR) -> MemoryFit:
    """Return whether a training fits into ``USABLE`` of a memory.

    Args:
        needed_bytes: what was predicted.
        limit_bytes: the memory of a rank.
        error: by which share the prediction may be wrong, either way.
    """
    return MemoryFit(needed_bytes * (1 - error), needed_bytes * (1 + error), limit_bytes * USABLE)
