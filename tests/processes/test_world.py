"""placeholder while world is written"""

import os, time
import torch
import torch.distributed as dist
from tests.ranks import run_ranks


def sums(rank, world_size, scale):
    t = torch.full((3,), float(rank * scale))
    dist.all_reduce(t)
    return t


def dies(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


def hang(rank, world_size):
    if rank == 1:
        time.sleep(100)
    dist.barrier()


def test_a():
    for _ in range(3):
        t0 = time.time()
        r = run_ranks(sums, 2, 10)
        print(time.time() - t0)
    t0 = time.time()
    r = run_ranks(sums, 4, 10)
    print(time.time() - t0)
    assert r[0][0] == 60


def test_b():
    t0 = time.time()
    print(run_ranks(dies, 3, collect_errors=True))
    print(time.time() - t0)


def test_c():
    t0 = time.time()
    try:
        run_ranks(hang, 2, timeout_s=2)
    except AssertionError as e:
        print(e)
    print(time.time() - t0)
