"""A workload small enough that starting its processes takes longer than training it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from guozhuang.distributed import DistributedDataParallel
from guozhuang.workloads import Workload

NUM_SAMPLES = 96
BATCH_SIZE = 4
_NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


def make(options: Mapping[str, str]) -> Workload:
    """A linear classifier; at rank 1's step N ``fail=N`` raises under this package's ddp, ``hang=N`` sleeps.

    With ``norm=batch`` batch normalization stands before it, with ``norm=layer`` layer normalization.
    """
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    classes = (inputs.sum(1) > 0).long()
    steps = iter(range(1, 1000))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        step = next(steps)
        is_second = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        if is_second and step == int(options.get("fail", 0)) and isinstance(model, DistributedDataParallel):
            raise RuntimeError(f"made to fail at step {step}")
        if is_second and step == int(options.get("hang", 0)):
            time.sleep(600)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            accuracy = (model(inputs).argmax(1) == classes).float().mean().item()
        return {"accuracy": accuracy, "forked": float(b"warm.py" in Path("/proc/self/cmdline").read_bytes())}

    return Workload(
        name="tiny",
        model=lambda: (
            nn.Sequential(_NORMS[options["norm"]](8), nn.Linear(8, 2)) if "norm" in options else nn.Linear(8, 2)
        ),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train=TensorDataset(inputs, classes),
        collate=default_collate,
        loss=loss,
        evaluate=evaluate,
        batch_size=BATCH_SIZE,
        details={"model": "linear", **options},
    )
