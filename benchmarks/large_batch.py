"""Loss and accuracy on real text after the same samples with batches of 32 and of 2,048, each optimizer at its best rate.

    python -m benchmarks.large_batch [--data FOLDER] [--batch 2048] [--samples 98304] [--seeds 3]
        [--optimizers adamw,lamb,sgd,lars] [--json FILE]

A small BERT (2 layers of 64, 16 tokens) is trained from scratch on the text workload of convergence.py (AG News, or the
embedded docstrings), in one process that adds up the gradients of parts of a batch: what any number of ranks computes. All runs
see the same samples in the same order, so a batch 64 times as large makes one 64th of the steps. The learning rate rises over
the first tenth of the steps and falls to 0 linearly.

For each optimizer and batch three learning rates, a factor of 2 apart, are tried with seed 0, and further ones beside the best
while that is at an end, six at most; the best is the one of the least loss on the held-out samples. Rates of the large batch
are those of batch 32 times sqrt(batch / 32). With the best rate of batch 32 the large batch also runs

 - unchanged: with that rate, and no warm-up;
 - linear: with that rate times batch / 32, after the warm-up.

The table shows means over seeds that were not searched with. Runs that --json FILE holds already are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

import guozhuang as gz
from benchmarks.convergence import workload_options
from guozhuang.cost.laws import noise_scale_of
from guozhuang.workloads import Workload, load

BASE_BATCH, PART, WARM_UP = 32, 256, 0.1  # samples; at most so many in one backward; share of the steps
MAX_LENGTH, VOCABULARY, WIDTH = 16, 2000, 64
MAX_RATES = 6
DECAY = 0.01
# Each with the rate for batch 32 with which the search begins.
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], float]] = {
    "adamw": (lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=DECAY, fused=True), 2e-3),
    "lamb": (lambda p, lr: gz.optim.LAMB(p, lr=lr, weight_decay=DECAY), 5e-3),
    "sgd": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=1e-4), 0.1),
    "lars": (lambda p, lr: gz.optim.LARS(p, lr=lr, momentum=0.9, weight_decay=1e-4), 0.5),
}


def schedule(optimizer: Optimizer, rule: str, batch: int, steps: int) -> LRScheduler:
    if rule == "unchanged":
        return LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    warm_up = max(1, int(WARM_UP * steps))
    rises: LRScheduler = gz.optim.ScaledWarmupLR(optimizer, batch, BASE_BATCH, rule=rule, warmup_steps=warm_up)
    if batch == BASE_BATCH:  # rises from the scaled rate of batch 32, so for that itself not at all
        rises = LinearLR(optimizer, 1.0 / warm_up, 1.0, total_iters=warm_up)
    falls = LinearLR(optimizer, 1.0, 0.0, total_iters=max(1, steps - warm_up))
    return SequentialLR(optimizer, [rises, falls], milestones=[warm_up])


def samples_in_order(count: int, seed: int) -> Iterator[int]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=draw).tolist()


def train(workload: Workload, kind: str, batch: int, rule: str, lr: float, seed: int, num_samples: int) -> Any:
    """Train once, and return what it came to."""
    torch.manual_seed(seed)
    shown = workload.model()
    shown.config.hidden_size, shown.config.intermediate_size = WIDTH, 4 * WIDTH
    model = type(shown)(shown.config).train()
    optimizer = OPTIMIZERS[kind][0](model.parameters(), lr)
    steps, part = num_samples // batch, min(batch, PART)
    scheduler, order = schedule(optimizer, rule, batch, steps), samples_in_order(len(workload.train), seed)
    losses, began, own, averaged, num_parts = [], time.process_time(), 0.0, 0.0, batch // part
    for _ in range(steps):
        loss_of_step = 0.0
        for number in range(num_parts):
            samples = [workload.train[i] for i in itertools.islice(order, part)]
            loss = workload.loss(model, workload.collate(samples)) / num_parts
            loss.backward()
            loss_of_step += float(loss.detach())
            if number == 0 < num_parts - 1:  # the first part's own gradient, for the noise scale
                own += float(squared_norm(model)) * num_parts**2
        averaged += float(squared_norm(model)) if num_parts > 1 else 0.0
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss_of_step)
        if not math.isfinite(loss_of_step):
            break
    noise = noise_scale_of(own, averaged, num_parts, part) if num_parts > 1 and math.isfinite(own) else None
    assert workload.evaluate is not None
    return {
        **{name: float(value) for name, value in workload.evaluate(model).items()},
        "steps": steps,
        "training loss": statistics.fmean(losses[-max(1, steps // 20) :]),
        "noise scale": noise,
        "cpu seconds": time.process_time() - began,
    }


def squared_norm(model: torch.nn.Module) -> torch.Tensor:
    norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
    return torch.stack(norms).square().sum()


class Runs:
    """What was trained so far, kept in a file."""

    def __init__(self, workload: Workload, num_samples: int, file: Path | None) -> None:
        self.workload, self.num_samples, self.file = workload, num_samples, file
        self.done: list[dict[str, Any]] = json.loads(file.read_text()) if file is not None and file.exists() else []

    def of(self, kind: str, batch: int, rule: str, lr: float, seed: int) -> dict[str, Any]:
        """Return what a run came to; train if none like it was done."""
        told = {"optimizer": kind, "batch": batch, "rule": rule, "lr": lr, "seed": seed, "samples": self.num_samples}
        for run in self.done:
            if told.items() <= run.items():
                return run
        run = told | train(self.workload, kind, batch, rule, lr, seed, self.num_samples)
        text = f"{kind:6}{batch:6} {rule:10} lr {lr:<9.3g} seed {seed}: held-out loss {run['loss']:.4f}"
        print(f"{text}, accuracy {100 * run['accuracy']:.1f} %, {run['cpu seconds']:.0f} s", flush=True)
        self.done.append(run)
        if self.file is not None:
            self.file.write_text(json.dumps(self.done, indent=1))
        return run

    def best_rate(self, kind: str, batch: int) -> float:
        """Return the rate of the least loss, in terms of batch 32."""

        def loss(rate: float) -> float:
            found = self.of(kind, batch, "sqrt", rate, 0)["loss"]
            return found if math.isfinite(found) else math.inf

        first = OPTIMIZERS[kind][1]
        rates = [first / 2, first, first * 2]
        while (best := min(rates, key=loss)) in (rates[0], rates[-1]) and len(rates) < MAX_RATES:
            rates = [best / 2, *rates] if best == rates[0] else [*rates, best * 2]
        return best


def row(runs: Runs, name: str, found: list[dict[str, Any]]) -> str:
    scale = math.sqrt(found[0]["batch"] / BASE_BATCH) if found[0]["rule"] == "sqrt" else 1.0
    scale = found[0]["batch"] / BASE_BATCH if found[0]["rule"] == "linear" else scale
    losses, noises = [run["loss"] for run in found], [run["noise scale"] for run in found if run["noise scale"]]
    spread = max(losses) - min(losses)
    return (
        f"{name:34}{found[0]['batch']:6}{found[0]['steps']:7}{found[0]['lr'] * scale:10.3g}{statistics.fmean(losses):9.4f}"
        f" +-{spread / 2:.4f}{100 * statistics.fmean(run['accuracy'] for run in found):9.1f}%"
        f"{statistics.fmean(run['training loss'] for run in found):10.4f}"
        + (f"{statistics.fmean(noises):9.0f}" if noises else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--samples", type=int, default=98_304)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = options.optimizers.split(",")
    if wrong := [each for each in kinds if each not in OPTIMIZERS]:
        parser.error(f"no such optimizers: {wrong}; choose from {','.join(OPTIMIZERS)}")
    if options.batch % PART or not PART <= options.batch <= options.samples or options.seeds < 1:
        parser.error(f"--batch must be a multiple of {PART}, and at most --samples; --seeds at least 1")
    told: dict[str, Any] = {"model": "bert-tiny", "batch_size": BASE_BATCH, "lr": 1e-3}
    with tempfile.TemporaryDirectory() as folder:
        given = workload_options(options.data, Path(folder), argparse.Namespace(**told))
        given |= {"dropout": 0.1, "max_length": MAX_LENGTH, "vocab_size": VOCABULARY, "seed": 0}
        runs = Runs(load("text", given, Path(folder)), options.samples, options.json)
        rows = []
        for kind in kinds:
            small, large = (runs.best_rate(kind, batch) for batch in (BASE_BATCH, options.batch))
            chosen = {
                f"{kind}": (BASE_BATCH, "sqrt", small),
                f"{kind}, unchanged": (options.batch, "unchanged", small),
                f"{kind}, linear, warm-up": (options.batch, "linear", small),
                f"{kind}, square root, warm-up": (options.batch, "sqrt", small),
                f"{kind}, best rate, warm-up": (options.batch, "sqrt", large),
            }
            for name, (batch, rule, lr) in chosen.items():
                found = [runs.of(kind, batch, rule, lr, seed) for seed in range(1, 1 + options.seeds)]
                rows.append(row(runs, name, found))
        columns = {"batch": 6, "steps": 7, "rate": 10, "loss": 9, "": 8, "accuracy": 10, "training": 10, "noise": 9}
        head = f"{'optimizer':34}" + "".join(name.rjust(width) for name, width in columns.items())
        print("", head, *rows, sep="\n")


if __name__ == "__main__":
    main()
