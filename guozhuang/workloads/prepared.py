"""Tokenised data on disk: written once by the first process, memory-mapped by every rank."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from guozhuang.workloads.vocabulary import Ragged

# Increase it when the same options and files give other arrays than before.
_FORMAT = 1


@dataclass(frozen=True)
class Prepared:
    """A tokenised data set.

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
    """Load the data from the folder ``name`` of the cache, or make it and save it there.

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
