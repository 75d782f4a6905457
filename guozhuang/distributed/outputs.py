"""Finds the tensors in the output of a model's forward, however it is nested."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor, nn

_PLAIN = (str, bytes, int, float, bool, complex, type(None))
# Objects that an output may refer to but that hold no results of this forward: a module would lead through the whole model,
# and a function or a class to every object of the program.
_NO_OUTPUTS = (
    *(nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.CodeType, types.FrameType),
)


def tensors_with_graph(output: object) -> list[Tensor]:
    """Return the tensors in ``output`` that backward can start from: those with a ``grad_fn``, each once.

    Searches tuples, lists, sets, mappings, dataclasses, and the attributes of any other object (such as a model's own class
    of results), but not modules, functions and classes. An object that is met twice is searched once.
    """
    found: list[Tensor] = []
    met: dict[int, object] = {}  # keeps the objects alive: the id of a deleted object may be reused
    waiting: list[Any] = [output]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (*_PLAIN, *_NO_OUTPUTS)) or id(value) in met:
            continue
        met[id(value)] = value
        if not isinstance(value, Tensor):
            waiting.extend(reversed(_inside(value)))
        elif value.grad_fn is not None:
            found.append(value)
    return found


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list, Set)):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).values())
