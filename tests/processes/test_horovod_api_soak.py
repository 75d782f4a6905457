"""Many collectives of all kinds at once, for a while: each rank submits and waits in an order of its own, in threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import guozhuang.compat.horovod.torch as hvd
from tests.ranks import run_ranks

SECONDS = 4.0
NUM_JOBS = 30


@dataclass(frozen=True)
class Job:
    kind: str
    name: str
    rows: int
    root: int


@dataclass(frozen=True)
class Kind:
    """How one kind of job is submitted, and what its result must be; ``size`` and ``total`` are those of all ranks."""

    submit: Callable[[Job, Tensor, int, int], int]
    is_right: Callable[[Job, object, int, int], bool]


def _everywhere(result: Tensor, value: float) -> bool:
    return bool((result == value).all())


KINDS = {
    "sum": Kind(
        lambda job, tensor, rank, size: hvd.allreduce_async(tensor, name=job.name, op=hvd.Sum),
        lambda job, result, size, total: _everywhere(result, total),
    ),
    "mean": Kind(
        lambda job, tensor, rank, size: hvd.allreduce_async_(tensor, name=job.name),
        lambda job, result, size, total: torch.allclose(result, torch.full_like(result, total / size)),
    ),
    "gather": Kind(
        lambda job, tensor, rank, size: hvd.allgather_async(tensor[: rank + 1].contiguous(), name=job.name),
        lambda job, result, size, total: sorted(set(result[:, 0].tolist())) == list(range(1, size + 1)),
    ),
    "broadcast": Kind(
        lambda job, tensor, rank, size: hvd.broadcast_async_(tensor, job.root, name=job.name),
        lambda job, result, size, total: _everywhere(result, job.root + 1),
    ),
    "exchange": Kind(
        lambda job, tensor, rank, size: hvd.alltoall_async(tensor.repeat(size, 1), [job.rows] * size, name=job.name),
        lambda job, result, size, total: result[0][:: job.rows, 0].tolist() == list(range(1, size + 1)),
    ),
    "scatter": Kind(
        lambda job, tensor, rank, size: hvd.reducescatter_async(tensor.repeat(size, 1), name=job.name, op=hvd.Sum),
        lambda job, result, size, total: result.shape == (job.rows, 2) and _everywhere(result, total),
    ),
    "group": Kind(
        lambda job, tensor, rank, size: hvd.grouped_allreduce_async(
            [tensor, tensor.double() * 2], name=job.name, op=hvd.Sum
        ),
        lambda job, result, size, total: _everywhere(result[0], total) and _everywhere(result[1], 2 * total),
    ),
    "mismatch": Kind(
        lambda job, tensor, rank, size: hvd.allreduce_async(tensor if rank else tensor.repeat(2, 1), name=job.name),
        lambda job, result, size, total: isinstance(result, hvd.HorovodInternalError) and "Mismatched" in str(result),
    ),
}


def soak(rank: int, size: int) -> int:
    hvd.init(process_sets="dynamic")
    others = hvd.add_process_set(range(1, size))
    own, shared = random.Random(rank), random.Random(1234)
    total, num_rounds, end = size * (size + 1) // 2, 0, time.monotonic() + SECONDS
    while hvd.broadcast(torch.tensor([time.monotonic() < end]), 0, name="go").item():
        num_rounds += 1
        jobs = []
        for number in range(NUM_JOBS):
            kind = shared.choice(list(KINDS))
            name = f"{kind}.{number}" + (f".{num_rounds}" if shared.random() < 0.3 else "")
            rows = shared.randint(size, 400) * (200 if shared.random() < 0.05 else 1)
            jobs.append(Job(kind, name, rows, shared.randrange(size)))
        own.shuffle(jobs)
        handles: dict[str, int] = {}

        def submit(part: list[Job], handles: dict[str, int] = handles) -> None:
            for job in part:
                handles[job.name] = KINDS[job.kind].submit(job, torch.full((job.rows, 2), rank + 1.0), rank, size)

        threads = [threading.Thread(target=submit, args=(jobs[start::3],)) for start in range(3)]
        for thread in threads:
            thread.start()
        aside = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, process_set=others) if rank else None
        for thread in threads:
            thread.join()
        own.shuffle(jobs)
        for job in jobs:
            if own.random() < 0.2:
                hvd.poll(handles[job.name])
            try:
                result = hvd.synchronize(handles[job.name])
            except hvd.HorovodInternalError as error:
                result = error
            assert KINDS[job.kind].is_right(job, result, size, total), (job, result)
        assert aside is None or _everywhere(hvd.synchronize(aside), size - 1)
    hvd.shutdown()
    return num_rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "env"),
    [
        (2, {}),
        (3, {"HOROVOD_FUSION_THRESHOLD": "3000"}),
        (4, {"GUOZHUANG_BACKEND": "gloo"}),
        (2, {"HOROVOD_CACHE_CAPACITY": "8", "HOROVOD_CYCLE_TIME": "0.5"}),
    ],
)
def test_in_any_order(num_ranks: int, env: dict[str, str]):
    rounds = run_ranks(soak, num_ranks, init=False, env=env)
    assert len(set(rounds)) == 1 and rounds[0] > 1
