"""The workload that follows from the options for model and optimizer, which all built-in workloads share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from guozhuang.errors import UsageError, explain
from guozhuang.workloads import bert, classify
from guozhuang.workloads.arguments import TrainingOptions
from guozhuang.workloads.base import Workload
from guozhuang.workloads.tokens import is_installed, missing


def find_model(options: TrainingOptions, given: Mapping[str, Any], length: int, flag: str) -> bert.BertSize | Path:
    """Return the size or the checkpoint of the chosen model; raise if other options do not fit it.

    Args:
        options: all options, with defaults filled in.
        given: the options that the user gave.
        length: the most tokens of a sample.
        flag: the option that sets ``length``, for errors.

    Raises:
        UsageError: no such model, too many tokens for it, an option that would have no effect, or no transformers, which all
            models need.
    """
    if not is_installed("transformers"):  # looked for and not imported, which takes seconds
        raise missing("transformers")
    model = bert.find(options.model)
    if not isinstance(model, Path) and length > bert.MAX_POSITIONS:
        what, fix = (
            f"{flag} is beyond the {bert.MAX_POSITIONS} positions of the model",
            f"give at most {bert.MAX_POSITIONS}",
        )
        raise UsageError(explain(what, value=length, fix=fix))
    if options.optimizer == "adamw" and given.get("momentum") is not None:
        raise UsageError(explain("adamw has no momentum to set", value=options.momentum, fix="say --optimizer sgd"))
    return model


def classification(
    name: str,
    options: TrainingOptions,
    model: bert.BertSize | Path,
    *,
    train: Dataset[classify.Sample],
    held_out: classify.TokenDataset | None,
    num_classes: int,
    vocabulary_size: int,
    pad_id: int,
    max_length: int,
    pad_to: int | None = None,
    details: Mapping[str, str | int | float],
) -> Workload:
    """Build the workload in which a BERT learns to classify token sequences.

    Args:
        name: the name in the report.
        options: the options for model and optimizer.
        model: the result of ``find_model``.
        train: the training samples.
        held_out: the samples to measure accuracy on; None: only speed is measured.
        num_classes: number of classes.
        vocabulary_size: number of tokens.
        pad_id: the token that fills a batch behind the end of a sequence.
        max_length: the most tokens of a sample.
        pad_to: pad each batch to so many tokens; None: to its longest sequence.
        details: lines of the report about the data.

    Raises:
        UsageError: the checkpoint cannot be used with these options.
    """
    lr = options.lr if options.lr is not None else bert.default_lr(model, options.optimizer)
    if isinstance(model, Path):
        origin, num_parameters = (
            "pretrained",
            bert.count_checkpoint_parameters(model, num_classes, max_length, vocabulary_size),
        )
    else:
        origin, num_parameters = "from scratch", bert.num_parameters(model, vocabulary_size, num_classes)
    return Workload(
        name=name,
        model=partial(
            bert.build,
            model,
            num_classes=num_classes,
            vocabulary_size=vocabulary_size,
            pad_id=pad_id,
            dropout=options.dropout,
            max_length=max_length,
        ),
        optimizer=partial(_optimizer, options, lr),
        train=train,
        collate=partial(classify.collate, pad_id=pad_id, length=pad_to),
        loss=classify.loss,
        evaluate=None if held_out is None else partial(classify.evaluate, data=held_out, pad_id=pad_id),
        batch_size=options.batch_size,
        details={
            "model": f"{options.model} ({origin})",
            "parameters": num_parameters,
            **details,
            "optimizer": options.optimizer + (" (fused)" if options.fused else ""),
            "learning rate": lr,
            "weight decay": options.weight_decay,
            **({"momentum": options.momentum} if options.optimizer == "sgd" else {}),
            "batch size per rank": options.batch_size,
            "dropout": options.dropout,
            "seed": options.seed,
        },
    )


def _optimizer(options: TrainingOptions, lr: float, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return AdamW or SGD over all trainable parameters, in one group, with torch's other defaults."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = options.fused or None  # None lets torch choose the implementation; False would also disable foreach
    if options.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=options.weight_decay, fused=fused)
    return torch.optim.SGD(parameters, lr=lr, momentum=options.momentum, weight_decay=options.weight_decay, fused=fused)
