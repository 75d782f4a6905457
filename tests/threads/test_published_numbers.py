"""Small numbers that follow from the formulas of Bagua and BytePS, worked out by hand, among ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import guozhuang.compat.bagua.torch_api as bagua
from guozhuang.compat.bagua.torch_api.algorithms import Algorithm
from guozhuang.exchange.codecs.base import Codec
from guozhuang.exchange.codecs.onebit import OneBit
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.codecs.topk import TopK
from guozhuang.exchange.decentralized import partner

from .ranks import run_threads


@pytest.mark.parametrize(
    ("codec", "given", "wanted"),
    [
        (MinMax8(), [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]),
        (MinMax8(), [-1.0, 0.5, 2.0], [-1.0, 0.4941176, 2.0]),
        (MinMax8(), [5.0, 5.0], [5.0, 5.0]),
        (MinMax8(), [0.0, 0.0], [0.0, 0.0]),
        (OneBit(), [1.0, -2.0, 3.0, -4.0], [2.5, -2.5, 2.5, -2.5]),
        (OneBit(scaling=False), [1.0, -2.0, 3.0, -4.0], [1.0, -1.0, 1.0, -1.0]),
        (TopK(1), [1.0, -3.0, 2.0, 0.5], [0.0, -3.0, 0.0, 0.0]),
    ],
    ids=str,
)
def test_codes(codec: Codec, given: list[float], wanted: list[float]) -> None:
    rows = torch.tensor([given])
    for _ in range(2):  # a decoded row is coded without further loss
        codes = torch.zeros(1, codec.row_bytes(len(given)), dtype=torch.uint8)
        codec.encode(rows, codes, torch.Generator())
        codec.decode(codes, rows := torch.full_like(rows, torch.nan))
        torch.testing.assert_close(rows[0], torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_feedback_sends_later_what_was_left_out() -> None:
    codec, lost, sent = TopK(1), torch.zeros(1, 4), []
    for _ in range(3):
        codes, rows = torch.zeros(1, codec.row_bytes(4), dtype=torch.uint8), torch.tensor([[1.0, 0.6, 0.0, 0.0]])
        codec.encode_with_feedback(rows, codes, torch.Generator(), lost)
        codec.decode(codes, rows)
        sent.append(rows[0].tolist())
    assert sent == [pytest.approx(each) for each in ([1, 0, 0, 0], [0, 1.2, 0, 0], [2, 0, 0, 0])]


def test_partners_of_four_ranks() -> None:
    found = [[partner(turn, rank, 4) for rank in range(4)] for turn in range(3)]
    assert found == [[2, 3, 0, 1], [3, 2, 1, 0], [2, 3, 0, 1]]


def _wrapped(size: int, name: str, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """Return a model of a row of zeros that an algorithm trains, with an optimizer that subtracts gradients."""
    bagua.init_process_group()
    model = nn.Linear(size, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.with_bagua([optimizer], Algorithm.init(name, hierarchical=False, **options))  # type: ignore[operator]
    return model, optimizer


def _push(model: nn.Linear, optimizer: torch.optim.Optimizer, step: list[float]) -> Tensor:
    """Move the weights of this rank by ``step``, and return them."""
    optimizer.zero_grad()
    model(-torch.tensor(step)).backward()
    optimizer.step()
    return model.weight.detach()[0].clone()


def _bytegrad(rank: int, size: int) -> list[float]:
    model, optimizer = _wrapped(4, "bytegrad")
    return _push(model, optimizer, [[1.0, 2.0, 3.0, 4.0], [3.0, 0.0, -1.0, 8.0]][rank]).tolist()


def test_bytegrad() -> None:
    assert run_threads(_bytegrad, 2) == [pytest.approx([2.0, 1.0, 0.99999994, 5.9999995], abs=1e-7)] * 2


def _ring(rank: int, size: int) -> list[list[float]]:
    model, optimizer = _wrapped(2, "low_precision_decentralized")
    first = _push(model, optimizer, [[0.0, 3.0], [3.0, 0.0], [6.0, 3.0]][rank])
    return [first.tolist(), _push(model, optimizer, [0.0, 0.0]).tolist()]


def test_a_ring_of_three() -> None:
    wanted = [
        ([0.0, 3.0], [2.9960785, 1.9960784]),
        ([3.0, 0.0], [3.0, 2.0]),
        ([6.0, 3.0], [3.0039215, 1.9960784]),
    ]
    for found, expected in zip(run_threads(_ring, 3), wanted, strict=True):
        for weights, numbers in zip(found, expected, strict=True):
            assert weights == pytest.approx(numbers, abs=1e-6)


def _averages(rank: int, size: int, mode: str) -> Tensor:
    model, optimizer = _wrapped(3, "decentralized", peer_selection_mode=mode)
    data = torch.Generator().manual_seed(rank)
    for _ in range(5):
        _push(model, optimizer, torch.randn(3, generator=data).tolist())
    average: Tensor = model.bagua_buckets[0]._peer_weight  # type: ignore[index,union-attr]
    return average.clone()


@pytest.mark.parametrize(("mode", "others"), [("all", [1, 2, 3, 0]), ("shift_one", [2, 3, 0, 1])])
def test_the_last_averages_are_equal(mode: str, others: list[int]) -> None:
    """On all ranks, or on both of the pairs of the last exchange, which is the fifth."""
    found = run_threads(_averages, 4, mode)
    assert all(torch.equal(found[rank], found[other]) for rank, other in enumerate(others))
    assert mode == "all" or not torch.equal(found[0], found[1])


def _plain_mean(rank: int, size: int) -> list[Tensor]:
    """Ten steps of two models that one algorithm object serves, and by hand with the gradients of all ranks."""
    bagua.init_process_group()
    algorithm, data = Algorithm.init("gradient_allreduce"), torch.Generator().manual_seed(7)
    x, y = torch.randn(10, size, 4, 2, generator=data), torch.randn(10, size, 4, 1, generator=data)
    found = []
    for kind in ("ours", "ours", "by hand"):
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, 0.5 if kind == "by hand" else 0.5 + rank)
        nn.init.constant_(model.bias, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if kind == "ours":
            model.with_bagua([optimizer], algorithm)  # type: ignore[operator]
        for step in range(10):
            optimizer.zero_grad()
            shares = range(size) if kind == "by hand" else [rank]
            losses = [nn.functional.mse_loss(model(x[step, each]).tanh(), y[step, each]) for each in shares]
            torch.stack(losses).mean().backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return found


def test_gradients_are_the_plain_mean() -> None:
    found = run_threads(_plain_mean, 2)
    for one, other, by_hand in found:
        assert torch.equal(one, found[0][0]) and torch.equal(other, one)
        torch.testing.assert_close(one, by_hand)
