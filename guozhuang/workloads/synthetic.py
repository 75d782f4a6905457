"""The synthetic workload: the same models on random tokens, to measure speed only; nothing can be learned from it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from guozhuang.errors import UsageError, explain
from guozhuang.workloads import bert, classify, options
from guozhuang.workloads.base import Workload
from guozhuang.workloads.options import OptionValue, option
from guozhuang.workloads.training_options import TrainingOptions, check, describe, learning_rate, optimizer_maker

# The vocabulary size of the published BERT models, so that memory and traffic are the same as theirs.
_VOCABULARY_SIZE = 30522
_PAD_ID = 0


@dataclass(frozen=True)
class SyntheticOptions(TrainingOptions):
    """The options of the synthetic workload: those of its data, added to those of model and optimizer."""

    seq_len: int = option(64, int, "tokens of every sample (default 64)", low=1)
    num_classes: int = option(4, int, "number of classes (default 4)", low=2)
    num_samples: int = option(10_000, int, "samples of an epoch (default 10000)", low=1)


class RandomTokens(Dataset[classify.Sample]):
    """Random samples, generated on access, each from the seed and its own number alone."""

    def __init__(self, num_samples: int, seq_len: int, num_classes: int, vocabulary_size: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seq_len = seq_len
        self.num_classes = num_classes
        self.vocabulary_size = vocabulary_size
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> classify.Sample:
        index = range(self.num_samples)[index]
        draw = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        label = int(draw.integers(self.num_classes))
        return draw.integers(_PAD_ID + 1, self.vocabulary_size, self.seq_len, dtype=np.int32), label


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Add this workload's options to a parser or to one of its groups; see ``options.add_arguments``."""
    options.add_arguments(SyntheticOptions, parser)


def options_from(namespace: argparse.Namespace) -> dict[str, OptionValue]:
    """Return this workload's options from a command line; JSON can represent them. UsageError for an invalid value.

    Paths are made absolute.
    """
    given = options.given(SyntheticOptions, namespace)
    if "model" in given and given["model"] not in bert.SIZES:
        given["model"] = str(bert.find(str(given["model"])))
    return given


def load(given: Mapping[str, Any], cache: Path | None = None) -> Workload:
    """Build the workload; nothing is read or written.

    Args:
        given: values by field of SyntheticOptions; missing ones take their defaults.
        cache: unused; every built-in workload has this argument.

    Raises:
        UsageError: options that cannot work.
    """
    chosen = options.read(SyntheticOptions, given)
    check(chosen, given)
    model = bert.find(chosen.model)
    if isinstance(model, Path):
        config = bert.checkpoint_config(model, chosen.num_classes, chosen.dropout, chosen.seq_len)
        vocabulary_size = int(config.vocab_size)
        pad_id = int(config.pad_token_id or 0)
        num_parameters = bert.count_checkpoint_parameters(model, chosen.num_classes, chosen.seq_len, vocabulary_size)
    elif chosen.seq_len > bert.MAX_POSITIONS:
        raise UsageError(
            explain(
                f"--seq-len is beyond the {bert.MAX_POSITIONS} positions of the model",
                value=chosen.seq_len,
                fix=f"give at most {bert.MAX_POSITIONS}",
            )
        )
    else:
        vocabulary_size, pad_id = _VOCABULARY_SIZE, _PAD_ID
        num_parameters = bert.num_parameters(model, vocabulary_size, chosen.num_classes)
    lr = learning_rate(chosen, model)
    details: dict[str, str | int | float] = {
        "model": f"{chosen.model} (pretrained)" if isinstance(model, Path) else f"{chosen.model} (from scratch)",
        "parameters": num_parameters,
        "data": "random tokens: for speed alone, there is nothing to learn",
        "classes": chosen.num_classes,
        "training samples": chosen.num_samples,
        "vocabulary": vocabulary_size,
        "sequence length": chosen.seq_len,
        **describe(chosen, lr),
    }
    return Workload(
        name="synthetic",
        model=partial(
            bert.build,
            model,
            num_classes=chosen.num_classes,
            vocabulary_size=vocabulary_size,
            pad_id=pad_id,
            dropout=chosen.dropout,
            max_length=chosen.seq_len,
        ),
        optimizer=optimizer_maker(chosen, lr),
        train=RandomTokens(chosen.num_samples, chosen.seq_len, chosen.num_classes, vocabulary_size, chosen.seed),
        collate=partial(classify.collate, pad_id=pad_id),
        loss=classify.loss,
        evaluate=None,
        batch_size=chosen.batch_size,
        details=details,
    )
