"""How parameters are cut into fragments, and which settings are refused; no process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guozhuang.errors import UsageError
from guozhuang.exchange import AllReduce
from guozhuang.exchange.average import Average
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.diloco import DiLoCo
from guozhuang.exchange.every import Every
from guozhuang.exchange.fragments import cut
from guozhuang.exchange.local_sgd import LocalSGD
from guozhuang.exchange.warmup import Warmup, WeightWarmup

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(SHAPES, st.integers(1, 6))
def test_fragments_hold_every_number_once(shapes: list[tuple[int, ...]], num_fragments: int) -> None:
    named = [(f"p{i}", torch.zeros(shape)) for i, shape in enumerate(shapes)]
    fragments = cut(named, num_fragments)
    assert len(fragments) == num_fragments
    names = [piece.name for pieces in fragments for piece in pieces]
    assert len(set(names)) == len(names)
    for pieces in fragments:
        for piece in pieces:
            piece.weights.add_(1)
            piece.of(dict(named)[piece.parameter]).add_(10)
    assert all(bool((tensor == 11).all()) for _, tensor in named)


def test_fragments_are_equal_in_bytes_and_hold_layers_in_turn() -> None:
    layers = [(f"layer{i}", torch.zeros(64, 64)) for i in range(6)]
    assert [[p.name for p in pieces] for pieces in cut(layers, 3)] == [
        ["layer0", "layer3"],
        ["layer1", "layer4"],
        ["layer2", "layer5"],
    ]
    bert = [("embedding", torch.zeros(30000, 8)), *((f"w{i}", torch.zeros(32, 128)) for i in range(24))]
    for num_fragments in (2, 3, 5):
        loads = [sum(p.weights.nbytes for p in pieces) for pieces in cut(bert, num_fragments)]
        assert max(loads) <= 1.1 * sum(loads) / num_fragments


def test_a_parameter_is_cut_where_it_has_rows_whatever_its_strides() -> None:
    one_row = torch.arange(40.0).view(1, 40)
    assert [p.name for pieces in cut([("w", one_row)], 2) for p in pieces] == ["w[dim 1, 0:20]", "w[dim 1, 20:40]"]
    turned = torch.arange(40.0).view(4, 10).t()
    [[first], [second]] = cut([("w", turned)], 2)
    assert torch.equal(torch.cat([first.weights, second.weights]), turned)
    assert [len(pieces) for pieces in cut([("number", torch.zeros(()))], 3)] == [1, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"every": 0},
        {"every": 4, "num_fragments": 5},
        {"every": 4, "num_fragments": 0},
        {"every": 4, "overlap_steps": 4},
        {"every": 4, "overlap_steps": -1},
        {"every": 4, "outer_lr": 0.0},
        {"every": 4, "outer_lr": math.nan},
        {"every": 4, "outer_momentum": 1.0},
        {"every": 4, "mixing": 1.0},
        {"every": 4, "error_feedback": True},
        {"every": 4, "codec": "8 bits"},
        {"every": 4, "agree_by": "vote"},
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        DiLoCo(**options)


def test_what_cannot_be_composed_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="no_sync"):
        Every(4, AllReduce())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="option `every`"):
        Every(4, LocalSGD(3))
    with pytest.raises(UsageError, match="at least 1"):
        Every(0, Average())
    with pytest.raises(UsageError, match="WeightWarmup"):
        Warmup(4, AllReduce(), LocalSGD(3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Warmup"):
        WeightWarmup(4, AllReduce(), AllReduce())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 0"):
        WeightWarmup(-1, AllReduce(), LocalSGD(3))
    with pytest.raises(UsageError, match="at least 1"):
        LocalSGD(0)
    with pytest.raises(UsageError, match="at least 0"):
        LocalSGD(1, start_step=-1)


def test_which_steps_average_gradients() -> None:
    def steps(exchange: Any) -> list[int]:
        return [step for step in range(12) if exchange.averages_gradients(step)]

    assert steps(LocalSGD(4)) == steps(DiLoCo(4)) == steps(Every(4, Average())) == []
    assert steps(LocalSGD(4, start_step=3)) == [0, 1, 2]
    assert steps(WeightWarmup(2, AllReduce(), DiLoCo(4))) == [0, 1]
    assert steps(WeightWarmup(2, AllReduce(), LocalSGD(4, start_step=3))) == [0, 1, 2, 3, 4]
    assert steps(Every(4, WeightWarmup(2, AllReduce(), Average()))) == list(range(8))


def test_what_is_said_of_traffic() -> None:
    assert Average().traffic(100, 4, 4) == 600
    assert Average().traffic(100, 2, 4) == 600  # narrower weights travel as float32
    assert Average().traffic(100, 4, 1) == 0
    assert LocalSGD(10).traffic(100, 4, 4) == Every(10, Average()).traffic(100, 4, 4) == 60
    assert DiLoCo(10).traffic(100, 4, 4) == DiLoCo(10, num_fragments=2).traffic(100, 4, 4) == 60
    coded = DiLoCo(10, num_fragments=2, codec=MinMax8()).traffic(1000, 4, 4)
    assert coded == 2 * Compressed(MinMax8()).traffic(500, 4, 4) / 10
    assert WeightWarmup(5, AllReduce(), LocalSGD(10)).traffic(100, 4, 4) == 60
