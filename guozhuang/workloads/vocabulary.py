"""Converts texts to token numbers, by a WordPiece vocabulary trained on the texts or by a checkpoint's tokenizer."""

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

# Every tokenizer that transformers can load has its vocabulary in one of these files.
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
    """Sequences of token numbers, concatenated.

    Attributes:
        tokens: int32, one dimension, all sequences one after the other.
        ends: int64, the end of each sequence in ``tokens``; a sequence begins where the one before ends.
    """

    tokens: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]


def train_wordpiece(texts: Sequence[str], size: int) -> Any:
    """Train a lower-case WordPiece tokenizer like BERT's on these texts; the same texts give the same tokenizer.

    Args:
        texts: the training texts only, so that words of held-out texts stay unknown.
        size: the largest number of entries; few texts give fewer.

    Returns:
        a ``tokenizers.Tokenizer`` that puts BERT's ``[CLS] ... [SEP]`` around each text.

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
    # which differs from run to run, and breaks ties between merges by these numbers. Passed as special tokens they
    # are numbered first and in our order; the returned tokenizer treats them as ordinary pieces.
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, min_frequency=2, special_tokens=[*SPECIAL, *inner], show_progress=False
    )
    learner.train_from_iterator(clean, trainer)
    tokenizer = Tokenizer(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    around = [(token, SPECIAL.index(token)) for token in ("[SEP]", "[CLS]")]  # special tokens have the first numbers
    tokenizer.post_processor = processors.BertProcessing(*around)
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str], max_length: int) -> Ragged:
    """Return the token numbers of texts, each cut to ``max_length`` tokens including the special ones.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        texts: any number of them.
        max_length: at least 3.
    """
    tokenizer.enable_truncation(max_length)
    return ragged([encoding.ids for encoding in tokenizer.encode_batch(list(texts))])


def checkpoint_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a checkpoint's folder (by transformers' AutoTokenizer); nothing is downloaded.

    Raises:
        UsageError: transformers is not installed, there is no tokenizer, or it has no padding token.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing("transformers") from None
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # else transformers would make an empty one
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
    """Encode texts with a checkpoint's own tokenizer; the result has the same form as that of ``encode``."""
    return ragged(tokenizer(list(texts), truncation=True, max_length=max_length, padding=False)["input_ids"])


def ragged(sequences: Sequence[Sequence[int]]) -> Ragged:
    """Concatenate sequences."""
    ends = np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64)
    tokens = np.fromiter(
        (token for s in sequences for token in s), dtype=np.int32, count=int(ends[-1]) if len(ends) else 0
    )
    return Ragged(tokens, ends)


def missing(package: str) -> UsageError:
    """Return the error for a package of the extra ``text`` that is not installed."""
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
