"""Results as files: their JSON form and back, and writing whole or not at all."""

from __future__ import annotations

import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from guozhuang.errors import UsageError, explain
from guozhuang.lab.results import SCHEMA_VERSION, Results, Row

T = TypeVar("T")


def to_json(results: Results) -> str:
    """Return the text of ``results.json``: every record, and under each row the values the report shows.

    A number that JSON does not know stands there as text: ``"nan"``, ``"inf"``.
    """
    document = asdict(results)
    for row, out in zip(results.rows, document["rows"], strict=True):
        out["derived"] = _derived(results, row) if row.ok else None
    return json.dumps(_plain(document), indent=1, allow_nan=False)


def from_json(text: str) -> Results:
    """Rebuild what :func:`to_json` wrote; derived values are computed again, not read.

    Raises:
        UsageError: the text is no such document or of another schema.
    """
    try:
        document = json.loads(text)
        version = document["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(explain(f"this is no results.json: {error}")) from error
    if version != SCHEMA_VERSION:
        raise UsageError(
            explain(
                "results.json is of another version", value=version, fix="run the comparison again with this version"
            )
        )
    try:
        return build(Results, document)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(explain(f"results.json is not complete: {error!r}")) from error


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Rebuild a dataclass from what ``dataclasses.asdict`` and JSON made of it; unknown keys are left out."""
    hints = typing.get_type_hints(cls)
    known = {f.name: _value(hints[f.name], values[f.name]) for f in fields(cls) if f.name in values}  # type: ignore[arg-type]
    return cls(**known)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [h for h in typing.get_args(hint) if h is not type(None)]
        return _value(inner[0], value) if len(inner) == 1 else value
    if origin is tuple:
        return tuple(_value(typing.get_args(hint)[0], item) for item in value)
    if origin is dict:
        return {key: _value(typing.get_args(hint)[1], item) for key, item in value.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value)
    return float(value) if hint is float else value


def _derived(results: Results, row: Row) -> dict[str, Any]:
    return {
        "samples_per_s": {"median": row.samples_per_s, "min": row.slowest, "max": row.fastest},
        "epoch_s": results.epoch_s(row),
        "speedup_over_single": results.ratio(row, "single"),
        "speedup_over_torch_ddp": results.ratio(row, "torch-ddp"),
        "efficiency_against_none": results.ratio(row, "none"),
        "step": asdict(row.phases),
        "sent_bytes_per_rank_and_step": row.sent_bytes_per_step,
        "peak_rank_bytes": row.peak_rank_bytes,
        "peak_device_bytes": row.peak_device_bytes,
        "machine_bytes": row.machine_bytes,
        "main_share": row.main_share,
        "final_loss": row.final_loss,
        "metrics": dict(row.metrics),
        "ranks_identical": row.ranks_identical,
    }
