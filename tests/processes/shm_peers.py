"""Ranks that have met and share memory, with no process group around them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from guozhuang.groups.shared_memory.arena import Arena
from guozhuang.groups.shared_memory.engine import MAIN_BYTES
from guozhuang.groups.shared_memory.point_to_point import PointToPoint
from guozhuang.groups.shared_memory.rendezvous import Peers, connect, meet
from guozhuang.groups.shared_memory.segments import Segment
from tests.ranks import run_ranks
from tests.waiting import NEVER_S, until

NOBODY = (1 << 22) + 1  # more than any pid


def run(fn: Callable[..., Any], num_ranks: int, *args: Any, way: str = "streams", **options: Any) -> list[Any]:
    """Run ranks that have a store in a file, and no process group with sockets and threads of its own.

    ``way`` is how large payloads travel: in "streams", or the receiver "reads" them; "cannot" is a receiver that tries in vain.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = {"MEETING_PLACE": f"{folder}/store", "PAYLOADS": way}
        return run_ranks(fn, num_ranks, *args, init=False, env=env, **options)


def held() -> tuple[int, int, int]:
    """Descriptors, mappings of anonymous files, and threads of this process."""
    gc.collect(1)  # young objects alone: all those of the imported modules take a second
    maps = sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


@functools.cache
def a_store() -> dist.Store:
    return dist.PrefixStore("test/", dist.FileStore(os.environ["MEETING_PLACE"]))


def where(arena: Arena, tensor: torch.Tensor) -> tuple[int, int] | None:
    """The segment of a tensor, and its offset there."""
    return arena.locate(tensor.data_ptr(), tensor.nbytes)


def barrier(size: int) -> None:
    """All ranks arrive before any goes on."""
    store = a_store()
    goal = -(-store.add("arrivals", 1) // size) * size
    until(lambda: store.add("arrivals", 0) >= goal, told=lambda: "a rank of the test did not come")


def met(rank: int, size: int, timeout_s: float = NEVER_S) -> Peers:
    listener, cards = meet(a_store(), rank, size, timeout_s)
    return connect(rank, cards, listener, timeout_s, Segment.create(MAIN_BYTES, "guozhuang-main"))


@contextlib.contextmanager
def group(
    rank: int, size: int, timeout_s: float = NEVER_S, crowded: bool = True
) -> Iterator[tuple[Peers, Arena, PointToPoint]]:
    """All that this rank has of a group; afterwards nothing is left of it."""
    before = held()
    peers = met(rank, size)
    way, pids = os.environ["PAYLOADS"], peers.pids
    if way == "cannot":
        peers.pids = [NOBODY] * size
    arena, p2p = Arena(peers), PointToPoint(peers, timeout_s, crowded=crowded, reads=way != "streams")
    peers.pids = pids
    p2p._outbox.along_bytes = 16 << 10  # so that payloads of tests stream which are small enough to lie whole in a ring
    try:
        yield peers, arena, p2p
    finally:
        p2p.close()
        arena.close()
        peers.close()
        peers.close()
    del peers, arena, p2p
    after = held()
    assert after == before, f"(descriptors, mappings, threads): {before} before, {after} afterwards"


def word(address: int) -> Any:
    return ctypes.c_uint32.from_address(address)


def peer_maps(rank: int) -> int:
    return sum(f"guozhuang-arena-{rank} " in line for line in Path("/proc/self/maps").read_text().splitlines())


def state_of(pid: int) -> str:
    """The state of a process in one letter, as /proc gives it (proc(5)): "T" is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
