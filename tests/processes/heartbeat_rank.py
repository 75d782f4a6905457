"""What one rank does in a test of the heartbeat: rank WHO does what the case says, the others train on. See ``main``."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data

import guozhuang  # noqa: F401 - registers "shm"
from guozhuang.watch import heartbeat

INTERVAL_S = 0.3
RUNNING: list[heartbeat.Heartbeat] = []  # of this rank


def enter(hang_timeout_s: float | None) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit_s = float(os.environ.get("GROUP_TIMEOUT_S", "60"))
    dist.init_process_group(os.environ.get("BACKEND", "gloo"), timeout=datetime.timedelta(seconds=limit_s))
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    running = heartbeat.start(store, rank, size, hang_timeout_s, keeps_store=keeps, interval_s=INTERVAL_S)
    assert running is not None
    RUNNING.append(running)
    return rank


def leave() -> None:
    start = time.monotonic()
    RUNNING[0].stop()
    RUNNING[0].stop()
    took_s = time.monotonic() - start
    dist.destroy_process_group()
    left = [each.name for each in threading.enumerate() if each.name.startswith("guozhuang")]
    print(f"LEFT {left} {took_s:.2f}", flush=True)


def train(num_steps: int = 10**9) -> None:
    tensor = torch.ones(100)
    for _ in range(num_steps):
        dist.all_reduce(tensor)
        time.sleep(0.01)


def sleeps_in_a_call() -> None:
    time.sleep(1000)


def holds_the_lock(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)  # a call into C that keeps Python's lock


def polls_a_queue() -> None:
    queue: Any = get_context("fork").Queue()
    while True:
        try:
            queue.get(timeout=0.1)
        except Exception:
            continue


class Slow(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 8:
            print(f"WORKER {os.getpid()}", flush=True)
            time.sleep(1000)
        return index


def reads_slow_data() -> None:
    for _ in torch.utils.data.DataLoader(Slow(), num_workers=2, multiprocessing_context="fork"):
        dist.all_reduce(torch.ones(100))


def computes(seconds: float) -> None:
    """As an evaluation does: Python goes from place to place."""
    end, matrix = time.monotonic() + seconds, torch.ones(200, 200)
    while time.monotonic() < end:
        # Several calls alike, because a look is likeliest to come where a call lets go of Python's lock.
        _ = matrix @ matrix
        _ = matrix @ matrix
        _ = matrix @ matrix
        sum(range(1000))
        sorted(range(1000))


def raises() -> None:
    try:
        raise ValueError("no such file: data.bin")
    except ValueError:
        RUNNING[0].stop()
        os._exit(1)


def leaves_early() -> None:
    RUNNING[0].stop()
    time.sleep(1000)


def holds_it_for_a_while() -> None:
    holds_the_lock(4)
    train(10)
    print("WENT ON", flush=True)
    os._exit(0)


CASES: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": sleeps_in_a_call,
    "poll": polls_a_queue,
    "loader": reads_slow_data,
    "lock": lambda: holds_the_lock(1000),
    "lock for a while": holds_it_for_a_while,
    "skip": lambda: dist.barrier(),
    "leave": leaves_early,
    "raise": raises,
}


def main(case: str, who: int, hang_timeout_s: float | None) -> None:
    """Enter a group and start the heartbeat; then train, or do what the case says."""
    rank = enter(hang_timeout_s)
    print(f"PID {os.getpid()}", flush=True)
    if case == "compute":  # all of them, for longer than the time-out
        train(3)
        computes(3.0)
        train(3)
    elif case in ("none", "train"):
        train(100 if case == "none" else 10**9)
    else:
        train(20 if rank == who else 10**9)
        if rank == who:
            time.sleep(3 * INTERVAL_S)  # until all have heard of each other
        CASES[case]()
    leave()
