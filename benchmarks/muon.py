"""Race Muon under `sharded` against a distributed Muon as it is public, on PyTorch's DDP over gloo, in one run.

    python benchmarks/muon.py [--rows bert-mini,gpt,gpt-4x64] [--rounds 9] [--ranks 2] [--json FILE]
        [--contenders public,torch-ddp,sharded]

Ranks with one thread each. Matrices of the blocks are trained by Muon, everything else by AdamW. Contenders of a row live in
the same processes, each with its own model and optimizers, and take turns; ratios are taken within a round, and the median
over rounds is printed (min .. max).

 - torch-ddp: DDP on gloo, and ``torch.optim.Muon`` as it is: every rank orthogonalizes every matrix.
 - public: DDP on gloo, and the matrices dealt round the ranks, as in the public distributed Muon: sorted by size, each window
   of as many matrices as ranks has one for each; a rank steps its own, then an all_gather of the window brings the new
   weights. The last window is padded. Windows here hold matrices of one shape, which gloo's all_gather needs.
 - sharded: ``shard(model, (muon, adamw))`` on shared memory.

Then the processor time inside Muon's own ``step``: the slowest rank's under `sharded`, over that of one process divided by the
number of ranks. At most 1.15 is asked of it, and at least 1.4 of the whole step over `public`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from sharded_step import free_port
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from guozhuang.sharding import shard
from guozhuang.workloads.named import load

CONTENDERS = ("public", "torch-ddp", "sharded")
VOCABULARY, CONTEXT, WIDTH, DEPTH, HEADS = 8192, 64, 256, 4, 4
BATCHES = {"gpt": 16, "gpt-4x64": 4}  # samples of a rank, of 64 tokens each


class GPT(nn.Module):
    """A decoder of depth 4 on random tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))


class Row:
    """A model with batches for this rank; ``in_blocks`` is a part of the names of the matrices that Muon gets."""

    def __init__(self, label: str) -> None:
        torch.manual_seed(0)
        rank, n = dist.get_rank(), dist.get_world_size()
        self.in_blocks = "blocks" if label in BATCHES else "layer"
        if label in BATCHES:
            self.model: nn.Module = GPT()
            draw = torch.Generator().manual_seed(rank)
            tokens = [torch.randint(VOCABULARY, (BATCHES[label], CONTEXT + 1), generator=draw) for _ in range(8)]
            self.batches: list[Any] = [(each[:, :-1], each[:, 1:]) for each in tokens]
            self.loss: Any = lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        else:
            workload = load("synthetic", {"model": label})
            self.model, self.loss, data = workload.model(), workload.loss, workload.train
            size = workload.batch_size
            picks = [[data[(step * size + k) * n + rank] for k in range(size)] for step in range(8)]
            self.batches = [workload.collate(some) for some in picks]

    def optimizers(self, model: nn.Module) -> tuple[Muon, AdamW]:
        matrices = [p for name, p in model.named_parameters() if self.in_blocks in name and p.dim() == 2]
        known = {id(p) for p in matrices}
        return Muon(matrices, lr=0.002), AdamW([p for p in model.parameters() if id(p) not in known], lr=3e-4)


class PublicMuon:
    """Each rank steps every n-th matrix of its size, and gets the others from their ranks."""

    def __init__(self, inner: Muon, group: Any) -> None:
        self._inner, self._group = inner, group
        self._rank, n = group.rank(), group.size()
        by_size = sorted(inner.param_groups[0]["params"], key=lambda p: (p.numel(), *p.shape))
        self._windows = [
            list(some[i : i + n])
            for _, each in itertools.groupby(by_size, key=lambda p: p.shape)
            for some in [list(each)]
            for i in range(0, len(some), n)
        ]

    def step(self) -> None:
        n = self._group.size()
        inner = self._inner.param_groups[0]
        for window in self._windows:
            padded = [*window, *(torch.empty_like(window[-1]) for _ in range(n - len(window)))]
            if self._rank < len(window):
                inner["params"] = [window[self._rank]]
                self._inner.step()
            with torch.no_grad():
                dist.all_gather(padded, padded[self._rank].detach().clone(), group=self._group)

    def zero_grad(self) -> None:
        for p in itertools.chain(*self._windows):
            p.grad = None


