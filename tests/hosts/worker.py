"""One rank of a test over several hosts: ``python -m tests.hosts.worker CASE ...``; prints what it found as JSON."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import guozhuang as gz  # registers "shm"
from guozhuang.errors import PeerLost, WorldError
from tests.waiting import LIMIT_S, until

BUCKET_BYTES = 24 << 20
_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def values(rank: int, num_elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-99, 100, (num_elements,), generator=generator).float()


def link_bytes(backend: str) -> dict[str, Any]:
    """All collectives give the right values; what the host puts on the link for one all_reduce of a bucket."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=LIMIT_S))
    rank, size = dist.get_rank(), dist.get_world_size()
    for num_elements in (1, 1000, 300_001):
        tensor = values(rank, num_elements)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, sum(values(r, num_elements) for r in range(size)))
        tensor = values(rank, num_elements)
        dist.broadcast(tensor, size - 1)
        assert torch.equal(tensor, values(size - 1, num_elements))
        output = torch.empty(size * num_elements)
        dist.all_gather_into_tensor(output, values(rank, num_elements))
        assert torch.equal(output, torch.cat([values(r, num_elements) for r in range(size)]))
    sent = {}
    bucket = torch.ones(BUCKET_BYTES // 4)
    for name, call in (
        ("all_reduce", lambda: dist.all_reduce(bucket)),
        ("broadcast", lambda: dist.broadcast(bucket, 0)),
    ):
        dist.barrier()
        sent_before()
        dist.barrier()
        before = int(_COUNTER.read_text())
        call()
        dist.barrier()
        sent[name] = sent_before() - before
        dist.barrier()
    kind = type(dist.group.WORLD).__name__
    dist.destroy_process_group()
    return {"sent": sent, "kind": kind}


def sent_before() -> int:
    """What the host has put on the link, once no more is added: acknowledgements come a moment later."""
    before, found = -1, int(_COUNTER.read_text())
    while found != before:
        time.sleep(0.1)
        before, found = found, int(_COUNTER.read_text())
    return found


def lose(victim: str, how: str, timeout_s: str, folder: str) -> dict[str, Any]:
    """The rank ``victim`` dies or falls silent in the middle of all_reduces; how the others learn of it.

    The time-out holds from then on. The ranks leave a file each in the folder when they need nobody any more.
    """
    dist.init_process_group("shm", timeout=datetime.timedelta(seconds=LIMIT_S))
    rank, size = dist.get_rank(), dist.get_world_size()
    bucket = torch.ones(BUCKET_BYTES // 4)
    dist.all_reduce(bucket)
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    group: Any = dist.group.WORLD
    group.set_timeout(datetime.timedelta(seconds=float(timeout_s)))
    print("READY", flush=True)
    if rank == int(victim):
        for _ in range(3):
            dist.all_reduce(bucket)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    error: WorldError
    try:
        while True:
            dist.all_reduce(bucket)
    except WorldError as caught:
        error = caught
    dist.destroy_process_group()  # which waits for nobody
    (Path(folder) / str(rank)).touch()
    if rank == 0:  # it keeps the store, which others may still read
        others = [Path(folder) / str(each) for each in range(size) if each != int(victim)]
        until(lambda: all(each.exists() for each in others))
    return {
        "text": str(error),
        "rank": error.rank if isinstance(error, PeerLost) else None,
        "pid": error.pid if isinstance(error, PeerLost) else None,
        "victims_pid": pids[int(victim)],
    }


def default() -> dict[str, Any]:
    """What gz.init makes of several hosts."""
    world = gz.init(timeout_s=LIMIT_S)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    found = {"num_nodes": world.num_nodes, "backend": str(dist.get_backend()), "sum": tensor.item()}
    gz.shutdown()
    return found


if __name__ == "__main__":
    case, *arguments = sys.argv[1:]
    found = {"link_bytes": link_bytes, "lose": lose, "default": default}[case](*arguments)  # type: ignore[operator]
    print("FOUND " + json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads have nothing to say any more
