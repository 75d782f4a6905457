"""The strategies of other systems give the bits of those that they share engine and exchange with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import guozhuang as gz
from tests.ranks import run_ranks


def trained(rank: int, num_ranks: int, strategy: str) -> list[float]:
    gz.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    prepared, optimizer = gz.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), strategy=strategy)
    data = torch.Generator().manual_seed(rank)
    for _ in range(5):
        loss = F.mse_loss(prepared(torch.randn(6, 4, generator=data)), torch.zeros(6, 3))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    gz.shutdown()
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


@pytest.mark.parametrize(
    "pair", [("horovod", "byteps"), ("ddp", "bagua-gradient-allreduce"), ("quantize8", "bagua-bytegrad")]
)
def test_the_bits_of_the_other(pair: tuple[str, str]) -> None:
    found = [run_ranks(trained, 3, strategy, init=False) for strategy in pair]
    first = found[0][0]
    assert all(each == first for ranks in found for each in ranks)
