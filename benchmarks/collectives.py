"""Race collectives of the shared-memory group against gloo, in alternating rounds in one run.

    python benchmarks/collectives.py [--ranks 2] [--rounds 9] [--others] [--json FILE]

Each rank is one process with one thread. Both groups live in the same processes; a round times a few calls of the one, then of
the other, between barriers; a round's ratio is gloo's time over ours, and the median of the rounds is printed. "in place" is a
tensor from ``group.empty``, "staged" an ordinary one. The memory-copy line is every rank copying 25 MB at once; the share of
bandwidth is bytes read and written per second by the all-reduce (each rank reads its part of every buffer and writes it to
every buffer) over bytes read and written per second by the copies. ``--others`` adds the other collectives at 1 MB and 25 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import guozhuang  # noqa: F401  registers "shm"

SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20, "25 MB": 25 << 20, "256 MB": 256 << 20}
CALLS = {"4 KB": 200, "1 MB": 40, "25 MB": 5, "256 MB": 2}
ASKED = {"in place": (30, 25, 8, 5), "staged": (15, 8, 3, 2.5)}


def seconds(call: Callable[[], object], calls: int, group: Any) -> float:
    """Of one call; all ranks start together, and the slowest counts."""
    call()
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    own = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
    return own.item()


def race(calls: dict[str, Callable[[], object]], count: int, rounds: int, group: Any) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for r in range(rounds):
        order = list(calls)
        for name in order[r % len(order) :] + order[: r % len(order)]:
            times[name].append(seconds(calls[name], count, group))
    return times


def other_calls(num_elements: int, n: int, gloo: Any, shm: Any) -> dict[str, dict[str, Callable[[], object]]]:
    whole = torch.zeros(num_elements // n * n)
    part = torch.zeros(num_elements // n)
    into = torch.zeros_like(whole)
    made: dict[str, dict[str, Callable[[], object]]] = {}

    def both(name: str, call: Callable[[Any], object]) -> None:
        made[name] = {"gloo": lambda: call(gloo), "shm": lambda: call(shm)}

    def ring(group: Any) -> None:
        rank = dist.get_rank(group)
        works = [dist.isend(whole, (rank + 1) % n, group=group), dist.irecv(into, (rank - 1) % n, group=group)]
        for work in works:
            assert work is not None
            work.wait()

    both("broadcast", lambda group: dist.broadcast(whole, 0, group=group))
    both("all_gather_into_tensor", lambda group: dist.all_gather_into_tensor(whole, part, group=group))
    both("reduce_scatter_tensor", lambda group: dist.reduce_scatter_tensor(part, whole, group=group))
    both("all_to_all_single", lambda group: dist.all_to_all_single(into, whole, group=group))
    both("reduce", lambda group: dist.reduce(whole, 0, group=group))
    both("send and recv", ring)
    both("barrier", lambda group: dist.barrier(group=group))
    return made


def measure(rank: int, n: int, port: int, rounds: int, others: bool, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    gloo: Any = dist.group.WORLD
    shm: Any = dist.new_group(backend="shm")
    found: dict[str, Any] = {"all_reduce": {}, "others": {}}
    for label, num_bytes in SIZES.items():
        num_elements = num_bytes // 4
        plain, own = torch.zeros(num_elements), torch.zeros(num_elements)
        placed = shm.empty(num_elements, torch.float32).zero_()
        calls: dict[str, Callable[[], object]] = {
            "gloo": lambda t=plain: dist.all_reduce(t, group=gloo),
            "staged": lambda t=own: dist.all_reduce(t, group=shm),
            "in place": lambda t=placed: dist.all_reduce(t, group=shm),
        }
        if label == "25 MB":
            calls["copy"] = lambda to=plain, of=own: to.copy_(of)
        found["all_reduce"][label] = race(calls, CALLS[label], rounds, shm)
        del plain, own, placed, calls
    if others:
        for label in ("1 MB", "25 MB"):
            for name, pair in other_calls(SIZES[label] // 4, n, gloo, shm).items():
                found["others"][f"{name} {label}"] = race(pair, CALLS[label], rounds, shm)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def ratios(over: list[float], under: list[float]) -> tuple[float, float, float]:
    each = [a / b for a, b in zip(over, under, strict=True)]
    return statistics.median(each), min(each), max(each)


def shown(s: float) -> str:
    return f"{s * 1e3:.2f} ms" if s >= 1e-3 else f"{s * 1e6:.1f} us"


def report(found: dict[str, Any], n: int) -> None:
    print(f"{n} ranks; times are medians; ratios gloo / shm are medians of the rounds' ratios (min .. max)")
    print(f"{'all_reduce':12}{'gloo':>11}{'staged':>11}{'in place':>11}   {'gloo / staged':34}gloo / in place")
    for i, (label, times) in enumerate(found["all_reduce"].items()):
        line = f"{label:12}" + "".join(
            f"{shown(statistics.median(times[k])):>11}" for k in ("gloo", "staged", "in place")
        )
        for kind in ("staged", "in place"):
            middle, low, high = ratios(times["gloo"], times[kind])
            text = f"{middle:.1f} ({low:.1f} .. {high:.1f}), asked {ASKED[kind][i]}"
            line += "   " + (f"{text:31}" if kind == "staged" else text)
        print(line)
    times = found["all_reduce"]["25 MB"]
    copy = statistics.median(times["copy"])
    bandwidth = 2 * n * SIZES["25 MB"] / copy
    shares = [
        n * (1 + 1) * SIZES["25 MB"] / t / (2 * n * SIZES["25 MB"] / c)
        for t, c in zip(times["in place"], times["copy"], strict=True)
    ]
    print(f"memory copy by all ranks at once: {bandwidth / 1e9:.1f} GB/s read and written")
    print(f"all_reduce of 25 MB in place: {statistics.median(shares):.0%} of that (asked 60 %)")
    for name, pair in found["others"].items():
        middle, low, high = ratios(pair["gloo"], pair["shm"])
        medians = [shown(statistics.median(pair[k])) for k in ("gloo", "shm")]
        print(f"{name:32}{medians[0]:>11}{medians[1]:>11}   {middle:.1f} ({low:.1f} .. {high:.1f})")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options.ranks, free_port(), options.rounds, options.others, folder), nprocs=options.ranks)
        found = json.loads(Path(folder, "result.json").read_text())
    report(found, options.ranks)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
