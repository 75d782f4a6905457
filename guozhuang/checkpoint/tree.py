"""Convert nested states to JSON and tensors, and back, without loss and without pickle.

A state is what a ``state_dict`` returns: dicts, lists and tuples of tensors, numpy values, numbers, texts, bytes, dtypes and
None. In the JSON a tensor stands as ``{"$tensor": key}``, where the key is the path to it; everything else that JSON lacks is a
dict with one key that begins with "$".
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guozhuang.checkpoint.files import DTYPES
from guozhuang.errors import UsageError, explain


def flatten(value: object, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON; put its tensors into ``tensors``, without copying them.

    Args:
        value: the state.
        path: names the state in keys and errors.
        tensors: gets an entry for each tensor, by its path.

    Raises:
        UsageError: a value is of a type that cannot be saved; the text names its path.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return _flatten_tensor(value, path, tensors)
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value) and not isinstance(value, Counter):
            return {key: flatten(each, f"{path}/{key}", tensors) for key, each in value.items()}
        pairs = value.items()
        return {
            "$counter" if isinstance(value, Counter) else "$dict": [
                [flatten(k, path, tensors), flatten(v, f"{path}/{k}", tensors)] for k, v in pairs
            ]
        }
    if isinstance(value, list | tuple | set | frozenset):
        many = [flatten(each, f"{path}/{i}", tensors) for i, each in enumerate(value)]
        if isinstance(value, torch.Size):
            return {"$size": many}
        return many if type(value) is list else {f"${'tuple' if isinstance(value, tuple) else 'set'}": many}
    if isinstance(value, np.ndarray | np.generic):
        return {"$numpy": [flatten(torch.from_numpy(np.array(value)), path, tensors), isinstance(value, np.ndarray)]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, int | float):  # of a subclass, as an IntEnum; its value is what counts
        return flatten(int(value) if isinstance(value, int) else float(value), path, tensors)
    what = f"{path} is of a type that a checkpoint cannot hold without running code when it is loaded"
    fix = "keep tensors, numbers, texts, dicts and lists in the state, or leave the object out"
    raise UsageError(explain(what, value=type(value).__name__, fix=fix))


def _flatten_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> Any:
    if value.layout != torch.strided or not (value.dtype in DTYPES or value.is_complex()):
        what = f"{path} is a tensor of a layout or dtype that a checkpoint cannot hold"
        raise UsageError(explain(what, value=f"{value.layout}, {value.dtype}", fix="convert it to a dense tensor"))
    value = value.detach()
    while path in tensors:  # as of the keys 1 and "1", or "a/b" beside "b" in "a"
        path += "'"
    if value.is_complex():
        tensors[path] = torch.view_as_real(value.resolve_conj())
        return {"$tensor": path, "complex": True}
    tensors[path] = value
    return {"$tensor": path}


def unflatten(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that :func:`flatten` converted; its tensors are those of ``tensors``.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: the JSON is not of :func:`flatten`, or tensors are missing.
    """
    if isinstance(node, list):
        return [unflatten(each, tensors) for each in node]
    if not isinstance(node, dict):
        return node
    kind = next(iter(node), "")
    if not kind.startswith("$"):
        return {key: unflatten(each, tensors) for key, each in node.items()}
    inside = node[kind]
    if kind == "$tensor":
        found = tensors[inside]
        return torch.view_as_complex(found) if node.get("complex") else found
    if kind in ("$dict", "$counter"):
        pairs = {unflatten(key, tensors): unflatten(each, tensors) for key, each in inside}
        return Counter(pairs) if kind == "$counter" else pairs
    if kind in ("$tuple", "$set", "$size"):
        makes = {"$tuple": tuple, "$set": set, "$size": torch.Size}[kind]
        return makes(unflatten(each, tensors) for each in inside)
    if kind == "$numpy":
        array = unflatten(inside[0], tensors).clone().numpy()
        return array if inside[1] else array[()]
    if kind == "$bytes":
        return base64.b64decode(inside)
    if kind == "$complex":
        return complex(float(inside[0]), float(inside[1]))
    if kind == "$dtype":
        dtype = getattr(torch, inside, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    if kind == "$device":
        return torch.device(inside)
    if kind == "$float":
        return float(inside)
    raise ValueError(f"unknown entry {kind!r}")


def copied(state: Any) -> Any:
    """Return a state whose tensors do not belong to a mapped file."""
    if isinstance(state, Tensor):
        return state.clone()
    if type(state) is dict:
        return {key: copied(each) for key, each in state.items()}
    return type(state)(map(copied, state)) if type(state) in (list, tuple) else state
