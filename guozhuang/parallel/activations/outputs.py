"""The outputs of a model, whole on every rank."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .tensor import whole_of


def whole_output(value: Any) -> Any:
    """Gather the divided tensors in a model's outputs, for a loss that all ranks compute alike. Containers keep their types."""
    if isinstance(value, Tensor):
        return whole_of(value, equal=True)
    if isinstance(value, Mapping):
        return _changed(value, {key: whole_output(each) for key, each in value.items()}, value.__getitem__, _set_item)
    if isinstance(value, tuple | list):
        found = [whole_output(each) for each in value]
        if all(one is other for one, other in zip(found, value, strict=True)):
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: whole_output(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return _changed(value, parts, lambda name: getattr(value, name), object.__setattr__)
    return value


def _changed(value: Any, parts: dict[Any, Any], get: Callable[[Any], Any], put: Callable[[Any, Any, Any], None]) -> Any:
    """Return the container, or a copy of it in which the parts that differ are replaced."""
    differing = {key: part for key, part in parts.items() if part is not get(key)}
    if differing:
        value = copy.copy(value)
        for key, part in differing.items():
            put(value, key, part)
    return value


def _set_item(value: Any, key: Any, part: Any) -> None:
    value[key] = part
