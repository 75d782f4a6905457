"""The synthetic workload: the text workload's models on random tokens, to measure speed only; nothing can be learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from guozhuang.workloads import bert, classify, options
from guozhuang.workloads.arguments import SyntheticOptions
from guozhuang.workloads.base import Workload
from guozhuang.workloads.training_options import classification, find_model

# The vocabulary size of the published BERT models, so that memory and traffic are the same as theirs.
_VOCABULARY_SIZE = 30522
_PAD_ID = 0


class RandomTokens(Dataset[classify.Sample]):
    """A data set of random samples, each generated on access from the seed and the sample's number alone."""

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


def load(given: Mapping[str, Any], cache: Path | None = None) -> Workload:
    """Build the synthetic workload; the only file that may be read is a checkpoint's configuration.

    Args:
        given: values by field of SyntheticOptions; missing ones take their defaults.
        cache: unused; every built-in workload has this argument.

    Raises:
        UsageError: options that cannot work.
    """
    chosen = options.read(SyntheticOptions, given)
    model = find_model(chosen, given, chosen.seq_len, "--seq-len")
    vocabulary_size, pad_id = _VOCABULARY_SIZE, _PAD_ID
    if isinstance(model, Path):
        config = bert.checkpoint_config(model, chosen.num_classes, chosen.dropout, chosen.seq_len)
        vocabulary_size, pad_id = int(config.vocab_size), int(config.pad_token_id or 0)
    return classification(
        "synthetic",
        chosen,
        model,
        train=RandomTokens(chosen.num_samples, chosen.seq_len, chosen.num_classes, vocabulary_size, chosen.seed),
        held_out=None,
        num_classes=chosen.num_classes,
        vocabulary_size=vocabulary_size,
        pad_id=pad_id,
        max_length=chosen.seq_len,
        details={
            "data": "random tokens: for speed alone, there is nothing to learn",
            "classes": chosen.num_classes,
            "training samples": chosen.num_samples,
            "vocabulary": vocabulary_size,
            "sequence length": chosen.seq_len,
        },
    )
