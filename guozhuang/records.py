"""Converts records (frozen dataclasses) to JSON and back; writes files that appear complete or not at all."""

from __future__ import annotations

import json
import math
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from guozhuang.errors import UsageError, explain

T = TypeVar("T")


def plain(value: Any, not_finite: Callable[[float], Any] = str) -> Any:
    """Return nested dictionaries and lists in which ``not_finite`` has replaced the numbers that JSON cannot represent.

    Args:
        value: the result of ``dataclasses.asdict``.
        not_finite: called with ``nan`` or an infinity; the default turns it into text, which :func:`build` reads back.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return not_finite(value)
    if isinstance(value, dict):
        return {key: plain(item, not_finite) for key, item in value.items()}
    return [plain(item, not_finite) for item in value] if isinstance(value, list | tuple) else value


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Rebuild a dataclass from the result of ``dataclasses.asdict``, also after JSON; unknown keys are ignored."""
    hints = typing.get_type_hints(cls)
    known = {f.name: _value(hints[f.name], values[f.name]) for f in fields(cls) if f.name in values}  # type: ignore[arg-type]
    return cls(**known)


def to_json(document: Mapping[str, Any], not_finite: Callable[[float], Any] = str) -> str:
    """Return the text of a JSON document; ``not_finite`` as in :func:`plain`."""
    return json.dumps(plain(document, not_finite), indent=1, allow_nan=False)


def checked_json(text: str, version: int, what: str, fix: str) -> dict[str, Any]:
    """Return a JSON document with the field ``schema_version``; arguments and errors as for :func:`from_json`."""
    try:
        document = json.loads(text)
        found = document["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(explain(f"this is no {what}: {error!r}", fix=fix)) from error
    if found != version:
        raise UsageError(explain(f"{what} is of another version of guozhuang", value=found, fix=fix))
    return dict(document)


def from_json(cls: type[T], text: str, version: int, what: str, fix: str) -> T:
    """Rebuild a dataclass from a JSON document with the field ``schema_version``.

    Args:
        cls: the dataclass.
        text: the document; unknown keys are ignored.
        version: the schema version that this version of guozhuang reads.
        what: the document's name, for errors: "results.json".
        fix: what to do about a document that cannot be read, or is of another version.

    Raises:
        UsageError: the text is no such document, has another schema version, or lacks a field.
    """
    document = checked_json(text, version, what, fix)
    try:
        return build(cls, document)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(explain(f"{what} is not complete: {error!r}", fix=fix)) from error


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return which conditions are not those of an earlier time, each in words: "steps was 50, is 100"."""
    return tuple(
        f"{name} was {then.get(name, 'not set')}, is {now.get(name, 'not set')}"
        for name in dict.fromkeys([*now, *then])
        if then.get(name) != now.get(name)
    )


def write_text(path: Path, text: str) -> None:
    """Write a file of text that appears complete or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file of bytes that appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _fits(cls: Any, names: Collection[str]) -> bool:
    """Whether a dataclass has all these fields, and a default for each other one."""
    needed = {each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING}
    return needed <= set(names) <= {each.name for each in fields(cls)}


def _value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [h for h in typing.get_args(hint) if h is not type(None)]
        if len(inner) > 1 and isinstance(value, Mapping):  # one of several dataclasses: that with these fields
            inner = [h for h in inner if is_dataclass(h) and _fits(h, value.keys())]
        return _value(inner[0], value) if len(inner) == 1 else value
    if origin is tuple:
        return tuple(_value(typing.get_args(hint)[0], item) for item in value)
    if origin is dict:
        return {key: _value(typing.get_args(hint)[1], item) for key, item in value.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value)
    return float(value) if hint is float else value
