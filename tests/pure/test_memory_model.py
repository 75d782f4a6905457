"""Memory by formulas, against the figures of Korthikanti and others (2022), figure 1: activations of a rank, in GiB."""

from __future__ import annotations

import pytest

from guozhuang.cost.memory import GIB, PRECISIONS, activations, corrected, fit, peak, states
from guozhuang.cost.prediction.profile import BatchTime, Crowding, GradientTime, Profile
from guozhuang.cost.trace import Start, Trace
from guozhuang.cost.transformer import Transformer
from guozhuang.errors import UsageError

# name, pipeline, interleave, micro-batch, none, sequence parallel and selective
PUBLISHED = [
    ("megatron-22b", 1, 1, 4, 59.25, 9.5625),
    ("gpt3-175b", 8, 3, 1, 66.84375, 12.3515625),
    ("megatron-530b", 35, 3, 1, 114.0234375, 23.076171875),
    ("megatron-1t", 64, 1, 1, 131.25, 26.5625),
]


@pytest.mark.parametrize(("name", "pipeline", "interleave", "samples", "plain", "reduced"), PUBLISHED)
def test_activations_are_those_published(
    name: str, pipeline: int, interleave: int, samples: int, plain: float, reduced: float
) -> None:
    model = Transformer.parse(name)
    how = {"pipeline": pipeline, "interleave": interleave, "tensor": 8}
    assert activations(model, samples, **how) / GIB == plain  # type: ignore[arg-type]
    few = activations(model, samples, sequence_parallel=True, recompute="selective", **how)  # type: ignore[arg-type]
    assert few / GIB == reduced


@pytest.mark.parametrize(
    ("sharding", "mixed", "fp32"),
    [(0, 16, 16), (1, 4 + 12 / 8, 8 + 8 / 8), (2, 2 + 14 / 8, 4 + 12 / 8), (3, 16 / 8, 16 / 8)],
)
def test_states_by_stage(sharding: int, mixed: float, fp32: float) -> None:
    assert sum(states(1.0, data=8, sharding=sharding)) == mixed
    assert sum(states(1.0, data=8, sharding=sharding, precision="fp32")) == fp32


def test_the_peak_is_that_of_the_fullest_stage() -> None:
    model = Transformer.parse("gpt3-175b")
    one = peak(Transformer.parse("bert-large"), micro_batch=1)
    assert one.total == sum(one.parts.values()) and one.logits == 8 * 512 * 30522 and one.buffers == 0
    first = peak(model, micro_batch=1, num_micro_batches=64, tensor=8, pipeline=8, recompute="none")
    assert first.activations == activations(model, 1, tensor=8, pipeline=8) and first.logits == 0
    last = peak(model, micro_batch=1, num_micro_batches=64, tensor=8, pipeline=8, recompute="full")
    assert peak(model, micro_batch=1, num_micro_batches=2, tensor=8, pipeline=8).activations == first.activations / 4
    assert last.total < first.total
    # Less is kept by each step of sharding and of recomputing; the whole of a gathered layer remains.
    by_stage = [peak(model, micro_batch=1, data=64, sharding=stage).total for stage in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    by_recompute = [peak(model, micro_batch=4, recompute=each).activations for each in ("none", "selective", "full")]
    assert by_recompute == sorted(by_recompute, reverse=True)
    flash = peak(model, micro_batch=4, flash=True).activations
    assert flash == by_recompute[1]
    assert peak(model, micro_batch=1, precision="fp32").activations > 1.8 * peak(model, micro_batch=1).activations


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="stage of sharding"):
        states(1.0, sharding=4)
    with pytest.raises(UsageError, match="no such precision"):
        states(1.0, precision="int4")
    with pytest.raises(UsageError, match="no such optimizer"):
        states(1.0, optimizer="lion")
    with pytest.raises(UsageError, match="GPipe"):
        activations(Transformer.parse("bert-large"), 1, pipeline=4, schedule="gpipe")
    with pytest.raises(UsageError, match="no such precision"):
        peak(Transformer.parse("bert-large"), micro_batch=1, precision="bf16")


# Bytes that one layer keeps under each precision, by sbh and by a pair of tokens and head: counted by saved_tensors_hooks on
# a layer of torch (norms and softmax in 32 bits under CUDA's autocast; masks of 1 byte).
@pytest.mark.parametrize(
    ("precision", "of_tokens", "of_scores", "again"),
    [("mixed", 34, 5, 2), ("autocast", 38, 7, 4), ("fp32", 66, 9, 4)],
)
def test_a_layer_keeps_what_torch_saves(precision: str, of_tokens: int, of_scores: int, again: int) -> None:
    model = Transformer(1, 1024, 16, 512, 30522)
    tokens = 4 * 512 * 1024
    how = {"precision": precision}
    assert activations(model, 4, flash=True, **how) == of_tokens * tokens  # type: ignore[arg-type]
    assert activations(model, 4, **how) == (of_tokens + of_scores * 16 * 512 / 1024) * tokens  # type: ignore[arg-type]
    assert activations(model, 4, recompute="full", **how) == again * tokens  # type: ignore[arg-type]


