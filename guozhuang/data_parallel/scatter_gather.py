"""Functions that cut nested inputs into one share per device, and join the nested outputs of several replicas.

Containers are tuples (named ones too), lists, mappings (``dict`` and similar types: ``OrderedDict``, the outputs
and encodings of ``transformers``) and dataclasses. Inside them tensors are cut or joined along one dimension; any other
object is the same in all shares.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import UserDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import scatter_gather as torch_scatter_gather
from torch.nn.utils.rnn import PackedSequence

from guozhuang.errors import UsageError, explain

__all__ = ["gather", "scatter"]


def scatter(value: Any, devices: Sequence[torch.device], dim: int = 0) -> list[Any]:
    """Cut ``value`` into at most one share per device.

    Every tensor with at least one dimension is cut as ``torch.chunk(tensor, len(devices), dim)`` cuts it, so the last
    share may be smaller and fewer rows than devices give fewer shares. Tensors without dimensions go to every device.
    Containers are rebuilt for each share with their own type; any other object is the same in each share, and
    a ``value`` without a tensor to cut gives one share per device.

    On CPU a share is a view of the tensor it was cut from; gradients flow back through the cut.

    Args:
        value: a tensor, or any nesting of containers.
        devices: the devices of the shares, in order; entries may repeat.
        dim: the dimension to cut along; negative values count from each tensor's last dimension.

    Returns:
        One value per share, on ``devices[: len(result)]``.

    Raises:
        UsageError: a tensor has no dimension ``dim``; two tensors would give different numbers of shares (their rows
            cannot belong together); a ``PackedSequence``, whose rows are not along one dimension; a container that
            its own type cannot rebuild.
    """
    tensors: dict[str, Tensor] = {}
    _collect(value, "", tensors)
    num_shares = _count_shares(tensors, len(devices), dim)
    # ceil(rows / num_shares) equals ceil(rows / len(devices)) for each tensor counted, so cutting for the first
    # num_shares devices gives the same shares as cutting for all devices.
    return _cut(value, list(devices[:num_shares]), dim)


def gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Join the outputs of several replicas into one value on ``device``.

    Tensors are concatenated along ``dim``. Tensors without dimensions become one vector with an entry per replica, and
    a ``UserWarning`` reports it. Containers get the type of replica 0's. Every other value (``None``, a number,
    a string) must be equal in all replicas and is returned as it is.

    Args:
        outputs: one value per replica, all of one structure.
        device: the device of the result; gradients flow back to each replica's device.
        dim: the dimension to concatenate along.

    Raises:
        UsageError: structures, keys, types or values differ between replicas, or tensors cannot be concatenated
            along ``dim``; the text names the place in the output.
    """
    return _join(outputs, device, dim, "")


