"""The text workload: BERT learns to classify texts, read from a file or from the Python library's docstrings."""

from __future__ import annotations

import ast
import logging
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from guozhuang.errors import UsageError, explain
from guozhuang.workloads import bert, classify, options, tokens
from guozhuang.workloads.arguments import TextOptions
from guozhuang.workloads.base import Workload
from guozhuang.workloads.samples import Samples, cap, class_numbers, classes_of, hold_out, read_samples
from guozhuang.workloads.training_options import classification, find_model

# The most packages, and texts of each, in the default corpus: the Python library's docstrings, labelled by package.
NUM_PACKAGES = 16
MAX_PER_PACKAGE = 1000
_LEAST_PER_PACKAGE = 50
_LEAST_PACKAGES = 4
# Folders that are skipped: tests and installed packages are not part of the library.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_WORD = re.compile(r"[A-Za-z]{2,}")
_BLANK_LINES = re.compile(r"\n\s*\n")
_LEAST_WORDS = 5

# The options that describe how to read a file.
_OF_FILES = ("data_format", "delimiter", "quoting", "encoding", "header", "label", "label_until", "text", "bad_rows")


def load(given: Mapping[str, Any], cache: Path | None = None) -> Workload:
    """Build the text workload; needs tokenizers and transformers.

    With dropout above 0 each process draws its own masks, so that the results of strategies cannot be compared
    number for number.

    Args:
        given: values by field of TextOptions; missing ones take their defaults.
        cache: a folder for the tokenised data, so that only the first process tokenises; None: data is kept in memory.

    Raises:
        UsageError: options, files or checkpoints that cannot work.
    """
    chosen = options.read(TextOptions, given)
    model = find_model(chosen, given, chosen.max_length, "--max-length")
    if isinstance(model, Path) and "vocab_size" in given:
        raise UsageError(
            explain("a checkpoint brings its own vocabulary", value=given["vocab_size"], fix="leave --vocab-size out")
        )
    _check_data_options(chosen, given)
    data = tokens.load_or_make(cache, "text-" + _key(chosen, model), partial(_prepare, chosen, model))
    about = data.about
    return classification(
        "text",
        chosen,
        model,
        train=classify.TokenDataset(data.train, data.train_classes),
        held_out=classify.TokenDataset(data.held_out, data.held_out_classes),
        num_classes=len(about["classes"]),
        vocabulary_size=int(about["vocabulary_size"]),
        pad_id=int(about["pad_id"]),
        max_length=chosen.max_length,
        pad_to=chosen.max_length if chosen.pad_to == "max" else None,
        details={
            **about["details"],
            "max length": chosen.max_length,
            "padding": "to the longest of the batch" if chosen.pad_to == "longest" else "to the max length",
        },
    )


def _check_data_options(chosen: TextOptions, given: Mapping[str, Any]) -> None:
    """Raise UsageError for options about data that would have no effect."""
    if chosen.data is None:
        for name in (*_OF_FILES, "eval_data"):
            if given.get(name) is not None:
                raise UsageError(
                    explain(f"--{name.replace('_', '-')} is about a file", value=given[name], fix="add --data FILE")
                )
    if chosen.eval_data is not None and given.get("eval_fraction") is not None:
        what = "with --eval-data nothing is held out of --data"
        fix = "leave one of --eval-data and --eval-fraction out"
        raise UsageError(explain(what, value=chosen.eval_fraction, fix=fix))


def _key(chosen: TextOptions, model: bert.BertSize | Path) -> str:
    names = ("data", "eval_data", "eval_fraction", "eval_limit", *_OF_FILES, "max_length", "vocab_size", "seed")
    settings: dict[str, object] = {name: getattr(chosen, name) for name in names}
    files = [Path(name).expanduser() for name in (chosen.data, chosen.eval_data) if name is not None]
    for path in files:
        if path.is_dir():
            raise UsageError(explain("the data file is a folder", value=str(path), fix="name one file in it"))
        if not path.is_file():
            raise UsageError(explain("no such file", value=str(path), fix="give the path of a data file"))
    if chosen.data is None:
        settings["corpus"] = [sys.version, sys.base_prefix, NUM_PACKAGES, MAX_PER_PACKAGE]
    if isinstance(model, Path):
        files += sorted(path for path in model.iterdir() if path.suffix in (".json", ".txt", ".model"))
    try:
        settings["tokenizers"] = metadata.version("tokenizers")
    except metadata.PackageNotFoundError:
        raise tokens.missing("tokenizers") from None
    return tokens.key(settings, files)


