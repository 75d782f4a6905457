"""Measuring all_reduce as a training script would call it: in the world of ``gz.init``, on the device of the rank."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from guozhuang import world
from guozhuang.world.devices import SHARED_MEMORY

#: A small tensor tells the cost of a call, a bucket of DDP's size the bandwidth.
SMALL_BYTES, LARGE_BYTES = 4 << 10, 25 << 20
_MOST_REPEATS, _BUDGET_S = 50, 0.4


@dataclass(frozen=True)
class Timing:
    """What this rank measured; the fields as in ``Reduction``."""

    backend: str
    is_default: bool
    device_type: str
    num_bytes: int
    median_s: float
    num_repeats: int


def measure(limit_s: float, sizes: Sequence[int]) -> Iterator[Timing]:
    """Enter the world, measure, leave it; one timing after the other as they come. Every rank must call.

    Args:
        limit_s: of the meeting, and of each collective, in seconds.
        sizes: of the tensors, in bytes.

    Raises:
        UsageError, WorldError, RuntimeError: the world cannot be entered, or a rank was lost.
    """
    here = world.init(timeout_s=limit_s)
    try:
        backend = str(dist.get_backend())
        for num_bytes in sizes:
            yield _timing(backend, True, here.device, num_bytes, None)
        if backend == SHARED_MEMORY and here.num_nodes == 1 and here.size > 1:
            gloo = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=limit_s))
            for num_bytes in sizes:
                yield _timing("gloo", False, here.device, num_bytes, gloo)
            dist.destroy_process_group(gloo)
    finally:
        world.shutdown()


def _timing(
    backend: str, is_default: bool, device: torch.device, num_bytes: int, group: dist.ProcessGroup | None
) -> Timing:
    tensor = torch.zeros(num_bytes // 4, device=device)

    def once() -> float:
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(2):  # connections and memory are made by the first
        once()
    # How often, all ranks must agree on: by the slowest of them.
    slowest = torch.tensor([once()], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    num_repeats = max(3, min(_MOST_REPEATS, int(_BUDGET_S / max(slowest.item(), 1e-6))))
    return Timing(
        backend, is_default, device.type, num_bytes, statistics.median(once() for _ in range(num_repeats)), num_repeats
    )
