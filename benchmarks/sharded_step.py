"""Race `sharded` and `ddp` in shared memory against the peers and against no communication at all, in one run.

    python benchmarks/sharded_step.py [--rows tiny-sgd,mini,mini-fused,base,base-fused] [--rounds 9] [--ranks 2]
        [--contenders none,torch-ddp,ddp,sharded,torch-ddp-shm,single,fsdp2,zero] [--loss-steps 20] [--json FILE]

Ranks with one thread each; the synthetic workload (BERT for classification on random tokens, dropout 0). All contenders of
a row live in the same processes at the same time, each with its own model and optimizer, and take turns: some steps of
one, some of the next, round after round, so that a change of the machine's speed meets all of them. A round's ratio is taken
within the round; the median over rounds is printed. Before the rounds every contender takes the same steps, and the mean
loss over the ranks in the last of them is printed. Milliseconds of a step are medians of rank 0.

torch-ddp, fsdp2 (fully_shard on each block) and zero (ZeroRedundancyOptimizer under DDP) run on gloo, as people run them;
torch-ddp-shm is stock DDP on our group; none is the same ranks exchanging nothing (its ranks train different models); single is
rank 0 alone on the joined batch with as many threads as there are ranks.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.optim import ZeroRedundancyOptimizer

from guozhuang import DistributedDataParallel
from guozhuang.sharding import shard
from guozhuang.sharding.fully import shard_fully
from guozhuang.workloads.base import Workload
from guozhuang.workloads.named import load


@dataclass(frozen=True)
class Row:
    """A line of the table: options of the workload, and steps per turn."""

    told: dict[str, Any]
    steps: int
    asked: dict[tuple[str, str], float]  # least ratio of the first to the second, with 2 ranks


ROWS = {
    "tiny-sgd": Row(
        {"model": "bert-tiny", "optimizer": "sgd"},
        20,
        {("sharded", "torch-ddp"): 1.7, ("ddp", "torch-ddp"): 1.5, ("torch-ddp-shm", "torch-ddp"): 1.3},
    ),
    "mini": Row(
        {"model": "bert-mini"},
        6,
        {
            ("sharded", "torch-ddp"): 1.5,
            ("sharded", "none"): 1.15,
            ("ddp", "torch-ddp"): 1.15,
            ("torch-ddp-shm", "torch-ddp"): 1.1,
        },
    ),
    "mini-fused": Row(
        {"model": "bert-mini", "fused": True},
        6,
        {("sharded", "torch-ddp"): 1.3, ("sharded", "none"): 1.03, ("ddp", "torch-ddp"): 1.15},
    ),
    "base": Row(
        {"model": "bert-base", "batch_size": 4},
        2,
        {("sharded", "torch-ddp"): 1.2, ("sharded", "none"): 1.05, ("ddp", "torch-ddp"): 1.05},
    ),
    "base-fused": Row(
        {"model": "bert-base", "batch_size": 4, "fused": True},
        2,
        {("sharded", "torch-ddp"): 1.25, ("sharded", "none"): 1.03, ("ddp", "torch-ddp"): 1.05},
    ),
}
CONTENDERS = ("none", "torch-ddp", "ddp", "sharded")
ALL = (*CONTENDERS, "torch-ddp-shm", "single", "fsdp2", "zero")


class Contender:
    """One way to train in one rank: model, optimizer, its share of the data."""

    def __init__(self, name: str, model: torch.nn.Module, workload: Workload, gloo: Any) -> None:
        self.name, self._workload = name, workload
        self._alone = name == "single"
        optimizer = workload.optimizer(model)
        if name in ("torch-ddp", "torch-ddp-shm", "zero"):
            group = None if name == "torch-ddp-shm" else gloo
            if name == "zero":
                settings = {
                    k: v for k, v in optimizer.defaults.items() if k in ("lr", "weight_decay", "fused", "momentum")
                }
                settings = {k: v for k, v in settings.items() if v is not None}
                optimizer = ZeroRedundancyOptimizer(model.parameters(), type(optimizer), process_group=gloo, **settings)
            model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        elif name == "ddp":
            model = DistributedDataParallel(model)
        elif name == "sharded":
            model, optimizer = shard(model, optimizer)
        elif name == "fsdp2":
            model, optimizer = shard_fully(model, optimizer, gloo, keep_weights=False)
        self.model, self.optimizer = model, optimizer
        self._idle = self._alone and dist.get_rank() != 0
        data, size, n = workload.train, workload.batch_size, dist.get_world_size()
        shares = range(n) if self._alone else [dist.get_rank()]
        self._batches = [
            workload.collate([data[(step * size + k) * n + rank] for k in range(size) for rank in shares])
            for step in range(20)
        ]
        self._num_steps = 0
        self.times: list[tuple[float, float]] = []

    def step(self) -> torch.Tensor:
        if self._idle:
            return torch.zeros(())
        begin = time.perf_counter()
        loss = self._workload.loss(self.model, self._batches[self._num_steps % len(self._batches)])
        loss.backward()
        between = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append((between - begin, time.perf_counter() - between))
        self._num_steps += 1
        return loss.detach() * (dist.get_world_size() if self._alone else 1)

    def turn(self, steps: int) -> torch.Tensor:
        torch.set_num_threads(dist.get_world_size() if self._alone else 1)
        for _ in range(steps):
            loss = self.step()
        torch.set_num_threads(1)
        return loss


def measure(
    rank: int, n: int, port: int, names: list[str], contending: list[str], rounds: int, loss_steps: int, folder: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("shm", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    gloo = dist.new_group(backend="gloo")
    results = {}
    for label in names:
        row = ROWS[label]
        workload = load("synthetic", row.told)
        torch.manual_seed(0)
        base = workload.model()
        contenders = [Contender(name, copy.deepcopy(base), workload, gloo) for name in contending]
        del base
        losses: dict[str, float] = {}
        for contender in contenders:
            loss = contender.turn(loss_steps)
            dist.all_reduce(loss)
            losses[contender.name] = loss.item() / n
        speeds: dict[str, list[float]] = {c.name: [] for c in contenders}
        for r in range(rounds):
            k = r % len(contenders)
            for contender in contenders[k:] + contenders[:k]:
                if r == 0:
                    contender.times.clear()
                dist.barrier()
                start = time.perf_counter()
                contender.turn(row.steps)
                dist.barrier()
                samples = row.steps * workload.batch_size * n
                speeds[contender.name].append(samples / (time.perf_counter() - start))
        split = {c.name: [1e3 * statistics.median(part) for part in zip(*c.times, strict=True)] for c in contenders}
        results[label] = {"samples_per_s": speeds, "loss": losses, "ms": split}
        del contenders, contender, loss
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def report(results: dict[str, Any], n: int) -> None:
    print(f"{n} ranks; samples/s are medians; ratios are medians of the rounds' ratios (min .. max)")
    for label, result in results.items():
        speeds, asked = result["samples_per_s"], ROWS[label].asked if n == 2 else {}
        print(f"\n{label:15}{'samples/s':>10}   {'x torch-ddp':36}{'x none':36}{'fwd+bwd':>9}{'step':>9} ms   loss")
        for name in speeds:
            line = f"{name:15}{statistics.median(speeds[name]):10.2f}   "
            for under in ("torch-ddp", "none"):
                text = ""
                if under in speeds:
                    ratios = [a / b for a, b in zip(speeds[name], speeds[under], strict=True)]
                    text = f"{statistics.median(ratios):.3f} ({min(ratios):.2f} .. {max(ratios):.2f})"
                    text += f", asked {asked[name, under]}" if (name, under) in asked else ""
                line += f"{text:36}"
            forward_backward, step = result["ms"][name]
            print(f"{line}{forward_backward:9.2f}{step:9.2f}      {result['loss'][name]:.7f}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"of {','.join(ALL)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--loss-steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    contending = options.contenders.split(",")
    if wrong := [name for name in contending if name not in ALL]:
        parser.error(f"no such contenders: {wrong}; choose from {','.join(ALL)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        told = (
            options.ranks,
            free_port(),
            options.rows.split(","),
            contending,
            options.rounds,
            options.loss_steps,
            folder,
        )
        mp.spawn(measure, told, nprocs=options.ranks)
        results = json.loads(Path(folder, "result.json").read_text())
    report(results, options.ranks)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
