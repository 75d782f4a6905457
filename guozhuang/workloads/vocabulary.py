"""Texts -> token numbers: a WordPiece vocabulary trained on the texts, or the tokenizer of a checkpoint."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from guozhuang.errors import UsageError, explain

# One of these holds the vocabulary of every tokenizer that transformers can load.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Ragged:
    """Sequences of token numbers, end to end.

    Attributes:
        tokens: int32, one dimension.
        ends: int64, one per sequence: where it ends in ``tokens``; it begins where the one before ends.
    """

    tokens: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]


def train_wordpiece(texts: Sequence[str], size: int) -> Any:
    """A lower-case WordPiece tokenizer as BERT's, trained on these texts; the same texts give the same one.

    Args:
        texts: the training texts only: held-out words stay unknown.
        size: the largest number of entries; few texts give fewer.

    Returns:
        a ``tokenizers.Tokenizer`` with BERT's ``[CLS] ... [SEP]`` around each text.

    Raises:
        UsageError: the package tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    except ImportError:
        raise missing("tokenizers") from None
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    clean = [normalizer.normalize_str(text) for text in texts]
    frequency = Counter(character for text in clean for character in text if not character.isspace())
    kept = sorted(frequency, key=lambda character: (-frequency[character], character))[: size // 2]
    rare = str.maketrans(dict.fromkeys(set(frequency).difference(kept), " "))
    clean = [text.translate(rare) for text in clean]
    words = {word for text in clean for word, _ in splitter.pre_tokenize_str(text)}
    inner = sorted({"##" + character for word in words for character in word[1:]})

    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.pre_tokenizer = splitter
    # [Note: a repeatable vocabulary] The trainer numbers the pieces that continue a word in the order of a hash table,
    # which differs from run to run, and breaks ties between merges by these numbers. Handed over as special tokens they
    # are numbered first and in our order; the tokenizer that is returned knows them as ordinary pieces.
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, min_frequency=2, special_tokens=[*SPECIAL, *inner], show_progress=False
    )
    learner.train_from_iterator(clean, trainer)
    tokenizer = Tokenizer(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    around = [(token, SPECIAL.index(token)) for token in ("[SEP]", "[CLS]")]  # special tokens are numbered first
    tokenizer.post_processor = processors.BertProcessing(*around)
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str], max_length: int) -> Ragged:
    """Token numbers of texts, each cut to ``max_length`` tokens with the special ones counted.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        texts: any number of them.
        max_length: at least 3.
    """
    tokenizer.enable_truncation(max_length)
    return ragged([encoding.ids for encoding in tokenizer.encode_batch(list(texts))])


def checkpoint_tokenizer(folder: Path) -> Any:
    """The tokenizer that lies in a checkpoint's folder (transformers' AutoTokenizer); nothing is downloaded.

    Raises:
        UsageError: transformers is not installed, there is no tokenizer, or it has no padding token.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing("transformers") from None
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers would make up an empty one
        raise UsageError(
            explain(
                f"the checkpoint in {folder} has no tokenizer",
                value=", ".join(sorted(path.name for path in folder.iterdir())),
                fix="save it there with tokenizer.save_pretrained(folder)",
            )
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(
            explain(
                f"the checkpoint in {folder} has no tokenizer that can be read: {_brief(error)}",
                fix="save it there with tokenizer.save_pretrained(folder)",
            )
        ) from None
    if tokenizer.pad_token_id is None:
        raise UsageError(
            explain(f"the tokenizer in {folder} has no padding token", fix="set pad_token and save the tokenizer again")
        )
    return tokenizer


def encode_with_checkpoint(tokenizer: Any, texts: Sequence[str], max_length: int) -> Ragged:
    """Encode with a checkpoint's own tokenizer; the same result as ``encode``."""
    return ragged(tokenizer(list(texts), truncation=True, max_length=max_length, padding=False)["input_ids"])


def ragged(sequences: Sequence[Sequence[int]]) -> Ragged:
    """Lay sequences end to end."""
    ends = np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64)
    tokens = np.fromiter(
        (token for s in sequences for token in s), dtype=np.int32, count=int(ends[-1]) if len(ends) else 0
    )
    return Ragged(tokens, ends)


def missing(package: str) -> UsageError:
    """The error for a package of the extra ``text`` that is not installed."""
    return UsageError(
        explain(
            f"the text workload needs the package {package}, which is not installed",
            fix="pip install 'guozhuang[text]'",
        )
    )


def _brief(error: BaseException) -> str:
    with contextlib.suppress(IndexError):
        return str(error).splitlines()[0]
    return type(error).__name__