def _open(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, position or field; None if ``value`` is not a container."""
    if isinstance(value, PackedSequence):
        raise UsageError(
            explain(
                "A PackedSequence cannot be cut or joined between replicas: its rows do not lie along one dimension",
                fix="hand padded tensors to the module, and pack and unpack inside its forward",
            )
        )
    if isinstance(value, Mapping):  # tested before dataclasses: the outputs of transformers are both
        return dict(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return None


def _rebuild(like: Any, parts: dict[Any, Any]) -> Any:
    """Return a container of the type of ``like`` that holds ``parts``; ``like`` itself is never changed."""
    if type(like) is dict:
        return parts
    if type(like) is list or type(like) is tuple:
        return type(like)(parts.values())
    try:
        if isinstance(like, (dict, UserDict)):
            # Copying keeps state that a call of the constructor would lose: a default factory, further attributes.
            new: Any = copy.copy(like)
            for key, part in parts.items():
                new[key] = part
            return new
        if isinstance(like, Mapping):
            return type(like)(parts)  # type: ignore[call-arg]
        if isinstance(like, tuple) and hasattr(like, "_fields"):
            return type(like)._make(parts.values())  # type: ignore[attr-defined]
        if isinstance(like, (tuple, list)):
            return type(like)(list(parts.values()))
        new = copy.copy(like)
        for name, part in parts.items():
            object.__setattr__(new, name, part)  # works for a frozen dataclass too
        for name in list(getattr(new, "__dict__", ())):
            if isinstance(getattr(type(new), name, None), cached_property):
                del new.__dict__[name]  # drop a cached property, which was computed from the fields of `like`
        return new
    except (TypeError, AttributeError) as error:
        raise UsageError(
            explain(
                f"{type(like).__qualname__} cannot be rebuilt with other contents: {error}",
                fix="use a tuple, list, dict, named tuple or dataclass",
            )
        ) from error


def _label(container: Any, key: Any) -> str:
    is_field = not isinstance(container, (Mapping, list)) and isinstance(key, str)
    return f".{key}" if is_field else f"[{key!r}]"


def _collect(value: Any, path: str, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[path] = value
        return
    for key, part in (_open(value) or {}).items():
        _collect(part, path + _label(value, key), found)


def _count_shares(tensors: dict[str, Tensor], num_devices: int, dim: int) -> int:
    shares: dict[str, int] = {}
    for path, tensor in tensors.items():
        if tensor.dim() == 0:
            continue
        if not -tensor.dim() <= dim < tensor.dim():
            raise UsageError(
                explain(
                    f"The input{path} has no dimension {dim} to be cut along",
                    value=tuple(tensor.shape),
                    fix="choose another `dim`, or give the tensor that dimension",
                )
            )
        rows = tensor.size(dim)
        if rows > 0:  # a tensor with 0 rows can be cut into any number of shares
            rows_each = -(-rows // num_devices)
            shares[path] = -(-rows // rows_each)
    if not shares:
        return num_devices
    if len(set(shares.values())) > 1:
        listed = "; ".join(f"input{p} of shape {tuple(tensors[p].shape)}: {n}" for p, n in shares.items())
        raise UsageError(
            explain(
                f"Along dimension {dim} the inputs give different numbers of shares on {num_devices} devices: {listed}",
                fix="give them the same number of rows (`expand` a row that serves all), "
                "or pass what is no batch inside an object of your own, which is shared",
            )
        )
    return next(iter(shares.values()))


def _cut(value: Any, devices: list[torch.device], dim: int) -> list[Any]:
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return [value.to(device) for device in devices]
        if all(device.type != "cpu" for device in devices):
            # torch's own scatter copies from CPU memory in background streams. It views a complex tensor as a real one
            # with one more dimension at the end, so `dim` must be counted from the front.
            return list(torch_scatter_gather.scatter(value, devices, dim % value.dim()))
        # Use `chunk`, not `narrow`: autograd refuses in-place changes of chunks. Views by `narrow` would allow them, and so two
        # replicas, in two threads, would rewrite the autograd history of one tensor at once.
        return [part.to(device) for part, device in zip(value.chunk(len(devices), dim), devices, strict=True)]
    parts = _open(value)
    if parts is None or (not parts and type(value) not in (dict, list)):
        return [value] * len(devices)
    cut = {key: _cut(part, devices, dim) for key, part in parts.items()}
    if not isinstance(value, (dict, list)) and all(cut[key][0] is part for key, part in parts.items()):
        return [value] * len(devices)  # all shares are the same object, because nothing inside was cut or moved
    return [_rebuild(value, {key: shares[i] for key, shares in cut.items()}) for i in range(len(devices))]


def _join(values: Sequence[Any], device: torch.device, dim: int, path: str) -> Any:
    first = values[0]
    for replica, other in enumerate(values):
        if type(other) is not type(first) and not (isinstance(first, Tensor) and isinstance(other, Tensor)):
            raise _differs(path, replica, type(first).__qualname__, type(other).__qualname__)
    if isinstance(first, Tensor):
        return _concatenate(values, device, dim, path)
    opened = [_open(value) for value in values]
    if opened[0] is None:
        for replica, other in enumerate(values):
            if not _equal(first, other):
                raise _differs(path, replica, repr(first), repr(other))
        return first
    keys = opened[0].keys()
    for replica, parts in enumerate(opened):
        assert parts is not None
        if parts.keys() != keys:
            raise _differs(path, replica, f"the parts {list(keys)}", f"the parts {list(parts)}")
    joined = {
        key: _join([parts[key] for parts in opened if parts is not None], device, dim, path + _label(first, key))
        for key in keys
    }
    return _rebuild(first, joined)


def _concatenate(tensors: Sequence[Tensor], device: torch.device, dim: int, path: str) -> Tensor:
    if all(t.dim() == 0 for t in tensors):
        warnings.warn(
            f"The output{path} of each replica has no dimension; it becomes a vector with an entry per replica.",
            stacklevel=2,
        )
        tensors, dim = [t.unsqueeze(0) for t in tensors], 0
    try:
        if len(tensors) == 1:
            return tensors[0].to(device)
        if all(t.device.type != "cpu" for t in tensors):
            target = "cpu" if device.type == "cpu" else device
            joined: Tensor = torch_scatter_gather.gather(tensors, target, dim % tensors[0].dim())  # type: ignore[arg-type]
            return joined
        return torch.cat([t.to(device) for t in tensors], dim)
    except (RuntimeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UsageError(
            explain(
                f"The output{path} cannot be concatenated along dimension {dim}: {error}",
                value=[tuple(t.shape) for t in tensors],
                fix="let the module return tensors that differ in that dimension only",
            )
        ) from error


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # `==` of an unknown type may raise any error, or give no truth value: count it as unequal
        return False


def _differs(path: str, replica: int, first: str, other: str) -> UsageError:
    return UsageError(
        explain(
            f"The output{path} cannot be joined: replica 0 returned {first}, replica {replica} returned {other}",
            fix="let the module return one structure from every share, and what depends on the share as a tensor",
        )
    )
