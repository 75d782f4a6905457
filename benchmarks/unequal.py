"""Two ranks of which one is half as fast: equal parts of a batch, parts by measured speed, and the sum of both ranks' speeds.

    python benchmarks/unequal.py [--rounds 5] [--window-s 5] [--strategy ddp] [--batch 96] [--json FILE]

Each rank is pinned to a core of its own, and computes with one thread. A process that only counts is pinned to the core of
rank 1, so that this rank gets half of it. "sum" is what both ranks train in the same time without each other, each a model of
its own at its own pace: no way to divide a batch can be faster. With equal parts the ranks train at twice the speed of the
slower one, 0.67 of the sum. The contenders live in the same processes and take turns, round after round, in another order in
each; the competitor runs all the time. A ratio is taken within a round; medians over rounds are printed (min .. max). Asked:
parts by speed reach 0.95 of the sum. Parts need a few steps to settle, which a turn before the first round gives them. The
kernel gives the core of rank 1 in slices of some milliseconds to it and to the competitor: with short steps (a small batch)
both ranks wait for the end of a slice, whatever the parts are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import guozhuang

RANKS, TOKENS, WIDTH = 2, 64, 256
NAMES = ("sum", "equal", "speed")


class Rows:
    """So many samples of noise that no epoch ends within a turn."""

    def __init__(self) -> None:
        self.rows = torch.randn(64, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index % 64]


def network() -> nn.Module:
    torch.manual_seed(0)
    block = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return nn.Sequential(*[nn.Sequential(*block) for _ in range(2)])


class Contender:
    """One way to train, in one rank."""

    def __init__(self, name: str, strategy: str, batch: int) -> None:
        self.name, self.num_turns = name, 0
        bare = network()
        optimizer = torch.optim.SGD(bare.parameters(), lr=1e-4)
        self.model, self.optimizer = (
            (bare, optimizer) if name == "sum" else guozhuang.prepare(bare, optimizer, strategy)
        )
        self.batches = guozhuang.loader(Rows(), global_batch_size=batch, shares="speed" if name == "speed" else None)

    def run(self, num_steps: int, window_s: float) -> dict[str, float]:
        """Train so many steps, or alone for so long; every rank must call. Returns samples, seconds, and the last part."""
        dist.barrier()
        self.num_turns += 1
        self.batches.set_epoch(self.num_turns)
        began_s, num_samples, part = time.perf_counter(), 0, 0
        for rows in itertools.islice(self.batches, None if self.name == "sum" else num_steps):
            self.model(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            part = len(rows)
            num_samples += part
            if self.name == "sum" and time.perf_counter() - began_s > window_s:
                break
        return {"samples": num_samples, "took_s": time.perf_counter() - began_s, "part": part}


def measure(rank: int, port: int, options: argparse.Namespace, cores: list[int], folder: str) -> None:
    os.sched_setaffinity(0, {cores[rank]})
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    guozhuang.init(device="cpu")
    contenders = [Contender(name, options.strategy, options.batch) for name in NAMES]
    num_steps = 20
    for contender in contenders:  # parts settle, and the number of steps of a turn is found
        took_s = torch.tensor(contender.run(num_steps, 1.0)["took_s"])
        dist.broadcast(took_s, 0)
        if contender.name == "equal":
            num_steps = max(10, int(options.window_s / float(took_s) * num_steps))
    rounds = []
    for number in range(options.rounds):
        found: dict[str, Any] = {}
        for contender in contenders[number % len(NAMES) :] + contenders[: number % len(NAMES)]:
            everyones: list[Any] = [None] * RANKS
            dist.all_gather_object(everyones, contender.run(num_steps, options.window_s))
            speeds = [each["samples"] / each["took_s"] for each in everyones]
            found[contender.name] = {
                "samples_per_s": sum(speeds),
                "ranks": speeds,
                "parts": [e["part"] for e in everyones],
            }
        rounds.append(found)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(rounds))
    dist.barrier()
    guozhuang.shutdown()


def compete(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(rounds: list[dict[str, Any]]) -> None:
    print(f"samples/s of both ranks together, medians of {len(rounds)} rounds; ratios within a round (min .. max)")
    for name in NAMES:
        speed = statistics.median(each[name]["samples_per_s"] for each in rounds)
        ratios = [each[name]["samples_per_s"] / each["sum"]["samples_per_s"] for each in rounds]
        ranks = [statistics.median(each[name]["ranks"][rank] for each in rounds) for rank in range(RANKS)]
        shown = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f}) of the sum"
        parts = "" if name == "sum" else f"   last parts {rounds[-1][name]['parts']}"
        print(f"{name:<6}{speed:8.1f}   ranks {ranks[0]:.1f} + {ranks[1]:.1f}   {shown}{parts}")
    gains = [each["speed"]["samples_per_s"] / each["equal"]["samples_per_s"] for each in rounds]
    print(
        f"speed / equal: {statistics.median(gains):.3f} ({min(gains):.3f} .. {max(gains):.3f}); asked: speed 0.95 of the sum"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--batch", type=int, default=96, help="Samples of a global batch.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        parser.error(f"each of {RANKS} ranks needs a core of its own, and there are {len(cores)}")
    competitor = multiprocessing.get_context("spawn").Process(target=compete, args=(cores[1],), daemon=True)
    competitor.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (free_port(), options, cores, folder), nprocs=RANKS)
            rounds = json.loads(Path(folder, "result.json").read_text())
    finally:
        competitor.terminate()
        competitor.join()
    show(rounds)
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
