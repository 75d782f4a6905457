"""What one rank does in a test of the heartbeat: rank WHO does what the case says, the others train on. See ``main``."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.data

import guozhuang  # noqa: F401 - registers "shm"
from guozhuang.watch import afterwards, heartbeat
from guozhuang.watch.judge import Beat, Limits
from tests.waiting import LIMIT_S, until

INTERVAL_S = 0.3
POLL_S = 0.1  # of a rank that polls in vain
RUNNING: list[heartbeat.Heartbeat] = []  # of this rank


def limits(case: str, who: int) -> Limits:
    """As those of the heartbeat, but that no rank or store which lives, and is only slow, is given up."""
    usual = Limits.of(INTERVAL_S)
    if case == "train":  # whoever calls that has troubles of its own for it
        return usual
    patient = replace(
        usual, lost_s=LIMIT_S / 2, gather_s=LIMIT_S / 2, urgent_takeover_s=LIMIT_S / 2, report_wait_s=LIMIT_S / 2
    )
    watcher_is_held = case == "lock" and who == 0
    patient = patient if watcher_is_held else replace(patient, takeover_s=LIMIT_S / 2)
    return replace(patient, mute_s=LIMIT_S / 2) if case != "lock" else patient


def enter(case: str, who: int, hang_timeout_s: float | None) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit_s = float(os.environ.get("GROUP_TIMEOUT_S", LIMIT_S))
    dist.init_process_group(os.environ.get("BACKEND", "gloo"), timeout=datetime.timedelta(seconds=limit_s))
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    with mock.patch.object(Limits, "of", return_value=limits(case, who)):
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


def train_until_all_have_heard(num_steps: int) -> None:
    """Train, so many steps at least, until every rank has read the status of the watcher, and the watcher all beats."""
    store = dist.PrefixStore("test/heartbeat", dist.distributed_c10d._get_default_store())
    keys = [f"beat/{rank}" for rank in range(dist.get_world_size())]

    def beats() -> list[int]:
        train(1)
        return [Beat.from_bytes(store.get(key)).count for key in keys] if store.check(keys) else []

    first = until(beats)  # each rank reads in every round before it sends a beat
    until(lambda: all(count >= old + 3 for count, old in zip(beats(), first, strict=True)))
    train(num_steps)


def sleeps_in_a_call() -> None:
    time.sleep(1000)


def holds_the_lock(path: str | None = None) -> None:
    """Read, in a call into C that keeps Python's lock, from a pipe of this name, or from one to which nobody writes."""
    source = os.pipe()[0] if path is None else os.open(path, os.O_RDWR)  # which waits for no writer
    ctypes.PyDLL(None).read(source, ctypes.create_string_buffer(1), 1)


def polls_a_queue() -> None:
    queue: Any = get_context("fork").Queue()
    while True:
        try:
            queue.get(timeout=POLL_S)
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
    afterwards.stop()  # it is to stand there until the others have ended
    time.sleep(1000)


def lets_go_of_it(path: str) -> None:
    """On the rank that watches: have the lock let go when the silent rank has been looked at."""

    def watch() -> None:
        running = RUNNING[0]
        until(lambda: running._watch is not None and running._watch.status.suspects)
        asked = running._watch.status.suspects[0][0] if running._watch is not None else -1
        judge = running._watch._judge if running._watch is not None else None
        until(lambda: judge is not None and any(asked in each.process_states for each in judge.beats().values()))
        Path(path).write_text("x")

    threading.Thread(target=watch, daemon=True).start()


def holds_it_for_a_while() -> None:
    holds_the_lock(os.environ["PIPE"])
    train(10)
    print("WENT ON", flush=True)
    os._exit(0)


def ends_at(words: str) -> None:
    """End this rank, as a time-out of its group would, when it has said something."""
    until(lambda: words in Path("/proc/self/fd/2").read_text())
    os._exit(1)


CASES: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": sleeps_in_a_call,
    "poll": polls_a_queue,
    "loader": reads_slow_data,
    "lock": holds_the_lock,
    "lock for a while": holds_it_for_a_while,
    "skip": lambda: dist.barrier(),
    "leave": leaves_early,
    "raise": raises,
}


def main(case: str, who: int, hang_timeout_s: float | None) -> None:
    """Enter a group and start the heartbeat; then train, or do what the case says."""
    rank = enter(case, who, hang_timeout_s)
    print(f"PID {os.getpid()}", flush=True)
    if case == "compute":  # all of them, for longer than the time-out
        train(3)
        computes(3.0)
        train(3)
    elif case in ("none", "train"):
        train(100 if case == "none" else 10**9)
    else:
        if rank == who:
            train_until_all_have_heard(20)
        else:
            if "ENDS_AT" in os.environ:
                threading.Thread(target=ends_at, args=(os.environ["ENDS_AT"],), daemon=True).start()
            if case == "lock for a while" and rank == 0:
                lets_go_of_it(os.environ["PIPE"])
            train(10**9)
        CASES[case]()
    leave()