def _prepare(chosen: TextOptions, model: bert.BertSize | Path) -> tokens.Prepared:
    """Read, split and tokenise the data; the cache saves this work."""
    details: dict[str, str | int | float] = {}
    held = None
    if chosen.data is None:
        labels, texts = corpus()
        source = f"docstrings of Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
        details["data"] = source
    else:
        samples = _read(chosen, chosen.data, details, "data")
        labels, texts, source = samples.labels, samples.texts, chosen.data
    classes = classes_of(labels, source)
    numbers = {label: number for number, label in enumerate(classes)}
    of_train = [numbers[label] for label in labels]
    if chosen.eval_data is not None:
        held = _read(chosen, chosen.eval_data, details, "evaluation data")
        of_held = class_numbers(held, classes, Path(source))
        kept = cap(range(len(of_held)), chosen.eval_limit, chosen.seed)
        train_texts, held_texts = texts, [held.texts[index] for index in kept]
        held_classes = [of_held[index] for index in kept]
    else:
        train_at, held_at = hold_out(of_train, chosen.eval_fraction, chosen.seed)
        kept = cap(held_at, chosen.eval_limit, chosen.seed)
        train_texts, held_texts = [texts[index] for index in train_at], [texts[index] for index in kept]
        held_classes = [of_train[index] for index in kept]
        of_train = [of_train[index] for index in train_at]
    if isinstance(model, Path):
        tokenizer, encode = tokens.checkpoint_tokenizer(model), tokens.encode_with_checkpoint
        size, pad_id = len(tokenizer), int(tokenizer.pad_token_id)
        if tokenizer.pad_token == tokenizer.eos_token:
            details["padding token"] = f"{tokenizer.pad_token} (its end token)"
    else:
        tokenizer = tokens.train_wordpiece(train_texts, chosen.vocab_size)
        encode = tokens.encode
        size, pad_id = tokenizer.get_vocab_size(), tokenizer.token_to_id("[PAD]")
    train, held_out = (encode(tokenizer, each, chosen.max_length) for each in (train_texts, held_texts))
    shown = ", ".join(classes[:20]) + (", ..." if len(classes) > 20 else "")
    details |= {
        "classes": f"{len(classes)}: {shown}",
        "training samples": len(of_train),
        "evaluation samples": len(held_classes),
        "vocabulary": size,
        "mean tokens": round(len(train.tokens) / len(of_train), 1),
    }
    return tokens.Prepared(
        train,
        np.array(of_train, dtype=np.int64),
        held_out,
        np.array(held_classes, dtype=np.int64),
        {"classes": classes, "vocabulary_size": size, "pad_id": pad_id, "details": details},
    )


def _read(chosen: TextOptions, name: str, details: dict[str, str | int | float], what: str) -> Samples:
    samples = read_samples(
        Path(name).expanduser(),
        format=chosen.data_format,
        delimiter=chosen.delimiter,
        quoting=chosen.quoting,
        encoding=chosen.encoding,
        header=chosen.header,
        label=chosen.label,
        text=chosen.text or (),
        label_until=chosen.label_until,
        skip_bad=chosen.bad_rows == "skip",
    )
    for sentence in samples.table.assumed:
        logging.getLogger(__name__).warning("%s", sentence)
    encoding = f", {samples.table.encoding}" if samples.table.encoding else ""
    details[what] = f"{Path(name).name} ({samples.columns}{encoding})"
    if samples.skipped:
        details[f"{what}, bad rows skipped"] = f"{len(samples.skipped):,} ({samples.table.places(samples.skipped)})"
    if samples.table.assumed:
        details[f"{what}, assumed"] = "; ".join(samples.table.assumed)
    return samples


def corpus(library: Path | None = None) -> tuple[list[str], list[str]]:
    """Return labelled texts from the docstrings of a Python library: its files are parsed, nothing is imported.

    A text is a paragraph of a docstring with at least five words and no ``>>>`` example, each once. Its label
    is the top-level package or module that contains it. The 16 packages with the most texts are used, with at most 1,000 texts
    each, evenly over the package. The result depends on the Python version and on which parts of it are installed.

    Args:
        library: the folder of the library; None means the standard library of this interpreter.

    Returns:
        labels and texts, in an order that depends only on the files.

    Raises:
        UsageError: the source files are missing, or too few texts were found.
    """
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).parts):
        parts = path.relative_to(library).parts
        if _LEFT_OUT.intersection(parts) or any(part.startswith("config-") for part in parts):
            continue
        for text in _paragraphs(path):
            if text not in seen:
                seen.add(text)
                found.setdefault(parts[0].removesuffix(".py"), []).append(text)
    largest = sorted(found, key=lambda name: (-len(found[name]), name))[:NUM_PACKAGES]
    taken = sorted(name for name in largest if len(found[name]) >= _LEAST_PER_PACKAGE)
    if len(taken) < _LEAST_PACKAGES:
        what = (
            f"the Python standard library in {library} has too few docstrings for the default corpus "
            f"({len(taken)} packages with {_LEAST_PER_PACKAGE} texts or more)"
        )
        fix = "bring your own texts with --data FILE, or use a Python that has its library as .py files"
        raise UsageError(explain(what, fix=fix))
    labels, texts = [], []
    for name in taken:
        some = found[name]
        count = min(len(some), MAX_PER_PACKAGE)
        texts += [some[index * len(some) // count] for index in range(count)]
        labels += [name] * count
    return labels, texts


def _paragraphs(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():  # warnings about old escapes in the library's strings do not concern the user
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # the library contains files that are broken on purpose
        return
    # Only statements can contain definitions, so expressions, most of the tree, are skipped.
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        nodes += reversed([c for c in ast.iter_child_nodes(node) if isinstance(c, ast.stmt | ast.excepthandler)])
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in _BLANK_LINES.split(ast.get_docstring(node) or ""):
                text = " ".join(paragraph.split())
                if ">>>" not in text and "\0" not in text and len(_WORD.findall(text)) >= _LEAST_WORDS:
                    yield text
