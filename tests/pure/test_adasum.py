"""The factors of the adaptive sum, against the recursion on the vectors themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from guozhuang.exchange.adasum import Adasum, factors


def of_two(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    keeps_a = 1 - (a @ b / (2 * (a @ a)) if a @ a > 0 else 0)
    keeps_b = 1 - (a @ b / (2 * (b @ b)) if b @ b > 0 else 0)
    return keeps_a * a + keeps_b * b


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """By pairs of neighbours; who is left over goes up."""
    while len(vectors) > 1:
        vectors = [
            of_two(*vectors[i : i + 2]) if i + 1 < len(vectors) else vectors[i] for i in range(0, len(vectors), 2)
        ]
    return vectors[0]


def summed(vectors: Tensor) -> Tensor:
    vectors = vectors.double()
    return factors((vectors @ vectors.mT)[None])[0] @ vectors


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("size", [*range(1, 10), 16, 31])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_factors_are_the_recursion(size: int, scale: float) -> None:
    vectors = (random(size, 40) + 0.3) * scale
    wanted = torch.from_numpy(adasum([v.numpy() for v in vectors]))
    torch.testing.assert_close(summed(vectors), wanted, rtol=1e-9, atol=1e-9 * scale)


@pytest.mark.parametrize("size", range(1, 10))
def test_orthogonal_gradients_add(size: int) -> None:
    vectors = torch.linalg.qr(random(20, size)).Q.mT * torch.arange(1.0, size + 1).unsqueeze(1)
    torch.testing.assert_close(summed(vectors), vectors.sum(0))


@pytest.mark.parametrize("size", range(1, 10))
def test_equal_gradients_average(size: int) -> None:
    vectors = random(1, 20).expand(size, 20)
    torch.testing.assert_close(summed(vectors), vectors[0])


def test_two_parallel_gradients_average_whatever_their_lengths() -> None:
    [vector] = random(1, 20)
    torch.testing.assert_close(summed(torch.stack([vector, 5 * vector])), 3 * vector)


@pytest.mark.parametrize("size", range(2, 9))
def test_a_zero_gradient_changes_nothing(size: int) -> None:
    vectors = random(size, 20)
    vectors[1] = 0
    wanted = torch.from_numpy(adasum([v.numpy() for v in vectors]))
    torch.testing.assert_close(summed(vectors), wanted)
    assert torch.equal(summed(torch.zeros(size, 20)), torch.zeros(20, dtype=torch.float64))


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_gradients_that_cancel_out_leave_the_others(size: int) -> None:
    """Rounding errors of a sum that vanished must not become a direction."""
    vectors = random(size, 1000)
    vectors[1] = -vectors[0]
    above = [adasum([v.numpy() for v in vectors[i : i + 2]]) for i in range(2, size, 2)]
    wanted = torch.from_numpy(adasum([np.zeros(1000), *above]))
    found = factors((vectors @ vectors.mT)[None])[0]
    assert float(found.abs().max()) < 10
    torch.testing.assert_close(found @ vectors, wanted)


def test_nan_and_infinity_spoil_their_parameter_only() -> None:
    vectors = random(3, 4, 10).transpose(0, 1).contiguous()  # 4 ranks, 3 parameters
    vectors[2, 0, 5] = float("nan")
    vectors[1, 1, 5] = float("inf")
    by_parameter = vectors.transpose(0, 1)
    found = factors(by_parameter @ by_parameter.mT)
    assert found[:2].isnan().all() and found[2].isfinite().all()


def test_traffic_is_that_of_an_all_reduce_and_the_products() -> None:
    exchange = Adasum()
    assert exchange.traffic(1000, 4, 1) == 0
    assert exchange.traffic(1000, 4, 4) == 2 * 3 * 250 * 4 + 2 * 3 * 10 * 8 // 4
    assert exchange.gram_bytes(7, 4) == 7 * exchange.gram_bytes(1, 4)
