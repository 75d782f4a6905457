"""Make this process a rank of a fake world."""

from __future__ import annotations

import datetime
import functools
import time
from typing import Any, Final

import torch
import torch.distributed as dist

from guozhuang.cost.cluster import LOOPBACK, SHARED_MEMORY_LINK
from guozhuang.errors import UsageError, explain
from guozhuang.world import FAKE, World, enter_made
from guozhuang.world.identity import Identity

from .node import FakeNodeGroup
from .process_group import NAME, FakeGroup
from .recorder import Recorder
from .store import FakeStore

_TIMEOUT: Final = datetime.timedelta(seconds=60)


def enter(rank: int, num_ranks: int, num_nodes: int, backend: str, device: torch.device) -> tuple[World, Recorder]:
    """Make this process a rank of a fake world, as ``init`` would in a real one.

    Args:
        rank: the rank that this process plays.
        num_ranks: the ranks of the world, equally many on each node.
        num_nodes: the nodes of the world.
        backend: the backend whose ranks are played: "shm", "gloo" or "nccl". On one node, ranks of "shm" share memory.
        device: the device of this rank.

    Returns:
        The world, and what records this rank's work.

    Raises:
        UsageError: numbers that do not go together, or a process that has a process group already.
    """
    if num_ranks < 1 or not 0 <= rank < num_ranks or num_nodes < 1 or num_ranks % num_nodes:
        what = "a fake world has a rank of several, as many on each node"
        value = f"rank {rank} of {num_ranks} on {num_nodes} nodes"
        raise UsageError(explain(what, value=value, fix="name a number of ranks that divides by the nodes"))
    if dist.is_initialized():
        raise UsageError(explain("a fake world begins in a process without a process group", fix="start a new process"))
    now = time.thread_time if device.type == "cpu" else functools.partial(_device_time, device)
    recorder = Recorder(rank, num_ranks, now)
    link = SHARED_MEMORY_LINK if backend == "shm" and num_nodes == 1 else LOOPBACK
    recorder.message_times = link.latency_s, 1 / link.bytes_per_s
    made = FakeNodeGroup if backend == "shm" and num_nodes == 1 else FakeGroup

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    store = recorder.kept = FakeStore(rank)  # PyTorch does not keep the Python object
    options: Any = (made, recorder)
    dist.init_process_group(NAME, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT, pg_options=options)
    local_size = num_ranks // num_nodes
    node_rank, local_rank = divmod(rank, local_size)
    identity = Identity(FAKE, rank, num_ranks, local_rank, local_size, node_rank, num_nodes)
    return enter_made(identity, device, backend, _TIMEOUT.total_seconds()), recorder


def _create(told: Any, options: Any) -> FakeGroup:
    """Make a group; ``torch.distributed`` calls this function. Groups after the first are of its kind."""
    default: Any = dist.group.WORLD
    made, recorder = options or (type(default), default.recorder)
    ranks = tuple(told.global_ranks_in_group) or tuple(range(told.group_size))
    group: FakeGroup = made(told.store, told.group_rank, ranks, told.timeout, recorder)
    return group


def _device_time(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()
