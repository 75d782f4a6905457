"""Gloo for sparse tensors, which shared memory does not carry, when a rank does not come."""

from __future__ import annotations

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import PeerLost, WorldError
from guozhuang.groups.gloo import WatchedGloo
from tests.ranks import RankError, run_ranks


def loses(rank: int, world_size: int, how: str) -> tuple[float, str, int | None]:
    store = dist.PrefixStore("sparse", dist.distributed_c10d._get_default_store())
    group = WatchedGloo(store, rank, world_size, datetime.timedelta(seconds=30))
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank, 5]]), torch.ones(2), (10,))
    assert group.allreduce([tensor]).wait()
    assert tensor.to_dense()[5] == world_size
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        if how == "late":
            time.sleep(3)
            return 0.0, "", None
        os.kill(os.getpid(), signal.SIGKILL)
    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=1.5 if how == "late" else 20)
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        group.allreduce([tensor], options)
    took_s = time.monotonic() - start
    group.shutdown()
    time.sleep(0.5)  # the others see no other end than that of rank 1
    return took_s, str(caught.value), caught.value.rank if isinstance(caught.value, PeerLost) else None


def test_a_killed_rank_is_named_within_a_second() -> None:
    found = run_ranks(loses, 4, "kill", collect_errors=True, timeout_s=30)
    assert isinstance(found.pop(1), RankError)
    for took_s, text, lost in found:
        assert took_s < 0.3 + 1.2, text
        assert lost == 1, text


def test_a_rank_that_does_not_come_raises_at_the_time_out_of_the_call() -> None:
    for rank, (took_s, text, _) in enumerate(run_ranks(loses, 3, "late", timeout_s=30)):
        assert rank == 1 or (took_s < 2.5 and "while this" in text), text
