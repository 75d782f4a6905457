"""Send the state of an optimizer from one rank to all, without a step.

Horovod calls ``step()`` to make state where there is none, which moves the weights by weight decay and counts a step. Here
root describes its state, and the other ranks make the same state: nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from guozhuang.errors import explain
from guozhuang.gradients.named import DTYPES

from ..common.state import required
from .handles import synchronize_all
from .objects import broadcast_object
from .submitting import Min
from .verbs import allreduce_, broadcast_async_

_NAME = "broadcast_optimizer_state"
# Tensors of at most so many elements, as step counters, are sent in the description: a message for each would cost more.
_SMALL = 16


@dataclass(frozen=True)
class _Described:
    """The description of a tensor of root's state that other ranks get.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        is_beside: whether the tensor is on the CPU although its parameter is not.
        values: the values, on the CPU; None: they follow in a message of their own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_beside: bool
    values: Tensor | None


@dataclass(frozen=True)
class _Description:
    """The description of root's optimizer: options and parameter shapes by group, state by parameter and by other keys."""

    options: list[dict[str, Any]]
    shapes: list[list[tuple[int, ...]]]
    state: dict[int, Any]
    further: dict[Any, Any]


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Replace state and options of an optimizer by those of root, tensors and all other values. Every rank must call.

    State that a rank lacks is made there, state that root lacks is dropped; parameters do not change. So a checkpoint needs to
    be loaded on root only.

    Args:
        optimizer: an optimizer with the same parameters, in the same groups, on all ranks.
        root_rank: the rank whose state all ranks get.
        model: not used; Horovod looks for sparse embeddings in it before it makes a step, and no step is made here.

    Raises:
        ValueError: no optimizer, or LBFGS; the parameters of the ranks differ (on every rank).
        HorovodInternalError: a rank is lost. The optimizer is unchanged, but tensors that it had already may hold root's
            values.
    """
    if not hasattr(optimizer, "param_groups"):
        what = f"what has no param_groups is no optimizer: an object of {type(optimizer).__name__}"
        raise ValueError(explain(what, fix="give the optimizer; parameters are for hvd.broadcast_parameters"))
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(explain("the state of LBFGS cannot be broadcast", fix="use another optimizer"))
    rank = required().rank
    tensors: list[Tensor] = []
    described = _described(optimizer, tensors) if rank == root_rank else None
    described = broadcast_object(described, root_rank, _NAME)
    shapes = _shapes(optimizer)
    fits = torch.tensor([shapes == described.shapes], dtype=torch.uint8)
    if not allreduce_(fits, name=f"{_NAME}.fits", op=Min).item():
        what = "the optimizers of the ranks hold different parameters"
        value = "here " + _counted(shapes) + f", on rank {root_rank} " + _counted(described.shapes)
        fix = "build the same model and the same groups of parameters on every rank"
        raise ValueError(explain(what, value=value, rank=rank, fix=fix))
    taken = None if rank == root_rank else _Taken(optimizer, described)
    started = []
    for number, tensor in enumerate(tensors if taken is None else taken.tensors):
        contiguous = tensor.contiguous()
        started.append((broadcast_async_(contiguous, root_rank, f"{_NAME}.{number}"), tensor, contiguous))
    synchronize_all(handle for handle, _, _ in started)
    for _, tensor, received in started:
        if received.data_ptr() != tensor.data_ptr():
            tensor.copy_(received)
    if taken is not None:
        taken.put(optimizer)


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[tuple[int, ...]]]:
    return [[tuple(param.shape) for param in group["params"]] for group in optimizer.param_groups]


def _counted(shapes: list[list[tuple[int, ...]]]) -> str:
    return f"{sum(map(len, shapes))} parameters in {len(shapes)} groups"


def _described(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> _Description:
    """Describe root's optimizer; append the tensors that are sent in messages of their own to ``tensors``."""
    params = _params(optimizer)
    numbers = {param: number for number, param in enumerate(params)}
    options = [
        {key: _packed(value, _first(group), tensors) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state: dict[int, Any] = {}
    further: dict[Any, Any] = {}
    for key, entries in optimizer.state.items():
        if key in numbers:
            state[numbers[key]] = _packed(entries, key, tensors)
        elif not isinstance(key, Tensor):
            further[key] = _packed(entries, None, tensors)
    return _Description(options, _shapes(optimizer), state, further)


def _first(group: dict[str, Any]) -> Tensor | None:
    return group["params"][0] if group["params"] else None


def _packed(value: Any, near: Tensor | None, tensors: list[Tensor]) -> Any:
    """Return ``value`` with descriptions in place of tensors; ``near`` is the parameter to which the value belongs."""
    if isinstance(value, Tensor):
        is_sent = value.layout == torch.strided and value.dtype in DTYPES and value.numel() > _SMALL
        is_beside = value.device.type == "cpu" and near is not None and near.device.type != "cpu"
        if is_sent:
            tensors.append(value.detach())
        return _Described(
            tuple(value.shape), value.dtype, is_beside, None if is_sent else value.detach().to("cpu", copy=True)
        )
    if type(value) is dict:
        return {key: _packed(each, near, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_packed(each, near, tensors) for each in value])
    return value


class _Taken:
    """The state that a rank other than root builds from root's description, apart from its optimizer until :meth:`put`.

    Attributes:
        tensors: the tensors that receive root's values, in the order in which ``_described`` appends them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, described: _Description) -> None:
        self.tensors: list[Tensor] = []
        self._small: list[tuple[Tensor, Tensor]] = []  # tensors of the optimizer that stay, and root's values
        self._options: list[dict[str, Any]] = []
        for group, options in zip(optimizer.param_groups, described.options, strict=True):
            near = _first(group)
            self._options.append({key: self._unpacked(value, group.get(key), near) for key, value in options.items()})
        params = _params(optimizer)
        self._state: dict[Any, Any] = {}
        for number, entries in described.state.items():
            param = params[number]
            self._state[param] = self._unpacked(entries, optimizer.state.get(param), param)
        for key, entries in described.further.items():
            self._state[key] = self._unpacked(entries, optimizer.state.get(key), None)

    def put(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the state and options of the optimizer by these."""
        for tensor, values in self._small:
            tensor.copy_(values)
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
            group.update(options)
        optimizer.state.clear()
        optimizer.state.update(self._state)

    def _unpacked(self, packed: Any, own: Any, near: Tensor | None) -> Any:
        """Undo ``_packed``; ``own`` is this rank's value in the same place, and is used again if it is a tensor that fits."""
        if isinstance(packed, _Described):
            return self._tensor(packed, own, near)
        if type(packed) is dict:
            found = own if isinstance(own, dict) else {}
            return {key: self._unpacked(each, found.get(key), near) for key, each in packed.items()}
        if type(packed) in (list, tuple):
            olds = own if isinstance(own, list | tuple) and len(own) == len(packed) else [None] * len(packed)
            return type(packed)([self._unpacked(each, old, near) for each, old in zip(packed, olds, strict=True)])
        return packed

    def _tensor(self, packed: _Described, own: Any, near: Tensor | None) -> Tensor:
        device = near.device if near is not None and not packed.is_beside else torch.device("cpu")
        fits = isinstance(own, Tensor) and (own.shape, own.dtype, own.device) == (packed.shape, packed.dtype, device)
        if packed.values is not None:
            if not fits:
                return packed.values.to(device)
            self._small.append((own.detach(), packed.values))
        elif fits:
            self.tensors.append(own.detach())
        else:
            if near is not None and near.shape == packed.shape:  # use the memory format of the parameter
                own = torch.empty_like(near.detach(), dtype=packed.dtype, device=device)
            else:
                own = torch.empty(packed.shape, dtype=packed.dtype, device=device)
            self.tensors.append(own)
        found: Tensor = own
        return found
