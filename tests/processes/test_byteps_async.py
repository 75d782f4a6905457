"""BYTEPS_ENABLE_ASYNC=1: ranks add their steps to weights that servers hold, which begin with those of rank 0."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import guozhuang.compat.byteps.torch as bps
from tests.ranks import run_ranks


def one_step_each(rank: int, num_ranks: int) -> list[float]:
    bps.init()
    p = nn.Parameter(torch.ones(1))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), named_parameters=[("p", p)])
    with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
        pass
    bps.broadcast_parameters({"p": p.data}, root_rank=0)
    found = []
    for gradient in (1.0, 0.0):
        optimizer.zero_grad()
        (p * gradient).sum().backward()
        optimizer.synchronize()  # there is nothing to wait for
        optimizer.step()
        bps.push_pull(torch.ones(1), name="met")  # until all have stepped
        found.append(p.item())
    bps.shutdown()
    return found


def ahead(rank: int, num_ranks: int) -> float:
    """The first rank makes its steps while the other waits: none but the first step meets anybody."""
    bps.init()
    p = nn.Parameter(torch.full((3,), float(5 + rank)))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    optimizer.step()
    assert p[0].item() <= 5.0, "the weights of rank 0 are the first, and it may be ahead"
    for _ in range(50 if rank == 0 else 0):
        p.grad = torch.full((3,), 0.5)
        optimizer.step()
    bps.push_pull(torch.ones(1), name="met")
    p.grad = torch.full((3,), float(rank))
    optimizer.step()
    bps.push_pull(torch.ones(1), name="met")
    p.grad = None
    optimizer.step()
    found = p[0].item()
    bps.shutdown()
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_store_begins_with_the_weights(backend: str) -> None:
    env = {"BYTEPS_ENABLE_ASYNC": "1", "GUOZHUANG_BACKEND": backend}
    found = run_ranks(one_step_each, 2, init=False, env=env)
    assert all(first == pytest.approx(0.9) or first == pytest.approx(0.8) for first, _ in found)
    assert [last for _, last in found] == [pytest.approx(0.8)] * 2


def test_nobody_waits() -> None:
    assert run_ranks(ahead, 2, init=False, env={"BYTEPS_ENABLE_ASYNC": "1"}) == [pytest.approx(5 - 25 - 1)] * 2


def alone(rank: int, num_ranks: int) -> None:
    bps.init()
    p = nn.Parameter(torch.ones(1))
    with pytest.raises(AssertionError, match="DMLC_NUM_WORKER > 1"):
        bps.DistributedOptimizer(torch.optim.SGD([p], lr=0.1))
    bps.shutdown()


def test_one_rank_cannot_be_asynchronous() -> None:
    run_ranks(alone, 1, init=False, env={"BYTEPS_ENABLE_ASYNC": "1"})
