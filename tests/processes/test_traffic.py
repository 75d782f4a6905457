"""What an exchange says that it sends is what the kernel counts on the sockets."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from guozhuang import DistributedDataParallel
from tests.processes.cases import sent_in
from tests.ranks import run_ranks

STEPS = 4


def counted(rank: int, size: int) -> tuple[float, int]:
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.8)
    batch = torch.randn(2, 300)
    for _ in range(2):
        ddp(batch).sum().backward()
    sent = sent_in(lambda _: ddp(batch).sum().backward(), STEPS)
    assert ddp.reducer is not None
    num_elements = sum(p.numel() for p in model.parameters())
    return sent, ddp.reducer.exchange.traffic(num_elements, 4, size)


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel tells")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_reduce_sends_what_it_says(num_ranks: int) -> None:
    for sent, said in run_ranks(counted, num_ranks):
        assert said <= sent <= said * 1.02 + 4096  # headers of messages and the barrier
