"""The shared-memory group under stress: thousands of random collectives against gloo, and ranks killed at random moments."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import PeerLost
from tests.ranks import RankError, run_ranks
from tests.waiting import NEVER_S, until

pytestmark = pytest.mark.slow

NUM_RANKS = 4
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
KINDS = (
    *("all_reduce", "all_reduce", "in_place", "async", "broadcast", "reduce", "all_gather", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_single", "all_to_all", "uneven", "gather", "scatter", "barrier"),
)


def values(rank: int, num_elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers: every order of summing or multiplying four of them is exact in every dtype."""
    generator = torch.Generator().manual_seed(seed * NUM_RANKS + rank)
    return torch.randint(0, 4, (num_elements,), generator=generator).to(dtype)


def collective(
    kind: str, rank: int, group: Any, n: int, dtype: torch.dtype, op: Any, root: int, seed: int
) -> list[torch.Tensor]:
    """Do it once and return everything that it may have written."""
    mine = values(rank, n, dtype, seed)
    parts = [torch.zeros(n, dtype=dtype) for _ in range(NUM_RANKS)]
    whole = values(rank, n * NUM_RANKS, dtype, seed + 1)
    if kind in ("all_reduce", "in_place"):
        if kind == "in_place" and hasattr(group, "empty"):
            mine = group.empty(n, dtype).copy_(mine)
        dist.all_reduce(mine, op=op, group=group)
    elif kind == "async":
        tensors = [mine, whole]
        works = [dist.all_reduce(t, op=op, group=group, async_op=True) for t in tensors]
        for work in works:
            work.wait()
        return tensors
    elif kind == "broadcast":
        dist.broadcast(mine, root, group=group)
    elif kind == "reduce":
        dist.reduce(mine, root, op=op, group=group)
        return [mine] if rank == root else []  # elsewhere it is undefined
    elif kind == "all_gather":
        dist.all_gather(parts, mine, group=group)
        return parts
    elif kind == "all_gather_single":
        whole.zero_()
        dist.all_gather_into_tensor(whole, mine, group=group)
        return [whole]
    elif kind == "reduce_scatter":
        dist.reduce_scatter(mine, list(whole.chunk(NUM_RANKS)) if n else parts, op=op, group=group)
    elif kind == "reduce_scatter_single":
        dist.reduce_scatter_tensor(mine, whole, op=op, group=group)
    elif kind == "all_to_all":
        into = torch.zeros_like(whole)
        dist.all_to_all_single(into, whole, group=group)
        return [into]
    elif kind == "uneven":
        sizes = [[(seed + 3 * a + 5 * b) % (n // 2 + 1) for b in range(NUM_RANKS)] for a in range(NUM_RANKS)]
        sends, receives = sizes[rank], [sizes[r][rank] for r in range(NUM_RANKS)]
        into = torch.zeros(sum(receives), dtype=dtype)
        dist.all_to_all_single(into, values(rank, sum(sends), dtype, seed), receives, sends, group=group)
        return [into]
    elif kind == "gather":
        dist.gather(mine, parts if rank == root else None, dst=root, group=group)
        return parts
    elif kind == "scatter":
        dist.scatter(
            mine,
            list(whole.clone().chunk(NUM_RANKS)) if rank == root and n else (parts if rank == root else None),
            src=root,
            group=group,
        )
    else:
        dist.barrier(group=group)
    return [mine]


def random_collectives(rank: int, world_size: int, count: int, seed: int) -> int:
    shm = dist.new_group(backend="shm")
    choose = random.Random(seed)  # the same on all ranks
    for i in range(count):
        kind, dtype, op = choose.choice(KINDS), choose.choice(DTYPES), choose.choice(OPS)
        n, root = int(2 ** choose.uniform(0, 17)) - choose.randint(0, 1), choose.randrange(world_size)
        arguments = (n, dtype, op, root, i)
        expected = collective(kind, rank, dist.group.WORLD, *arguments)
        found = collective(kind, rank, shm, *arguments)
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b), (i, kind, n, dtype, str(op), root)
    return count


@pytest.mark.timeout(NEVER_S)
def test_ten_thousand_random_collectives_give_what_gloo_gives() -> None:
    assert run_ranks(random_collectives, NUM_RANKS, 10_000, 1, timeout_s=NEVER_S) == [10_000] * NUM_RANKS


def open_things() -> tuple[int, int, int]:
    """Descriptors, threads, and mappings of shared memory of this process."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps.count("memfd:")


def until_someone_dies(rank: int, world_size: int, victim: int, num_calls: int, seed: int) -> dict[str, Any]:
    group: Any = dist.group.WORLD
    dist.barrier()  # all have met
    before = open_things()
    choose, num_done = random.Random(seed), 0
    if rank == victim:

        def die() -> None:
            while num_done < num_calls:
                time.sleep(0.0001)
            os.kill(os.getpid(), signal.SIGKILL)  # while the main thread is somewhere in or between its calls

        threading.Thread(target=die, daemon=True).start()
    plain, placed = torch.ones(3_000_000), group.empty(3_000_000, torch.float32)
    try:
        while True:
            n = int(2 ** choose.uniform(0, 21.5))
            tensor = (placed if choose.random() < 0.5 else plain)[:n].fill_(1.0)
            if choose.random() < 0.5:
                dist.all_reduce(tensor)
            else:
                dist.all_reduce(tensor, async_op=True).wait()
            assert tensor[0].item() == tensor[-1].item() == world_size
            num_done += 1
    except PeerLost as error:
        lost = error.rank
    again = ""
    try:
        dist.all_reduce(torch.ones(3))
    except PeerLost as error:
        again = type(error).__name__
    del plain, placed, tensor, group
    dist.destroy_process_group()
    gc.collect()  # frames of tracebacks in torch refer to themselves
    until(lambda: open_things()[1] <= before[1])  # the kernel ends a thread a moment after it was joined
    after = open_things()
    return {"lost": lost, "again": again, "before": before, "after": after}


@pytest.mark.timeout(NEVER_S)
def test_fifty_kills_at_random_moments() -> None:
    choose = random.Random(2)
    for attempt in range(50):
        victim = choose.randrange(NUM_RANKS)
        arguments = (victim, choose.randrange(100), attempt)
        outcomes = run_ranks(
            until_someone_dies,
            NUM_RANKS,
            *arguments,
            backend="shm",
            group_timeout_s=NEVER_S,  # no rank waits for that
            collect_errors=True,
        )
        for rank, outcome in enumerate(outcomes):
            if rank == victim:
                assert isinstance(outcome, RankError) and outcome.exit_code == -signal.SIGKILL, outcome
                continue
            assert isinstance(outcome, dict), f"kill {attempt}, rank {rank} of victim {victim}: {outcome}"
            assert outcome["lost"] == victim, (attempt, rank, victim, outcome)
            assert outcome["again"] == "PeerLost"
            # Before, the group was there: what it held is gone, and nothing was added.
            assert outcome["after"][2] == 0, outcome["after"]
            assert all(a <= b for a, b in zip(outcome["after"], outcome["before"], strict=True)), (
                outcome["before"],
                outcome["after"],
            )
