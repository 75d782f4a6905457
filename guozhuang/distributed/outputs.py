"""The tensors in what a model's forward returned, however it is nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set

from torch import Tensor

_PLAIN = (str, bytes, int, float, bool, complex, type(None), type)


def tensors_with_graph(output: object) -> list[Tensor]:
    """Return the tensors in ``output`` that backward can start from: those that autograd computed.

    Looks into tuples, lists, sets, mappings, dataclasses, and the attributes of any other object (one that a model made for
    its result). An object that is met twice is looked into once.
    """
    return [tensor for tensor in _tensors(output, set()) if tensor.grad_fn is not None]


def _tensors(value: object, met: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _PLAIN) or id(value) in met:
        return
    met.add(id(value))
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, (tuple, list, Set)):
        inner = list(value)
    elif dataclasses.is_dataclass(value):
        inner = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    for item in inner:
        yield from _tensors(item, met)
