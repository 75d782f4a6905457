"""BERT models for classification: four sizes trained from scratch, or a checkpoint from a local folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from guozhuang.errors import UsageError, explain
from guozhuang.workloads.tokens import missing


@dataclass(frozen=True)
class BertSize:
    """The size of a BERT model; the inner width of its feed-forward layers is 4 times ``hidden``.

    Attributes:
        layers: number of transformer layers.
        hidden: width.
        heads: attention heads per layer.
        adamw_lr: learning rate of AdamW for training from scratch without a warm-up. Tuned for tiny (twice as much never
            learns) and mini (twice as much is worse); for small and base only scaled down with the width.
    """

    layers: int
    hidden: int
    heads: int
    adamw_lr: float


SIZES: Mapping[str, BertSize] = MappingProxyType(
    {
        "bert-tiny": BertSize(2, 128, 2, 1e-3),
        "bert-mini": BertSize(4, 256, 4, 2.5e-4),
        "bert-small": BertSize(4, 512, 8, 1e-4),
        "bert-base": BertSize(12, 768, 12, 5e-5),
    }
)
FINE_TUNING_LR = 2e-5
# The default learning rate of SGD: stable with momentum 0.9 (0.3 diverges). From scratch BERT hardly learns by SGD.
SGD_LR = 2e-2
MAX_POSITIONS = 512

# Matches the names of dropout probabilities in transformers' configurations.
_DROPOUT = re.compile(r"(dropout|_drop|pdrop|classifier_dropout|_dropout_prob|dropout_rate)$")


def find(model: str) -> BertSize | Path:
    """Return the ``BertSize`` named ``model``, or else the folder of the checkpoint at the path ``model``.

    Raises:
        UsageError: it is neither; names on a model hub are not looked up, since nothing is downloaded.
    """
    if model in SIZES:
        return SIZES[model]
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    what = (
        "the folder has no config.json of a Hugging Face checkpoint" if folder.is_dir() else "no such model or folder"
    )
    fix = f"use {', '.join(SIZES)}, or the path of a checkpoint on this machine (nothing is downloaded)"
    raise UsageError(explain(what, value=model, fix=fix))


def default_lr(model: BertSize | Path, optimizer: str) -> float:
    """Return the default learning rate: 2e-2 for SGD; for AdamW 2e-5 if the model is a checkpoint, else by its size."""
    if optimizer == "sgd":
        return SGD_LR
    return FINE_TUNING_LR if isinstance(model, Path) else model.adamw_lr


def num_parameters(size: BertSize, vocabulary_size: int, num_classes: int) -> int:
    """Count the parameters of a model that ``build`` makes of this size: embeddings, layers, pooler and classifier."""
    h = size.hidden
    embeddings = (vocabulary_size + MAX_POSITIONS + 2) * h + 2 * h
    attention = 4 * (h * h + h) + 2 * h
    feed_forward = 2 * 4 * h * h + 4 * h + h + 2 * h
    return embeddings + size.layers * (attention + feed_forward) + h * h + h + num_classes * (h + 1)


def build(
    model: BertSize | Path, *, num_classes: int, vocabulary_size: int, pad_id: int, dropout: float, max_length: int
) -> torch.nn.Module:
    """Return a model that maps ``input_ids`` and ``attention_mask`` (int64, batch × tokens) to ``.logits`` (batch × classes).

    It is on the CPU, in fp32, in training mode. New weights come from torch's generator. A checkpoint's weights and
    vocabulary size are used; its classifier is kept if it has ``num_classes`` classes, else a new one is made.

    Raises:
        UsageError: transformers is not installed, or the checkpoint cannot be used.
    """
    if isinstance(model, Path):
        return _from_checkpoint(model, num_classes, dropout, max_length, pad_id)
    try:
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertForSequenceClassification
    except ImportError:
        raise missing("transformers") from None
    config = BertConfig(
        vocab_size=vocabulary_size,
        num_hidden_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        intermediate_size=4 * model.hidden,
        max_position_embeddings=MAX_POSITIONS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        classifier_dropout=dropout,
        pad_token_id=pad_id,
        num_labels=num_classes,
    )
    built: torch.nn.Module = BertForSequenceClassification(config)
    return built.train()


def checkpoint_config(folder: Path, num_classes: int, dropout: float, max_length: int) -> Any:
    """Return the configuration of a checkpoint, with ``num_classes`` and with this dropout everywhere.

    Raises:
        UsageError: it cannot be read, or it has fewer positions than ``max_length``.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise missing("transformers") from None
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, num_labels=num_classes)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            explain(f"the checkpoint in {folder} has no configuration that can be read: {error}", fix="save it again")
        ) from None
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise UsageError(
            explain(f"the checkpoint in {folder} knows {limit} positions", value=max_length, fix="lower --max-length")
        )
    for name, value in config.to_dict().items():
        if _DROPOUT.search(name) and (value is None or isinstance(value, int | float)) and not isinstance(value, bool):
            setattr(config, name, dropout)
    return config


def count_checkpoint_parameters(folder: Path, num_classes: int, max_length: int, vocabulary_size: int) -> int:
    """Count the parameters of a checkpoint's model without reading its weights.

    Raises:
        UsageError: see ``checkpoint_config``; or its tokenizer has more entries than the model has embeddings.
    """
    config = checkpoint_config(folder, num_classes, 0.0, max_length)
    if vocabulary_size > config.vocab_size:
        what = f"the tokenizer in {folder} has {vocabulary_size} entries, more than its model's {config.vocab_size}"
        fix = "save the tokenizer that the model was trained with there"
        raise UsageError(explain(what, fix=fix))
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        shell = AutoModelForSequenceClassification.from_config(config)
    return sum(parameter.numel() for parameter in shell.parameters())


def _from_checkpoint(folder: Path, num_classes: int, dropout: float, max_length: int, pad_id: int) -> torch.nn.Module:
    config = checkpoint_config(folder, num_classes, dropout, max_length)
    if config.pad_token_id is None:  # decoders such as GPT-2 classify at the last token that is no padding
        config.pad_token_id = pad_id
    from transformers import AutoModelForSequenceClassification, logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a new classifier is expected here, and transformers would warn about it on every rank
    try:
        built: torch.nn.Module = AutoModelForSequenceClassification.from_pretrained(
            str(folder), config=config, local_files_only=True, dtype=torch.float32, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(
            explain(f"the checkpoint in {folder} cannot be loaded for classification: {error}", fix="save it again")
        ) from None
    finally:
        logging.set_verbosity(verbosity)
    for module in built.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    return built.train()
