"""Accuracy on real text after the same samples with batches of 32 to 2,048, with and without LAMB, scaling and warm-up.

    python -m benchmarks.large_batch [--data FOLDER] [--batches 32,256,2048] [--samples 131072] [--seeds 1] [--json FILE]
        [--recipes adamw,adamw-scaled,lamb-scaled] [--model bert-tiny] [--lr 1e-3] [--lamb-lr 2e-2]

A small BERT is trained from scratch on the text workload of convergence.py (AG News, or the embedded docstrings), in one
process that adds up the gradients of parts of a batch: what any number of ranks computes. All recipes see the same number of
samples, so a batch 64 times as large makes one 64th of the steps. Learning rates fall to 0 linearly after the warm-up. Recipes:

 - adamw: AdamW with the learning rate of batch 32, whatever the batch, and no warm-up;
 - adamw-scaled: AdamW, the learning rate times sqrt(batch / 32), after a warm-up in the first tenth of the steps;
 - lamb-scaled: LAMB with the same scaling and warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

import guozhuang as gz
from benchmarks.convergence import workload_options
from guozhuang.exchange.noise_scale import noise_scale_of
from guozhuang.workloads import load

BASE_BATCH, PART, WARM_UP = 32, 32, 0.1  # samples; samples of one backward; share of the steps
RECIPES = ("adamw", "adamw-scaled", "lamb-scaled")


def schedule(optimizer: torch.optim.Optimizer, recipe: str, batch: int, steps: int) -> LRScheduler:
    if not recipe.endswith("scaled"):
        return LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    warm_up = max(1, int(WARM_UP * steps))
    rises = gz.optim.ScaledWarmupLR(optimizer, batch, BASE_BATCH, rule="sqrt", warmup_steps=warm_up)
    falls = LinearLR(optimizer, 1.0, 0.0, total_iters=max(1, steps - warm_up))
    return SequentialLR(optimizer, [rises, falls], milestones=[warm_up])


def train(
    recipe: str, batch: int, seed: int, told: dict[str, Any], cache: Path, options: argparse.Namespace
) -> dict[str, float]:
    """Train by one recipe, and return what it came to."""
    workload = load("text", told | {"seed": 0}, cache)
    torch.manual_seed(seed)
    model = workload.model()
    if recipe.startswith("lamb"):
        optimizer: torch.optim.Optimizer = gz.optim.LAMB(model.parameters(), lr=options.lamb_lr)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    steps = options.samples // batch
    scheduler = schedule(optimizer, recipe, batch, steps)
    draw = torch.Generator().manual_seed(seed)
    order: list[int] = []
    losses, began, own, averaged = [], time.perf_counter(), 0.0, 0.0
    num_parts = batch // PART
    for _ in range(steps):
        loss_of_step = 0.0
        for number in range(num_parts):
            if len(order) < PART:
                order = torch.randperm(len(workload.train), generator=draw).tolist()
            samples, order = [workload.train[i] for i in order[:PART]], order[PART:]
            loss = workload.loss(model, workload.collate(samples)) / num_parts
            loss.backward()
            loss_of_step += float(loss.detach())
            if number == 0:  # the first part's own gradient, for the noise scale
                own += float(squared_norm(model)) * num_parts**2
        averaged += float(squared_norm(model))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss_of_step)
    noise = noise_scale_of(own, averaged, num_parts, PART) if num_parts > 1 else None
    assert workload.evaluate is not None
    return {
        **{name: float(value) for name, value in workload.evaluate(model).items()},
        "steps": steps,
        "loss": statistics.fmean(losses[-max(1, steps // 20) :]),
        "noise scale": float("nan") if noise is None else noise,
        "seconds": time.perf_counter() - began,
    }


def squared_norm(model: torch.nn.Module) -> torch.Tensor:
    norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
    return torch.stack(norms).square().sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--batches", default="32,256,2048")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--samples", type=int, default=131_072)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--model", default="bert-tiny")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lamb-lr", type=float, default=2e-2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    batches, recipes = [int(each) for each in options.batches.split(",")], options.recipes.split(",")
    if wrong := [each for each in recipes if each not in RECIPES]:
        parser.error(f"no such recipes: {wrong}; choose from {','.join(RECIPES)}")
    if wrong_batches := [each for each in batches if each % PART or not PART <= each <= options.samples]:
        parser.error(f"batches are multiples of {PART}, and at most --samples: {wrong_batches}")
    options.batch_size = PART
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        told = workload_options(options.data, Path(folder), options)
        told["dropout"] = 0.1
        print(f"{'recipe':14}{'batch':>7}{'steps':>7}{'accuracy':>10}{'loss':>8}{'noise scale':>13}{'seconds':>9}")
        for batch in batches:
            for recipe in recipes:
                found = [train(recipe, batch, seed, told, Path(folder), options) for seed in range(options.seeds)]
                results.append({"recipe": recipe, "batch": batch, "seeds": found})
                mean = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
                print(
                    f"{recipe:14}{batch:7}{mean['steps']:7.0f}{100 * mean['accuracy']:9.1f}%{mean['loss']:8.4f}"
                    f"{mean['noise scale']:13.0f}{mean['seconds']:9.0f}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
