"""Race `ddp` against `torch-ddp` and `none`: samples/s of a training step, in alternating rounds in one run.

    python benchmarks/step.py [--sizes tiny,mini,base] [--rounds 7] [--json FILE]

Two ranks with one thread each, over gloo; BERT for classification from transformers on random tokens, dropout 0. All three
variants live in the same processes at the same time, each with its own model and optimizer, and take turns: some steps of one,
some of the next, round after round, so that a change of the machine's speed meets all of them. A round's ratio is taken within
the round; the median over rounds is printed. At base size the reducer's own Python time is measured too: the time in its hooks
and its callback less the time in tensor operations and waits.
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
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from guozhuang import DistributedDataParallel

RANKS = 2
VOCABULARY, TOKENS, CLASSES = 30522, 64, 4


@dataclass(frozen=True)
class Size:
    """A row of the table."""

    layers: int
    hidden: int
    heads: int
    batch: int
    optimizer: str
    steps: int


SIZES = {
    "tiny": Size(2, 128, 2, 8, "sgd", 20),
    "mini": Size(4, 256, 4, 8, "adamw", 8),
    "base": Size(12, 768, 12, 4, "adamw", 2),
}


def make_model(size: Size) -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


class Variant:
    """One contender in one rank: model, optimizer, its batch."""

    def __init__(self, name: str, model: torch.nn.Module, size: Size, rank: int) -> None:
        wrap = {"ddp": DistributedDataParallel, "torch-ddp": TorchDDP, "none": lambda m: m}
        self.name = name
        self.model = wrap[name](model)
        kind = torch.optim.SGD if size.optimizer == "sgd" else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(rank)
        self.ids = torch.randint(0, VOCABULARY, (size.batch, TOKENS), generator=generator)
        self.mask = torch.ones_like(self.ids)
        self.labels = torch.randint(0, CLASSES, (size.batch,), generator=generator)

    def step(self) -> None:
        logits = self.model(input_ids=self.ids, attention_mask=self.mask).logits
        torch.nn.functional.cross_entropy(logits, self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class OwnTime:
    """Time inside the reducer that is neither a tensor operation nor a wait nor the start of a collective."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.inside = self.outside = 0.0
        self._depth = 0
        reducer: Any = model.reducer
        for name in ("on_gradient", "_open", "_finish", "before_forward", "after_forward"):
            setattr(reducer, name, self._entering(getattr(reducer, name)))
        selection = reducer._selection
        selection.connect(lambda index: lambda *_: reducer.on_gradient(index))
        for name in ("fill", "fill_together"):
            setattr(selection.views, name, self._leaving(getattr(selection.views, name)))
        reducer._wait = self._leaving(reducer._wait)
        reducer.use(_TimedExchange(reducer.exchange, self._leaving(reducer.exchange.start)))

    def _entering(self, fn: Any) -> Any:
        def call(*args: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return fn(*args)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.inside += time.perf_counter() - start

        return call

    def _leaving(self, fn: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                self.outside += time.perf_counter() - start

        return call


class _TimedExchange:
    def __init__(self, inner: Any, start: Any) -> None:
        self._inner = inner
        self.start = start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def measure(rank: int, port: int, names: list[str], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    results: dict[str, Any] = {}
    for label in names:
        size = SIZES[label]
        base = make_model(size)
        variants = [Variant(name, copy.deepcopy(base), size, rank) for name in ("none", "torch-ddp", "ddp")]
        for variant in variants:
            for _ in range(3):
                variant.step()
        speeds: dict[str, list[float]] = {v.name: [] for v in variants}
        for r in range(rounds):
            for variant in variants[r % 3 :] + variants[: r % 3]:
                dist.barrier()
                start = time.perf_counter()
                for _ in range(size.steps):
                    variant.step()
                dist.barrier()
                speeds[variant.name].append(size.steps * size.batch * RANKS / (time.perf_counter() - start))
        results[label] = {"samples_per_s": speeds}
        if label == "base":
            ours = variants[-1]
            clock = OwnTime(ours.model)
            start = time.perf_counter()
            for _ in range(4):
                ours.step()
            results[label]["own_python_share"] = (clock.inside - clock.outside) / (time.perf_counter() - start)
        del variants, base
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def ratio(over: list[float], under: list[float]) -> tuple[float, float, float]:
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="tiny,mini,base")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (free_port(), options.sizes.split(","), options.rounds, folder), nprocs=RANKS)
        results = json.loads(Path(folder, "result.json").read_text())
    print("samples/s are medians; ratios are medians of the rounds' ratios (min .. max)")
    print(f"{'size':6}{'none':>9}{'torch-ddp':>11}{'ddp':>9}   {'ddp / torch-ddp':24}{'ddp / none':24}")
    for label, result in results.items():
        speeds = result["samples_per_s"]
        row = f"{label:6}" + "".join(
            f"{statistics.median(speeds[name]):>{width}.1f}"
            for name, width in (("none", 9), ("torch-ddp", 11), ("ddp", 9))
        )
        for under in ("torch-ddp", "none"):
            median, low, high = ratio(speeds["ddp"], speeds[under])
            row += f"   {f'{median:.3f} ({low:.3f} .. {high:.3f})':21}"
        print(row)
        if "own_python_share" in result:
            print(f"       the reducer's own Python time: {100 * result['own_python_share']:.2f} % of a step")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
