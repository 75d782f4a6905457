"""Transformers by their shape: formulas of the literature, and descriptions that are read or refused."""

from __future__ import annotations

import pytest

from guozhuang.cost.transformer import SHAPES, Transformer
from guozhuang.errors import UsageError


@pytest.mark.parametrize("name", ["bert-large", "gpt2-xl", "gpt3-175b", "megatron-1t"])
def test_parameters_and_operations_follow_the_published_formulas(name: str) -> None:
    model = Transformer.parse(name)
    layers, h, s, vocabulary, batch = model.layers, model.hidden, model.sequence, model.vocabulary, 24
    parameters = 12 * layers * h * h * (1 + 13 / (12 * h) + (vocabulary + s) / (12 * layers * h))
    assert model.parameters == pytest.approx(parameters, rel=1e-12)
    once = 72 * batch * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    again = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    assert model.flops(batch) == pytest.approx(once, rel=1e-12)
    assert model.flops(batch, "full") == pytest.approx(again, rel=1e-12)
    assert once < model.flops(batch, "selective") < again


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "seconds", "published"),
    [
        ("megatron-22b", 8, 4, 1.10, 41.5),
        ("gpt3-175b", 64, 64, 13.75, 51.4),
        ("megatron-530b", 280, 280, 37.83, 56.0),
        ("megatron-1t", 512, 512, 71.49, 56.3),
    ],
)
def test_utilization_of_four_published_trainings(
    name: str, gpus: int, batch: int, seconds: float, published: float
) -> None:
    assert 100 * Transformer.parse(name).mfu(batch / seconds, gpus, 312e12) == pytest.approx(published, abs=0.2)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("bert-large", 0.334),
        ("llama2-7b", 6.738),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.554),
        ("llama3-405b", 405.853),
    ],
)
def test_parameters_of_known_models(name: str, billions: float) -> None:
    assert Transformer.parse(name).parameters / 1e9 == pytest.approx(billions, abs=6e-4)


def test_descriptions() -> None:
    assert Transformer.parse("L24, h1024,a16,s512,V30522") == Transformer.parse("bert-large")
    assert Transformer.parse("GPT3-175b,s4096").sequence == 4096
    llama = Transformer.parse("L32,h4096,a32,s8192,V128256,f14336,k8,gated,untied")
    assert llama == Transformer.parse("llama3-8b")
    for name in SHAPES:
        assert Transformer.parse(name).layers == SHAPES[name]["layers"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("bert-huge", "bert-huge"),
        ("L24,h1024,a16,s512", "V (vocabulary)"),
        ("gpt2,s-5", "s-5"),
        ("L24,h1000,a16,s512,V10", "'heads': 16"),
        ("L0,h64,a2,s8,V10", "layers"),
    ],
)
def test_refused_descriptions(text: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        Transformer.parse(text)
    assert told in str(refused.value)
