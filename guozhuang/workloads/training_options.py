"""The options for model and optimizer that all built-in workloads share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from guozhuang.errors import UsageError, explain
from guozhuang.workloads.bert import SIZES, BertSize, default_lr
from guozhuang.workloads.classify import make_optimizer
from guozhuang.workloads.options import option


@dataclass(frozen=True)
class TrainingOptions:
    """The options for model and optimizer; their help texts describe them."""

    model: str = option(
        "bert-tiny",
        str,
        f"{', '.join(SIZES)} from scratch, or the folder of a Hugging Face checkpoint (default bert-tiny)",
    )
    optimizer: str = option(
        "adamw",
        str,
        "adamw (default), or sgd, for speed: BERT from scratch hardly learns by it",
        choices=("adamw", "sgd"),
    )
    lr: float | None = option(
        None,
        float,
        "learning rate, constant (default: 2e-5 for a checkpoint; from scratch, by model; sgd 2e-2)",
        low=0.0,
    )
    weight_decay: float = option(0.01, float, "weight decay (default 0.01)", low=0.0)
    momentum: float = option(0.9, float, "momentum of sgd (default 0.9)", low=0.0, below=1.0)
    fused: bool = option(False, bool, "let torch update all parameters in one fused kernel (default no)")
    batch_size: int = option(8, int, "samples per rank and step (default 8)", low=1)
    dropout: float = option(
        0.0,
        float,
        "dropout probability everywhere in the model (default 0: each process draws its own masks, so with dropout "
        "the results of strategies cannot be compared number for number)",
        low=0.0,
        below=1.0,
    )
    seed: int = option(0, int, "chooses initial weights, held-out samples and the order of data (default 0)", low=0)


def check(options: TrainingOptions, given: Mapping[str, Any]) -> None:
    """Refuse an option that would have no effect.

    Raises:
        UsageError: momentum was given for AdamW.
    """
    if options.optimizer == "adamw" and given.get("momentum") is not None:
        raise UsageError(explain("adamw has no momentum to set", value=options.momentum, fix="say --optimizer sgd"))


def learning_rate(options: TrainingOptions, model: BertSize | Path) -> float:
    """Return the given learning rate, else the model's default."""
    return options.lr if options.lr is not None else default_lr(model, options.optimizer)


def optimizer_maker(options: TrainingOptions, lr: float) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    """Return a function that builds the optimizer for a bare model."""
    return partial(
        make_optimizer,
        name=options.optimizer,
        lr=lr,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        fused=options.fused,
    )


def describe(options: TrainingOptions, lr: float) -> dict[str, str | int | float]:
    """Return the report's lines about optimizer and batches."""
    lines: dict[str, str | int | float] = {"optimizer": options.optimizer + (" (fused)" if options.fused else "")}
    lines["learning rate"] = lr
    lines["weight decay"] = options.weight_decay
    if options.optimizer == "sgd":
        lines["momentum"] = options.momentum
    lines["batch size per rank"] = options.batch_size
    lines["dropout"] = options.dropout
    lines["seed"] = options.seed
    return lines
