"""What a strategy that exchanges weights keeps in memory besides the weights: python -m benchmarks.weight_memory [STRATEGY ...]

Two ranks over gloo train a model of 64 MiB of float32 weights for four steps by plain SGD. Printed per strategy, for rank 0:
the bytes of gradient buckets, and how much the resident memory grew from before `prepare` to after the last step.
"""

from __future__ import annotations

import logging
import sys

import psutil
import torch
from torch import nn

import guozhuang as gz
from tests.ranks import run_ranks

_MIB = 1 << 20


def measure(rank: int, world_size: int, strategy: str) -> tuple[int, int]:
    """Return the bytes of buckets and the growth of resident memory in bytes."""
    logging.disable(logging.WARNING)
    gz.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, 1024)
    process = psutil.Process()
    before = process.memory_info().rss
    wrapped, optimizer = gz.prepare(model, optimizer, strategy)
    for _ in range(4):
        wrapped(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    reducer = getattr(wrapped, "reducer", None)
    buckets = 0 if reducer is None else sum(bucket.num_bytes for bucket in reducer.buckets)
    return buckets, process.memory_info().rss - before


def main() -> None:
    """Print a line per strategy."""
    for strategy in sys.argv[1:] or ("local-sgd", "diloco", "decentralized", "async-model-average", "ddp"):
        buckets, grown = run_ranks(measure, 2, strategy, init=False)[0]
        print(f"{strategy:22} buckets {buckets / _MIB:6.1f} MiB   resident memory +{grown / _MIB:6.1f} MiB")


if __name__ == "__main__":
    main()
