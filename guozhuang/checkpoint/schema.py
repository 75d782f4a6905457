"""What the records of a checkpoint must look like, checked whole before anything of a training changes.

A hash tells that a file is as it was written, not who wrote it. A record that lacks an entry, or has one of another type, would
be noticed in the middle of a restore, when the model has changed and the optimizer has not. So each record is compared with
what is written here when it is read, and a checkpoint that differs is left out like one that is not whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Count:
    """A whole number of at least ``least``."""

    least: int = 0


@dataclass(frozen=True)
class ListOf:
    """A list whose values are all of one kind."""

    of: Kind


@dataclass(frozen=True)
class Named:
    """A mapping from texts to values of one kind."""

    of: Kind


@dataclass(frozen=True)
class Record:
    """A mapping with certain entries; further ones are left alone.

    Attributes:
        needed: entries that must be there, with their kinds.
        optional: entries that may be there.
    """

    needed: Mapping[str, Kind]
    optional: Mapping[str, Kind] = field(default_factory=lambda: _NOTHING)


#: What a value may be: of a class, or of one of the kinds above. ``object`` stands for anything.
Kind: TypeAlias = "type | Count | ListOf | Named | Record"

MANIFEST_RECORD = Record(
    {
        "format": str,
        "step": Count(),
        "saved_at": str,
        "ranks": Count(1),
        "strategies": ListOf(str),
        "machine": Named(object),
        "files": Named(Record({"bytes": Count(), "sha256": str}, {"tensors": Named(str)})),
    }
)
PART_RECORD = Record({"tree": dict, "as_rank_0": Named(str)})
_OPTIMIZER = Record({"names": ListOf(ListOf(str)), "state": dict, "groups": ListOf(dict), "rest": dict}, {"class": str})
SHARED_RECORD = Record(
    {
        "step": Count(),
        "epochs": ListOf(Count()),
        "loaders": ListOf(dict),
        "trained": ListOf(
            Record(
                {"strategy": str, "class": str, "tied": Named(str), "left_out": ListOf(str)},
                {"frozen": ListOf(str), "parameters": Named(Tensor), "optimizer": _OPTIMIZER},
            )
        ),
    }
)
_OF_MODEL: dict[str, Kind] = {"parameters": Named(Tensor), "buffers": Named(Tensor), "extra": Named(object)}
OWN_RECORD = Record(
    {
        "trained": ListOf(Record({"exchange": dict}, {**_OF_MODEL, "optimizer": _OPTIMIZER})),
        "kept": Named(Record({"stateful": bool, "state": object})),
        "generators": Record({"torch": Tensor, "python": tuple, "numpy": tuple}, {"device": Tensor}),
    }
)


def fault(value: object, kind: Kind, name: str) -> str:
    """Return how a value differs from what it must be, a clause that names the entry; "" if it does not.

    Args:
        value: what was read.
        kind: what it must be.
        name: of the value, for the text.
    """
    if isinstance(kind, type):
        return "" if isinstance(value, kind) else f"{name} is {_shown(value)}, and must be of type {kind.__name__}"
    if isinstance(kind, Count):
        if isinstance(value, int) and not isinstance(value, bool) and value >= kind.least:
            return ""
        return f"{name} is {_shown(value)}, and must be a whole number of at least {kind.least}"
    if isinstance(kind, ListOf):
        if not isinstance(value, list):
            return f"{name} is {_shown(value)}, and must be a list"
        return _first(fault(each, kind.of, f"{name}[{i}]") for i, each in enumerate(value))
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return f"{name} is {_shown(value)}, and must be a mapping of texts"
    if isinstance(kind, Named):
        return _first(fault(each, kind.of, f"{name}/{key}") for key, each in value.items())
    if missing := [key for key in kind.needed if key not in value]:
        return f"{name} has no entry {missing[0]!r}"
    kinds = {**kind.optional, **kind.needed}
    return _first(fault(each, kinds[key], f"{name}/{key}") for key, each in value.items() if key in kinds)


def state_fault(shared: Any, own: Any) -> str:
    """Return how what all ranks share and what is a rank's own do not go together, as :func:`fault` does."""
    if found := fault(shared, SHARED_RECORD, "shared") or fault(own, OWN_RECORD, "own"):
        return found
    if len(shared["trained"]) != len(own["trained"]):
        return f"shared holds {len(shared['trained'])} models, and a rank's own part {len(own['trained'])}"
    for i, (theirs, mine) in enumerate(zip(shared["trained"], own["trained"], strict=True)):
        if missing := _OF_MODEL.keys() - mine.keys() if i == 0 or _OF_MODEL.keys() & mine.keys() else set():
            return f"own/trained[{i}] has no entry {min(missing)!r}"
        if i == 0 and not (theirs.get("parameters") or mine["parameters"]):
            return "trained[0] has no parameters"
        state = mine.get("optimizer") or theirs.get("optimizer")
        if state is None:
            return f"trained[{i}] has no optimizer"
        if len(state["names"]) != len(state["groups"]):
            return f"trained[{i}]/optimizer has {len(state['groups'])} groups, and names of {len(state['names'])}"
    return ""


def _first(found: Any) -> str:
    return next((text for text in found if text), "")


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, Tensor) else "a tensor"
    return text if len(text) <= 40 else f"a {type(value).__name__}"