class Contender:
    """One way to train in one rank."""

    def __init__(self, name: str, row: Row, gloo: Any) -> None:
        self.name, self._row, self._num_steps = name, row, 0
        self.in_muon_s = 0.0
        model = copy.deepcopy(row.model)
        optimizers: Any = row.optimizers(model)
        self._time(optimizers[0])
        if name == "sharded":
            model, optimizers = shard(model, optimizers)
        else:
            model = nn.parallel.DistributedDataParallel(model, process_group=gloo)
            if name == "public":
                optimizers = PublicMuon(optimizers[0], gloo), optimizers[1]
        self.model, self._optimizers = model, optimizers

    def _time(self, muon: Muon) -> None:
        step = muon.step

        def timed() -> None:
            begin = time.thread_time()  # of this thread's processor: other programs of the machine do not count
            step()
            self.in_muon_s += time.thread_time() - begin

        muon.step = timed  # type: ignore[method-assign]

    def turn(self, steps: int) -> Tensor:
        for _ in range(steps):
            loss = self._row.loss(self.model, self._row.batches[self._num_steps % len(self._row.batches)])
            loss.backward()
            for optimizer in self._optimizers:
                optimizer.step()
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            self._num_steps += 1
        return loss.detach()


def measure(rank: int, n: int, port: int, labels: list[str], names: list[str], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("shm", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    gloo = dist.new_group(backend="gloo")
    results = {}
    for label in labels:
        row = Row(label)
        contenders = [Contender(name, row, gloo) for name in names]
        losses: dict[str, float] = {}
        for contender in contenders:
            loss = contender.turn(6)
            dist.all_reduce(loss)
            losses[contender.name] = loss.item() / n
        seconds: dict[str, list[float]] = {name: [] for name in names}
        in_muon: dict[str, list[float]] = {name: [] for name in names}
        for r in range(rounds):
            k = r % len(contenders)
            for contender in contenders[k:] + contenders[:k]:
                contender.in_muon_s = 0.0
                dist.barrier()
                start = time.perf_counter()
                contender.turn(4)
                dist.barrier()
                seconds[contender.name].append((time.perf_counter() - start) / 4)
                slowest = torch.tensor([contender.in_muon_s / 4])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                in_muon[contender.name].append(slowest.item())
        results[label] = {"seconds": seconds, "in_muon": in_muon, "loss": losses}
        del contenders, contender
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def ratio(above: list[float], below: list[float], factor: float = 1.0) -> str:
    found = [factor * a / b for a, b in zip(above, below, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} .. {max(found):.2f})"


def report(results: dict[str, Any], n: int) -> None:
    print(f"{n} ranks; milliseconds of a step are medians of the rounds; ratios as said above")
    for label, result in results.items():
        seconds, in_muon = result["seconds"], result["in_muon"]
        print(f"\n{label:12}{'step ms':>9}{'in Muon':>9}   {'speed over public':26}{'over torch-ddp':26}loss")
        for name, own in seconds.items():
            line = f"{name:12}{1e3 * statistics.median(own):9.1f}{1e3 * statistics.median(in_muon[name]):9.1f}   "
            for under in ("public", "torch-ddp"):
                line += f"{ratio(seconds[under], own) if under in seconds else '':26}"
            print(f"{line}{result['loss'][name]:.6f}")
        if {"sharded", "torch-ddp"} <= seconds.keys():
            text = ratio(in_muon["sharded"], in_muon["torch-ddp"], n)
            print(f"Muon's own time under sharded over one process's divided by {n}: {text}, asked at most 1.15")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="bert-mini,gpt,gpt-4x64")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.contenders.split(",")
    if wrong := [name for name in names if name not in CONTENDERS]:
        parser.error(f"no such contenders: {wrong}; choose from {','.join(CONTENDERS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        told = (options.ranks, free_port(), options.rows.split(","), names, options.rounds, folder)
        mp.spawn(measure, told, nprocs=options.ranks)
        results = json.loads(Path(folder, "result.json").read_text())
    report(results, options.ranks)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
