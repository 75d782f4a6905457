"""Ranks whose default group is "shm"."""

import datetime
import gc
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from guozhuang.groups import backend
from tests.ranks import GROUP_TIMEOUT_S, run_ranks
from tests.waiting import NEVER_S, remaining


def run_shm_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    group_timeout_s: float = NEVER_S,
    name: str = "shm",
    **options: Any,
) -> list[Any]:
    """As ``run_ranks``, in a group of this backend; after ``fn`` the group must end and leave nothing behind.

    No rank may wait for the time-out of the group: who waits for a lost rank has to hear of that before.
    """
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(_in_group, num_ranks, fn, args, group_timeout_s, name, folder, init=False, **options)


def _in_group(
    rank: int, num_ranks: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, name: str, folder: str
) -> Any:
    backend.register()
    store = dist.FileStore(f"{folder}/store", num_ranks)
    before = held()
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(name, store=store, rank=rank, world_size=num_ranks, timeout=limit)
    result = fn(rank, num_ranks, *args)
    is_gloo = dist.is_initialized() and dist.get_backend() == "gloo"  # the function changed it
    if dist.is_initialized():
        dist.destroy_process_group()
    # Gloo closes its sockets when it pleases, and its end in a collection may wait for a thread that wants the GIL.
    if is_gloo:
        return result
    gc.collect()
    # A group that was dropped on its own thread ends a moment later. The limit is one that lets this rank say what is left.
    left = remaining(lambda: held() - before, GROUP_TIMEOUT_S)
    assert not left, f"rank {rank} left behind {sorted(left)}"
    return result


def is_ahead(group: Any, rank: int, other: int | None = None) -> bool:
    """Whether a rank waits in a collective of a group which another one (this one) has not begun. Before, both were in all."""
    engine = group._resources.link._engine
    return bool(engine.arrived_of(rank) != engine.arrived_of(group.rank() if other is None else other))


def held() -> set[str]:
    """What of this process's threads, descriptors and mappings the group could leave behind."""
    found = {f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("guozhuang")}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith(("/memfd:", "socket:", "anon_inode:[pidfd]")):
            found.add(f"descriptor {entry} -> {target}")
    with open("/proc/self/maps") as lines:
        found |= {f"mapping {line.split()[-2:]}" for line in lines if "/memfd:guozhuang" in line}
    return found
