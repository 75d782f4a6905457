"""The options of the built-in workloads. Nothing here imports torch, so that ``guozhuang compare --help`` is fast."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from guozhuang.workloads import options
from guozhuang.workloads.options import option
from guozhuang.workloads.rows import FORMATS, QUOTINGS

#: The names of the models in ``bert.SIZES``.
SIZE_NAMES = ("bert-tiny", "bert-mini", "bert-small", "bert-base")
_YES_NO_AUTO = ("auto", "yes", "no")


@dataclass(frozen=True)
class TrainingOptions:
    """The options for model and optimizer; their help texts describe them."""

    model: str = option(
        "bert-tiny",
        str,
        f"{', '.join(SIZE_NAMES)} from scratch, or the folder of a Hugging Face checkpoint (default bert-tiny)",
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


@dataclass(frozen=True)
class TextOptions(TrainingOptions):
    """The options of the text workload: those of its data, added to those of model and optimizer."""

    data: str | None = option(
        None,
        str,
        "file to train on: csv, tsv, jsonl, json, parquet, txt; .gz of each (default: Python's own docstrings)",
    )
    eval_data: str | None = option(None, str, "file to measure accuracy on (default: a held-out part of --data)")
    eval_fraction: float = option(0.1, float, "share of each class to hold out (default 0.1)", low=0.001, below=1.0)
    eval_limit: int = option(1000, int, "measure on at most so many samples; 0: all (default 1000)", low=0)
    data_format: str = option("auto", str, "format of the files (default: by their names)", choices=FORMATS)
    delimiter: str | None = option(
        None, str, "what separates columns: a character, or tab, comma, semicolon, space, pipe"
    )
    quoting: str = option("auto", str, "whether cells of csv and tsv stand in double quotes", choices=QUOTINGS)
    encoding: str | None = option(None, str, "encoding of the files (default: detected)")
    header: str = option(
        "auto", str, "whether the first row names the columns (default: detected)", choices=_YES_NO_AUTO
    )
    label: str | None = option(
        None, str, "column of the label: name, or number from 0 (default: by usual names, or first)"
    )
    label_until: str | None = option(None, str, "keep of a label what stands before this, e.g. ':' for DESC:manner")
    text: list[str] | None = option(  # noqa: RUF009 - a field, as all the others
        None, list, "columns of the text, joined (default: by usual names, or all others)"
    )
    bad_rows: str = option(
        "stop",
        str,
        "what to do at rows without a label or text (blank, null, NaN) or that cannot be read",
        choices=("stop", "skip"),
    )
    max_length: int = option(128, int, "cut texts to so many tokens (default 128)", low=3)
    pad_to: str = option(
        "longest", str, "pad each batch to its longest text (default) or to --max-length", choices=("longest", "max")
    )
    vocab_size: int = option(
        8000, int, "entries of the WordPiece vocabulary trained on the data (default 8000)", low=100
    )


@dataclass(frozen=True)
class SyntheticOptions(TrainingOptions):
    """The options of the synthetic workload: those of its data, added to those of model and optimizer."""

    seq_len: int = option(64, int, "tokens of every sample (default 64)", low=1)
    num_classes: int = option(4, int, "number of classes (default 4)", low=2)
    num_samples: int = option(10_000, int, "samples of an epoch (default 10000)", low=1)


#: The options of each built-in workload, by its name.
OPTIONS: Mapping[str, type[TrainingOptions]] = MappingProxyType({"text": TextOptions, "synthetic": SyntheticOptions})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of all workloads to a parser, in one group for each, and one group for shared options."""
    shared = parser.add_argument_group("workloads text and synthetic")
    options.add_arguments(TrainingOptions, shared)
    for name, its_options in OPTIONS.items():
        options.add_arguments(its_options, parser.add_argument_group(f"workload {name}"))
    parser.add_argument_group("your own workload (module:function)").add_argument(
        "--option", action="append", metavar="KEY=VALUE", help="handed to your function in a dict; may be repeated"
    )
