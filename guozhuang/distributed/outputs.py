"""The tensors in what a model's forward returned, however it is nested."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor, nn

_PLAIN = (str, bytes, int, float, bool, complex, type(None))
# What an output may refer to without holding results of this forward: looking into a module would walk the whole model, and
# from a function or a class there is a way to everything.
_NO_OUTPUTS = (
    *(nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.CodeType, types.FrameType),
)


def tensors_with_graph(output: object) -> list[Tensor]:
    """Return the tensors in ``output`` that backward can start from: those that autograd computed, each once.

    Looks into tuples, lists, sets, mappings, dataclasses, and the attributes of any other object (one that a model made for
    its result), but not into modules, functions and classes. An object that is met twice is looked into once.
    """
    found: list[Tensor] = []
    met: dict[int, object] = {}  # holds the objects, since the id of one that is gone may be given to another
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
