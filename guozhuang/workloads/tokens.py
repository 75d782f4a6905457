"""Converts texts to token numbers, and keeps them on disk, where every rank maps them into its memory.

The vocabulary is a WordPiece one that is trained on the texts, or that of a checkpoint's tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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

# The version of the cached arrays: increase it when the same options and files give other arrays than before.
_FORMAT = 2

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Ragged:
    """Sequences of token numbers, of different lengths, concatenated in one array.

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

    A tokenizer without a padding token gets its end token as one; it is masked out of attention, so that changes no result.

    Raises:
        UsageError: transformers is not installed, there is no tokenizer, or it has neither a padding nor an end token.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing("transformers") from None
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # else transformers would make an empty one
        what = f"the checkpoint in {folder} has no tokenizer"
        fix = "save it there with tokenizer.save_pretrained(folder)"
        raise UsageError(explain(what, value=", ".join(sorted(path.name for path in folder.iterdir())), fix=fix))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(
            explain(
                f"the checkpoint in {folder} has no tokenizer that can be read: {_brief(error)}",
                fix="save it there with tokenizer.save_pretrained(folder)",
            )
        ) from None
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:  # GPT-2 and its kin have no padding token
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        what = f"the tokenizer in {folder} has neither a padding nor an end token"
        raise UsageError(explain(what, fix="set pad_token and save the tokenizer again"))
    if tokenizer.pad_token_id >= len(tokenizer):
        what = f"the padding token of the tokenizer in {folder} is not in its vocabulary"
        raise UsageError(explain(what, value=tokenizer.pad_token_id, fix="save the tokenizer again"))
    return tokenizer


def encode_with_checkpoint(tokenizer: Any, texts: Sequence[str], max_length: int) -> Ragged:
    """Encode texts with a checkpoint's own tokenizer; the result has the same form as that of ``encode``."""
    return ragged(tokenizer(list(texts), truncation=True, max_length=max_length, padding=False)["input_ids"])


def ragged(sequences: Sequence[Sequence[int]]) -> Ragged:
    """Concatenate sequences of token numbers into one ``Ragged``."""
    ends = np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64)
    tokens = np.fromiter(
        (token for s in sequences for token in s), dtype=np.int32, count=int(ends[-1]) if len(ends) else 0
    )
    return Ragged(tokens, ends)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


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


@dataclass(frozen=True)
class Prepared:
    """A tokenised data set: a training part and a held-out part, with the class of each token sequence.

    Attributes:
        train: token sequences of the training part; ``held_out``: those of the held-out part.
        train_classes: int64, the class number of each sequence; ``held_out_classes`` likewise.
        about: further facts, such as the names of the classes; JSON can represent it.
    """

    train: Ragged
    train_classes: npt.NDArray[np.int64]
    held_out: Ragged
    held_out_classes: npt.NDArray[np.int64]
    about: dict[str, Any]


def key(settings: Mapping[str, object], files: Iterable[Path]) -> str:
    """Return a name that identifies the result of these settings and files as they are now (path, size, change time)."""
    stats = []
    for path in files:
        stat = path.stat()
        stats.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    text = json.dumps([_FORMAT, dict(settings), stats], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def load_or_make(cache: Path | None, name: str, make: Callable[[], Prepared]) -> Prepared:
    """Load tokenised data from the folder ``name`` of the cache; if it is not there, make it and save it there.

    The folder appears complete or not at all, so processes may race: the first result stays. Every process maps the
    arrays and reads only the pages it needs, which processes of one machine share.

    Args:
        cache: a folder, created if missing; None keeps the data in memory only.
        name: see ``key``.
        make: called without arguments to make the data if it is not in the cache.
    """
    if cache is None:
        return make()
    folder = cache / name
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            _write(draft, make())
            try:
                os.rename(draft, folder)
            except OSError:
                if not folder.is_dir():  # no other process was faster: this is a real failure
                    raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return _read(folder)


def _write(folder: Path, data: Prepared) -> None:
    for name, array in _arrays(data).items():
        np.save(folder / f"{name}.npy", array)
    (folder / "about.json").write_text(json.dumps(data.about, ensure_ascii=False, indent=1), encoding="utf-8")


def _arrays(data: Prepared) -> dict[str, npt.NDArray[Any]]:
    return {
        "train_tokens": data.train.tokens,
        "train_ends": data.train.ends,
        "train_classes": data.train_classes,
        "held_out_tokens": data.held_out.tokens,
        "held_out_ends": data.held_out.ends,
        "held_out_classes": data.held_out_classes,
    }


def _read(folder: Path) -> Prepared:
    def array(name: str) -> npt.NDArray[Any]:
        mapped: npt.NDArray[Any] = np.load(folder / f"{name}.npy", mmap_mode="r")
        return mapped

    return Prepared(
        Ragged(array("train_tokens"), array("train_ends")),
        array("train_classes"),
        Ragged(array("held_out_tokens"), array("held_out_ends")),
        array("held_out_classes"),
        json.loads((folder / "about.json").read_text(encoding="utf-8")),
    )
