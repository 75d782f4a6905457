"""Race `horovod` (our DistributedOptimizer) against our `ddp` and PyTorch's DDP over gloo: samples/s of a training step.

    python benchmarks/horovod.py [--sizes tiny,mini] [--ranks 2,4] [--backends shm,gloo] [--rounds 7] [--json FILE]

One thread a rank; BERT for classification on random tokens, dropout 0, batches of 8 x 64 tokens a rank. All variants live in
the same processes at the same time, each with its own model and optimizer, and take turns of some seconds, round after round,
so that a change of the machine's speed meets all of them. `horovod` and `ddp` use the backend of the row; the peer, PyTorch's
DDP, always gloo, as people use it on CPUs. A round's ratio is taken within the round; the median over rounds is printed.

Horovod 0.28.1 itself, over gloo, was measured at 0.70 (tiny) and 0.79 (mini) of PyTorch's DDP over gloo on a machine of this
kind; it does not build against current PyTorch. What is asked of `horovod` here follows from that and stands in the table.

At the end all ranks idle, with the engine and everything else set up, and the processor time of the busiest rank is printed,
beside that before anything but the group was set up (gloo's loops and the heartbeat).
"""

from __future__ import annotations

import argparse
import copy
import json
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

import guozhuang as gz
from guozhuang.workloads import load

BATCH, TOKENS, VOCABULARY, CLASSES = 8, 64, 30522, 4
OPTIMIZERS = {"tiny": "sgd", "mini": "adamw"}
NAMES = ("torch-ddp", "ddp", "horovod")
ASKED_OF_PEER = {"tiny": 0.70 * 1.5, "mini": 0.79 * 1.2}
ASKED_OF_DDP = 0.95
ASKED_IDLE_PERCENT = 1.0


class Variant:
    """One contender in one rank: model, optimizer, its batch."""

    def __init__(self, name: str, model: torch.nn.Module, size: str, peer: dist.ProcessGroup, rank: int) -> None:
        self.name = name
        kind = torch.optim.SGD if OPTIMIZERS[size] == "sgd" else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-4)
        if name == "torch-ddp":
            self.model: Any = torch.nn.parallel.DistributedDataParallel(model, process_group=peer)
            self.optimizer: Any = optimizer
        else:
            self.model, self.optimizer = gz.prepare(model, optimizer, name)
        generator = torch.Generator().manual_seed(rank)
        self.ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
        self.mask = torch.ones_like(self.ids)
        self.labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)

    def step(self) -> None:
        logits = self.model(input_ids=self.ids, attention_mask=self.mask).logits
        torch.nn.functional.cross_entropy(logits, self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, num_steps: int) -> float:
        """Return the seconds of so many steps, of all ranks."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        dist.barrier()
        return time.perf_counter() - start


def measure(rank: int, num_ranks: int, port: int, backend: str, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1"})
    gz.init(backend=backend, device="cpu")
    peer = dist.new_group(backend="gloo")
    before = idling(peer, options.idle)
    result: dict[str, Any] = {}
    for size in options.sizes:
        result[size] = race(rank, num_ranks, size, peer, options)
    after = idling(peer, options.idle)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps({"sizes": result, "idle": after, "idle_before": before}))
    gz.shutdown()


def idling(peer: dist.ProcessGroup, seconds: float) -> float:
    """Return the share of a core that the busiest rank takes while all of them sleep."""
    dist.barrier()
    time.sleep(0.5)  # what was left of the last steps
    wall, processor = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    worst = torch.tensor([(time.process_time() - processor) / (time.perf_counter() - wall)], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=peer)
    return float(worst.item())


def race(
    rank: int, num_ranks: int, size: str, peer: dist.ProcessGroup, options: argparse.Namespace
) -> dict[str, list[float]]:
    torch.manual_seed(0)
    base = load("synthetic", {"model": f"bert-{size}", "dropout": 0.0}).model()
    variants = [Variant(name, copy.deepcopy(base), size, peer, rank) for name in options.names]
    for variant in variants:
        variant.turn(5)
    seconds = torch.tensor([variants[-1].turn(5) / 5])
    dist.broadcast(seconds, 0, group=peer)
    num_steps = max(3, round(options.seconds / seconds.item()))
    speeds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for r in range(options.rounds):
        first = r % len(variants)
        for variant in variants[first:] + variants[:first]:
            speeds[variant.name].append(num_steps * BATCH * num_ranks / variant.turn(num_steps))
    return speeds


def ratio(over: list[float], under: list[float]) -> tuple[float, float, float]:
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(label: str, size: str, speeds: dict[str, list[float]]) -> None:
    row = f"{label:12}{size:6}" + "".join(f"{statistics.median(speeds[name]):>11.1f}" for name in NAMES)
    for under, asked in (("ddp", ASKED_OF_DDP), ("torch-ddp", ASKED_OF_PEER[size])):
        median, low, high = ratio(speeds["horovod"], speeds[under])
        row += f"   {f'{median:.3f} ({low:.3f} .. {high:.3f})':22}{'>=' if median >= asked else 'below'} {asked:.2f}"
    print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--sizes", type=words, default=list(OPTIMIZERS))
    parser.add_argument("--ranks", type=words, default=["2", "4"])
    parser.add_argument("--backends", type=words, default=["shm", "gloo"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--idle", type=float, default=4.0, help="seconds of idling")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.names = list(NAMES)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    results: dict[str, Any] = {}
    print("samples/s are medians; ratios are medians of the rounds' ratios (min .. max), and what is asked")
    heads = "".join(f"{name:>11}" for name in NAMES)
    print(f"{'group':12}{'size':6}{heads}   {'horovod / ddp':30}{'horovod / torch-ddp':30}", flush=True)
    for num_ranks in map(int, options.ranks):
        for backend in options.backends:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(measure, (num_ranks, free_port(), backend, options, folder), nprocs=num_ranks)
                result = json.loads(Path(folder, "result.json").read_text())
            label = f"{num_ranks} x {backend}"
            results[label] = result
            for size, speeds in result["sizes"].items():
                show(label, size, speeds)
            before, after = (100 * result[key] for key in ("idle_before", "idle"))
            verdict = "<" if after < ASKED_IDLE_PERCENT else "not below"
            print(
                f"{label:12}idle: {after:.2f} % of a core ({verdict} {ASKED_IDLE_PERCENT:g}), {before:.2f} before",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
