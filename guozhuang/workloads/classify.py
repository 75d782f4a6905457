"""Text classification on token sequences: batches, the loss, and the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from guozhuang.workloads.tokens import Ragged

Sample = tuple[npt.NDArray[np.int32], int]
Batch = dict[str, torch.Tensor]

_EVALUATION_BATCH_SIZE = 64


class TokenDataset(Dataset[Sample]):
    """Token sequences and their classes; ``[i]`` is (int32 array of its tokens, class number).

    Args:
        sequences: any number of them.
        classes: int64, one per sequence.
    """

    def __init__(self, sequences: Ragged, classes: npt.NDArray[np.int64]) -> None:
        assert len(sequences.ends) == len(classes)
        self.sequences = sequences
        self.classes = classes

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> Sample:
        begin = int(self.sequences.ends[index - 1]) if index > 0 else 0
        return self.sequences.tokens[begin : int(self.sequences.ends[index])], int(self.classes[index])

    def length(self, index: int) -> int:
        """Return the number of tokens of a sequence."""
        return int(self.sequences.ends[index]) - (int(self.sequences.ends[index - 1]) if index > 0 else 0)


def collate(samples: Sequence[Sample], pad_id: int, length: int | None = None) -> Batch:
    """Make a batch of samples: ``input_ids`` and ``attention_mask`` (int64, batch × tokens) and ``labels`` (int64, batch).

    Args:
        samples: at least one.
        pad_id: fills ``input_ids`` behind the end of a sequence; ``attention_mask`` is 0 there.
        length: number of tokens to which sequences are padded; None: that of the longest of these samples. The model's
            result does not depend on it beyond rounding.
    """
    longest = max(len(tokens) for tokens, _ in samples) if length is None else length
    ids = torch.full((len(samples), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(samples), longest), dtype=torch.int64)
    for row, (tokens, _) in enumerate(samples):
        ids[row, : len(tokens)] = torch.as_tensor(np.array(tokens, dtype=np.int64))
        mask[row, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([label for _, label in samples])}


def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Run the (wrapped) model's forward and return the cross entropy, mean over the batch, in fp32.

    Args:
        model: takes ``input_ids`` and ``attention_mask`` by name; returns an object or a mapping with ``logits``.
        batch: from ``collate``, on the model's device.
    """
    logits = _logits(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]))
    return F.cross_entropy(logits.float(), batch["labels"].to(logits.device))


def evaluate(model: torch.nn.Module, data: TokenDataset, pad_id: int) -> dict[str, float]:
    """Return accuracy (0 to 1) and mean cross entropy over a data set, always in the same order.

    Similar lengths are batched together, so that little is computed on padding. Weights and training modes are kept.
    Not a collective: any rank may call it alone.

    Args:
        model: the bare model.
        data: at least one sample.
        pad_id: token number of padding in the model's vocabulary.
    """
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    order = sorted(range(len(data)), key=lambda index: (data.length(index), index))
    num_right, total_loss = 0, 0.0
    model.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(order), _EVALUATION_BATCH_SIZE):
                batch = collate([data[index] for index in order[start : start + _EVALUATION_BATCH_SIZE]], pad_id)
                batch = {name: tensor.to(device) for name, tensor in batch.items()}
                logits = _logits(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])).float()
                num_right += int((logits.argmax(-1) == batch["labels"]).sum())
                total_loss += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
    finally:
        for module, mode in modes:
            module.training = mode
    return {"accuracy": num_right / len(data), "loss": total_loss / len(data)}


def _logits(output: Any) -> torch.Tensor:
    logits = output["logits"] if isinstance(output, Mapping) else output.logits
    assert isinstance(logits, torch.Tensor)
    return logits
