"""Race this project's pipeline schedules against PyTorch's, and against one process, in one run.

    python benchmarks/pipeline.py [--rounds 9] [--steps 2] [--microbatches 8] [--layers 8] [--hidden 256] [--rows 16]
        [--tokens 64] [--ranks 2] [--contenders one,ours-1f1b,torch-1f1b,...] [--json FILE]

Encoder layers of the given width, dropout 0, AdamW; each rank has one thread. All contenders live in the same processes and
take turns, round after round. "one" is rank 0 alone with the same microbatches, one after the other; "parts" are all ranks at
the same time, each with its own layers, and nothing is sent. The bound of a schedule is the time of "one" divided by the ranks
and by m / (m + p - 1); that of zero bubble is the time of "one" divided by the ranks. A second bound takes the time of "parts"
in the place of "one" divided by the ranks: cores that work at the same time are slower where they share memory and clock.
Milliseconds are medians of a step; ratios are taken within a round, and medians over the rounds are printed. torch-* runs on
the same group.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBVZeroBubble

import guozhuang as gz

CONTENDERS = ("one", "parts", "ours-gpipe", "torch-gpipe", "ours-1f1b", "torch-1f1b", "ours-zero-bubble", "torch-zbv")


class Encoder(nn.Module):
    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, hidden // 64, 4 * hidden, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


loss_of = nn.functional.mse_loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def one(model: nn.Module, m: int, x: Tensor, y: Tensor) -> Callable[[], Any]:
    optimizer = adamw(model.parameters())

    def step() -> None:
        for rows, target in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            (loss_of(model(rows), target) * (len(rows) / len(x))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step if dist.get_rank() == 0 else lambda: None


def parts(model: nn.Module, m: int, x: Tensor, y: Tensor) -> Callable[[], Any]:
    rank, size, num = dist.get_rank(), dist.get_world_size(), len(model.layers)
    mine = nn.Sequential(*list(model.layers)[num * rank // size : num * (rank + 1) // size])
    optimizer = adamw(mine.parameters())

    def step() -> None:
        for rows, target in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            loss_of(mine(rows.detach().requires_grad_(rank > 0)), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(name: str, model: nn.Module, m: int, x: Tensor, y: Tensor) -> Callable[[], Any]:
    told: dict[str, Any] = {"microbatches": m, "schedule": name}
    cut = [f"layers.{len(model.layers) * r // dist.get_world_size()}" for r in range(1, dist.get_world_size())]
    if name != "gpipe":
        told["loss"] = loss_of
    wrapped, optimizer = gz.prepare(model, adamw(model.parameters()), "pipeline", cut=cut, **told)

    def step() -> None:
        if name == "gpipe":
            loss_of(wrapped(x), y).backward()
        else:
            wrapped.step(x, y)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchs(name: str, model: nn.Module, m: int, x: Tensor, y: Tensor) -> Callable[[], Any]:
    rank, size, layers = dist.get_rank(), dist.get_world_size(), list(model.layers)
    num_stages = 2 * size if name == "zbv" else size
    mine = [rank, num_stages - 1 - rank] if name == "zbv" else [rank]
    parts = [nn.Sequential(*layers[len(layers) * s // num_stages : len(layers) * (s + 1) // num_stages]) for s in mine]
    stages = [PipelineStage(part, s, num_stages, x.device) for part, s in zip(parts, mine, strict=True)]
    if name == "zbv":
        schedule: Any = ScheduleZBVZeroBubble(stages, m, loss_of)
    else:
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](stages[0], m, loss_of)
    optimizer = adamw([p for part in parts for p in part.parameters()])

    def step() -> None:
        given = (x,) if 0 in mine else ()
        schedule.step(*given, target=y if num_stages - 1 in mine else None)
        optimizer.step()
        optimizer.zero_grad()

    return step


def contend(name: str, model: nn.Module, m: int, x: Tensor, y: Tensor) -> Callable[[], Any]:
    who, _, schedule = name.partition("-")
    if who in ("one", "parts"):
        return (one if who == "one" else parts)(model, m, x, y)
    return (ours if who == "ours" else torchs)(schedule, model, m, x, y)


def measure(rank: int, told: argparse.Namespace, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(told.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(told.ranks)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    gz.init()
    torch.manual_seed(0)
    base = Encoder(told.hidden, told.layers)
    x, y = torch.randn(2, told.rows, told.tokens, told.hidden)
    names = told.contenders.split(",")
    steps = {name: contend(name, copy.deepcopy(base), told.microbatches, x, y) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for r in range(told.rounds + 1):
        k = r % len(names)
        for name in names[k:] + names[:k]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(told.steps):
                steps[name]()
            dist.barrier()
            if r:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - start) / told.steps)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(times))
    gz.shutdown()


def report(times: dict[str, list[float]], m: int, p: int) -> None:
    print(f"{p} ranks, {m} microbatches; ms are medians of a step, ratios medians of the rounds' ratios (min .. max)")
    print(f"{'':18}{'ms':>8}   {'share of its bound':26}{'of that with all cores':26}{'speed / torch-1f1b':26}")
    for name, each in times.items():
        line = f"{name:18}{statistics.median(each):8.1f}   "
        bubble = 1.0 if "z" in name else (m + p - 1) / m
        bounds = [[t / ranks * bubble for t in times.get(of, [])] for of, ranks in (("one", p), ("parts", 1))]
        for numerators in [*bounds, times.get("torch-1f1b", [])] if name not in ("one", "parts") else []:
            ratios = [a / b for a, b in zip(numerators, each, strict=False)]
            text = f"{statistics.median(ratios):.3f} ({min(ratios):.2f} .. {max(ratios):.2f})" if ratios else ""
            line += f"{text:26}"
        print(line.rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {
        "rounds": 9,
        "steps": 2,
        "microbatches": 8,
        "layers": 8,
        "hidden": 256,
        "rows": 16,
        "tokens": 64,
        "ranks": 2,
    }
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    if wrong := [name for name in told.contenders.split(",") if name not in CONTENDERS]:
        parser.error(f"no such contenders: {wrong}; choose from {','.join(CONTENDERS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (told, port, folder), nprocs=told.ranks)
        times = json.loads(Path(folder, "result.json").read_text())
    report(times, told.microbatches, told.ranks)
    if told.json:
        told.json.write_text(json.dumps(times, indent=1))


if __name__ == "__main__":
    main()
