"""Weight exchanges without ranks: fragments, partners, settings that are refused, and what they say of traffic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.errors import UsageError
from guozhuang.exchange import AllReduce
from guozhuang.exchange.adasum import Adasum
from guozhuang.exchange.async_average import AsyncModelAverage
from guozhuang.exchange.average import Average
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.decentralized import Decentralized, partner
from guozhuang.exchange.diloco import DiLoCo
from guozhuang.exchange.every import Every
from guozhuang.exchange.fragments import cut
from guozhuang.exchange.hierarchical import Hierarchical
from guozhuang.exchange.local_sgd import LocalSGD
from guozhuang.exchange.low_precision_decentralized import LowPrecisionDecentralized
from guozhuang.exchange.warmup import Warmup, WeightWarmup
from guozhuang.exchange.weight_hierarchical import InsideNodes, WeightHierarchical
from tests.drawing import examples

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@examples(50)
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


@pytest.mark.parametrize("size", range(1, 10))
def test_partners_are_each_others_and_all_meet(size: int) -> None:
    met: dict[int, list[int | None]] = {rank: [] for rank in range(size)}
    for turn in range(2 * size):
        for rank in range(size):
            if size == 1:
                continue
            other = partner(turn, rank, size)
            met[rank].append(other)
            assert other != rank and (other is None or partner(turn, other, size) == rank)
            if size % 2 == 0:  # as Bagua states it
                half = (size + 1) // 2
                theirs = ((turn + rank) % half) + half if rank < size / 2 else (rank - size // 2 - turn) % (size // 2)
                assert other == theirs
    for rank, others in met.items():
        if size % 2:
            assert all(others.count(other) == 2 for other in range(size) if other != rank) or size == 1
            assert others.count(None) == (2 if size > 1 else 0)
        else:
            assert set(others) == (set(range(size // 2, size)) if rank < size // 2 else set(range(size // 2)))


ONCE = WeightHierarchical(AllReduce(), LocalSGD(2))
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Decentralized("ring"), "got"),  # type: ignore[arg-type]
    (lambda: Decentralized(every=0), "got"),
    (lambda: LowPrecisionDecentralized(every=0), "got"),
    (lambda: AsyncModelAverage(interval_ms=-1.0), "got"),
    (lambda: AsyncModelAverage(interval_ms=math.inf), "got"),
    (lambda: AsyncModelAverage(start_step=-1), "got"),
    (lambda: DiLoCo(0), "at least 1"),
    (lambda: DiLoCo(4, num_fragments=5), "num_fragments"),
    (lambda: DiLoCo(4, num_fragments=0), "num_fragments"),
    (lambda: DiLoCo(4, overlap_steps=4), "overlap_steps"),
    (lambda: DiLoCo(4, overlap_steps=-1), "overlap_steps"),
    (lambda: DiLoCo(4, outer_lr=0.0), "outer_lr"),
    (lambda: DiLoCo(4, outer_lr=math.nan), "outer_lr"),
    (lambda: DiLoCo(4, outer_momentum=1.0), "outer_momentum"),
    (lambda: DiLoCo(4, mixing=1.0), "mixing"),
    (lambda: DiLoCo(4, error_feedback=True), "give a codec"),
    (lambda: DiLoCo(4, codec="8 bits"), "codec is a Codec"),  # type: ignore[arg-type]
    (lambda: DiLoCo(4, agree_by="vote"), "'outer' or 'mean'"),  # type: ignore[arg-type]
    (lambda: Every(4, AllReduce()), "no_sync"),  # type: ignore[arg-type]
    (lambda: Every(4, LocalSGD(3)), "option `every`"),
    (lambda: Every(0, Average()), "at least 1"),
    (lambda: Warmup(4, AllReduce(), LocalSGD(3)), "WeightWarmup"),  # type: ignore[arg-type]
    (lambda: Warmup(4, AllReduce(), Adasum()), "gives a mean and the other one does not"),
    (lambda: Warmup(4, Adasum(), AllReduce()), "gives a mean and the other one does not"),
    (lambda: WeightWarmup(4, AllReduce(), AllReduce()), "Warmup"),  # type: ignore[arg-type]
    (lambda: WeightWarmup(-1, AllReduce(), LocalSGD(3)), "at least 0"),
    (lambda: LocalSGD(0), "at least 1"),
    (lambda: LocalSGD(1, start_step=-1), "at least 0"),
    (lambda: WeightHierarchical(Compressed(MinMax8()), LocalSGD(2)), "plainly inside a node"),
    (lambda: WeightHierarchical(AllReduce(), AllReduce()), r"Hierarchical\(inner, outer\) is for two exchanges"),  # type: ignore[arg-type]
    (lambda: Hierarchical(AllReduce(), LocalSGD(2)), "WeightHierarchical"),  # type: ignore[arg-type]
    (lambda: WeightHierarchical(AllReduce(), AsyncModelAverage()), "overlap_steps"),
    (lambda: WeightHierarchical(AllReduce(), WeightWarmup(3, AllReduce(), AsyncModelAverage())), "overlap_steps"),
    (lambda: WeightHierarchical(AllReduce(), ONCE), "two levels"),
    (lambda: WeightHierarchical(AllReduce(), WeightWarmup(3, AllReduce(), ONCE)), "two levels"),
    (lambda: Every(3, ONCE), "put Every inside"),
    (lambda: Every(3, WeightWarmup(3, AllReduce(), ONCE)), "put Every inside"),
    (lambda: Hierarchical(Compressed(MinMax8()), AllReduce()), "plainly inside a node"),
    (lambda: Hierarchical(AllReduce(), MinMax8()), "exchange of gradients"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make()


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
    assert ours("abcd", LocalSGD(2)).traffic(100, 4, 4) == LocalSGD(2).traffic(100, 4, 4)
    assert ours("aabb", LocalSGD(2)).traffic(100, 4, 4) is None
    assert ONCE.traffic(100, 4, 4) is None
    assert AsyncModelAverage().traffic(100, 4, 1) == 0.0 and AsyncModelAverage().traffic(100, 4, 2) is None
    assert InsideNodes(AllReduce(), LocalSGD(2), "aabb").traffic(100, 4, 4) == AllReduce().traffic(100, 4, 2)
    assert InsideNodes(AllReduce(), LocalSGD(2), "abcd").traffic(100, 4, 4) == 0
    assert InsideNodes(AllReduce(), LocalSGD(2), "aaab").traffic(100, 4, 4) is None


def ours(layout: str, exchange: LocalSGD) -> WeightHierarchical:
    return WeightHierarchical(AllReduce(), exchange, tuple(layout))