def test_autocast_keeps_weights_in_32_bits_and_copies_in_16() -> None:
    model = Transformer.parse("gpt3-175b")
    one, fp32 = (peak(model, micro_batch=1, precision=each) for each in ("autocast", "fp32"))
    assert (one.weights, one.gradients, one.optimizer) == tuple(each * model.parameters for each in (6, 4, 8))
    assert one.weights - fp32.weights == 2 * model.parameters and one.optimizer == fp32.optimizer
    divided = peak(model, micro_batch=1, precision="autocast", data=64, sharding=3)
    assert divided.weights > 2 * model.parameters, "copies are whole until their backward"
    again = peak(model, micro_batch=1, precision="autocast", data=64, sharding=3, recompute="full")
    assert again.weights < 0.2 * divided.weights, "no cache: those of one layer"
    assert PRECISIONS["autocast"].logit == 14


def test_words_that_are_not_tied_are_counted_where_they_are() -> None:
    for name in ("bert-large", "llama2-7b"):
        model = Transformer.parse(name)
        words = model.vocabulary * model.hidden
        assert model.stage_parameters(1) == [model.parameters]
        first, *middle, last = model.stage_parameters(4)
        assert set(middle) == {model.layers / 4 * model.layer_parameters}
        assert last - middle[0] == words
        assert first - middle[0] == model.embedding_parameters - (0 if model.tied else words)
        assert sum(model.stage_parameters(4)) == model.parameters + (words if model.tied else 0)
        one = peak(model, micro_batch=1, pipeline=4, num_micro_batches=1, precision="fp32")
        assert one.gradients == 4 * last, "the last stage has the logits"


def test_a_measured_peak_corrects_the_formula() -> None:
    model = Transformer.parse("bert-large")
    alone, other = peak(model, micro_batch=8), peak(model, micro_batch=2, data=8, sharding=1)
    assert corrected(other, alone, alone.total).total == pytest.approx(other.total)
    varies = alone.activations + alone.logits
    more = corrected(other, alone, alone.total + varies / 2)
    assert more.activations == pytest.approx(1.5 * other.activations) and more.optimizer == other.optimizer
    assert more.logits == pytest.approx(1.5 * other.logits)
    for wrong in (alone.total - varies, 20 * alone.total):
        with pytest.raises(UsageError, match="not one of this training"):
            corrected(other, alone, wrong)


def test_other_optimizers_and_gradients_in_32_bits() -> None:
    assert sum(states(1.0, precision="fp32", optimizer="sgd")) == 8
    assert sum(states(1.0, precision="fp32", optimizer="momentum")) == 12
    assert sum(states(1.0, precision="mixed-fp32")) == 18
    assert states(1.0, data=4, sharding=2, precision="mixed-fp32") == (2, 1, 3)


def test_gpipe_keeps_every_micro_batch() -> None:
    model = Transformer.parse("gpt3-175b")
    one = activations(model, 1, tensor=8)
    assert activations(model, 1, tensor=8, pipeline=8, num_micro_batches=32, schedule="gpipe") == pytest.approx(4 * one)
    assert activations(model, 1, tensor=8, pipeline=8, num_micro_batches=32) == one
    how = {"micro_batch": 1, "num_micro_batches": 32, "tensor": 8, "pipeline": 8}
    assert peak(model, schedule="gpipe", **how).total > peak(model, **how).total  # type: ignore[arg-type]
    assert peak(model, optimizer="sgd", **how).total < peak(model, **how).total  # type: ignore[arg-type]


def test_nothing_is_recommended_that_may_run_out() -> None:
    limit = 80 * GIB
    roomy, tight, full = fit(60 * GIB, limit), fit(71 * GIB, limit), fit(79 * GIB, limit)
    assert [each.fits for each in (roomy, tight, full)] == [True, False, False]
    assert [each.cannot for each in (roomy, tight, full)] == [False, False, True]
    assert not fit(71 * GIB, limit, error=0.2).cannot


# Peaks in MB on one machine, BERT of three sizes, synthetic data, 64 tokens, fused AdamW: bytes of parameters and of the
# largest, samples, one process, and the mean of two real ranks that reduce buckets over gloo.
MEASURED = {
    "tiny": (17.5, 15.6, 8, 453.4, 499.7),
    "mini": (44.7, 31.3, 8, 596.3, 633.4),
    "small": (115.1, 62.5, 4, 873.2, 962.1),
}


@pytest.mark.parametrize("model", list(MEASURED))
def test_the_peak_of_a_rank_as_measured(model: str) -> None:
    gradients, largest, batch, alone, real = MEASURED[model]
    parts = {"forward": 1.0}
    times = tuple(BatchTime(samples, parts, int((alone + samples - batch) * 1e6), 9) for samples in (batch, 2 * batch))
    sizes = (
        GradientTime("words", int(largest * 1e6), 1.0),
        GradientTime("rest", int((gradients - largest) * 1e6), 1.0),
    )
    profile = Profile("text", {}, "cpu", 1, 2, batch, times, sizes, crowding=(Crowding(1, 1, parts, ((1.0,),)),))
    start = Start(0, "all_reduce", 1, (0, 1))
    made = profile.rank_memory_bytes(Trace(0, 2, (start,)), batch)
    assert made == pytest.approx(real * 1e6, rel=0.05), "buckets that follow from the gradients"
    recorded = profile.rank_memory_bytes(Trace(0, 2, (start,), peak_bytes=500_000_000), 2 * batch)
    assert recorded == pytest.approx(500e6 + batch * 1e6), "and a sample adds what it adds in one process"
    assert profile.rank_memory_bytes(Trace(0, 2, ()), batch) == pytest.approx(alone * 1e6)
