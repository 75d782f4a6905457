"""Send parameters, the state of an optimizer, and objects between ranks; the names are those of ``horovod.torch.functions``.

Like Horovod, a rank unpickles what others send: run it among processes that trust each other.

[Note: no step] Horovod calls ``step()`` to make optimizer state where there is none, which moves the weights by weight decay
and counts a step. Here root describes its state, and the other ranks make the same state: nothing else changes.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from guozhuang.errors import UsageError, explain
from guozhuang.gradients.named import DTYPES

from ..common.process_sets import ProcessSet, global_process_set, member_of
from ..common.state import required
from .handles import synchronize_all
from .submitting import Min
from .verbs import allgather_async, allreduce_, broadcast_, broadcast_async_

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

_STATE = "broadcast_optimizer_state"
# Tensors of at most this many elements, such as step counters, are sent inside the pickled description, to save messages.
_SMALL = 16


def broadcast_parameters(
    params: Mapping[str, Tensor | None] | list[Tensor] | list[tuple[str | None, Tensor]], root_rank: int
) -> None:
    """Overwrite tensors with those of ``root_rank``. Every rank must call this with the same names, shapes and dtypes.

    Args:
        params: a dictionary (``model.state_dict()``), or a list of tensors or of (name, tensor)
            (``list(model.named_parameters())``). Values that are None are skipped. Tensors need not be contiguous.
        root_rank: the rank whose values all ranks get.

    Raises:
        ValueError: ``params`` is of another type, as the generator ``model.named_parameters()``; a name comes twice; a tensor
            cannot be sent.
        HorovodInternalError: ranks differ, or one is lost. No operation is left running, and it may be called again; some
            tensors may hold root's values already.
    """
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        fix = "give model.state_dict(), or list(model.named_parameters())"
        raise ValueError(explain("invalid params", value=type(params).__name__, fix=fix))
    wrong = [(name, type(each).__name__) for name, each in named if each is not None and not isinstance(each, Tensor)]
    if wrong:
        fix = "broadcast_object brings other things"
        raise ValueError(explain("invalid params: not all of them are tensors", value=wrong[:5], fix=fix))
    # Check all tensors before the first one is sent, so that an error leaves no operation running.
    names = Counter(name for name, _ in named if name is not None)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(explain("invalid params: these names come twice", value=twice[:5]))
    unsent = [(name, _kind(each)) for name, each in named if each is not None and not _can_be_sent(each)]
    if unsent:
        fix = "leave them out; broadcast_object brings other things"
        raise ValueError(explain("invalid params: no such tensors can be sent", value=unsent[:5], fix=fix))
    _overwrite([(name, tensor.detach()) for name, tensor in named if tensor is not None], root_rank)


def _overwrite(named: Iterable[tuple[str | None, Tensor]], root_rank: int) -> None:
    """Overwrite tensors, which need not be contiguous, with root's. No operation is left running if one fails."""
    started = []
    for name, tensor in named:
        contiguous = tensor.contiguous()  # no copy if the tensor is contiguous
        started.append((broadcast_async_(contiguous, root_rank, name), tensor, contiguous))
    synchronize_all(handle for handle, _, _ in started)
    for _, tensor, received in started:
        if received.data_ptr() != tensor.data_ptr():
            tensor.copy_(received)


def _can_be_sent(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dtype in DTYPES


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype}, {tensor.layout}"


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return root's object on every rank; root gets its own object back. Every member of the process set must call this.

    Args:
        obj: on root an object that cloudpickle takes, also lambdas and local classes; ignored on other ranks.
        root_rank: rank in the global process set; a member of ``process_set``.
        name: beginning of the names under which tensors are sent, "<name>.sz" and "<name>.t"; None: a name by the order of
            unnamed calls, since the types of the objects may differ between ranks.
        process_set: the process set whose members take part.

    Raises:
        UsageError: the object cannot be pickled (on root; the other ranks get a ValueError).
        ValueError: not initialised; this process, or root, is no member of the set; an operation of that name has not ended.
        HorovodInternalError: ranks differ, or one is lost.
    """
    prefix = name or member_of(process_set).full_name("broadcast_object", None)
    is_root = required().rank == root_rank
    data, error = torch.empty(0, dtype=torch.uint8), None
    if is_root:
        try:
            data = pickled(obj)
        except UsageError as raised:
            error = raised
    num_bytes = broadcast_(torch.tensor([-1 if error else data.numel()]), root_rank, f"{prefix}.sz", process_set)
    if error is not None:
        raise error
    if num_bytes.item() < 0:
        what = "root could not pickle the object it was to broadcast"
        raise ValueError(
            explain(what, value=f"root_rank={root_rank}", rank=required().rank, fix="see the error on root")
        )
    if not is_root:
        data = torch.empty(int(num_bytes.item()), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{prefix}.t", process_set)
    return obj if is_root else unpickled(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order. Every member of the process set must call this.

    Args:
        obj: a picklable object, see ``broadcast_object``.
        name: beginning of the names under which tensors are sent; None: a name by the order of unnamed calls.
        process_set: the process set whose members take part.

    Raises:
        UsageError: the object of a rank cannot be pickled (on it; the other ranks get a ValueError).
        ValueError: not initialised; this process is no member of the set; an operation of that name has not ended.
        HorovodInternalError: ranks differ, or one is lost.
    """
    prefix = name or member_of(process_set).full_name("allgather_object", None)
    data, error = torch.empty(0, dtype=torch.uint8), None
    try:
        data = pickled(obj)
    except UsageError as raised:
        error = raised
    sizes = allgather_async(torch.tensor([-1 if error else data.numel()]), f"{prefix}.sz", process_set)
    everything = allgather_async(data, f"{prefix}.t", process_set)
    lengths, joined = synchronize_all([sizes, everything])
    lengths = lengths.tolist()
    if error is not None:
        raise error
    failed = [rank for rank, length in zip(member_of(process_set).ranks, lengths, strict=True) if length < 0]
    if failed:
        what = "these ranks could not pickle the object they were to gather"
        raise ValueError(explain(what, value=failed, rank=required().rank, fix="see the error there"))
    return [unpickled(part) for part in joined.split(lengths)]


def pickled(obj: Any) -> Tensor:
    """Return the object's pickle, made by cloudpickle, as a tensor of bytes.

    Raises:
        UsageError: the object cannot be pickled.
    """
    try:
        data = cloudpickle.dumps(obj)
    except Exception as error:  # __reduce__ of the object may raise anything
        what, fix = f"the object cannot be pickled: {type(error).__name__}: {error}", "send what it is made from"
        raise UsageError(explain(what, value=type(obj).__name__, fix=fix)) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpickled(data: Tensor) -> Any:
    """Return the object that :func:`pickled` turned into these bytes."""
    return pickle.loads(data.numpy().tobytes())


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Replace state and options of an optimizer by those of root, tensors and all other values. Every rank must call this.

    State that a rank lacks is made there, see [Note: no step]; state that root lacks is dropped; parameters do not change. So a
    checkpoint needs to be loaded on root only.

    Args:
        optimizer: an optimizer with the same parameters, in the same groups, on all ranks.
        root_rank: the rank whose state all ranks get.
        model: not used; Horovod looks for sparse embeddings in it before it makes a step, and no step is made here.

    Raises:
        ValueError: no optimizer, or LBFGS; the parameters of the ranks differ (on every rank).
        HorovodInternalError: a rank is lost. The optimizer is unchanged, but tensors that it had already may hold root's
            values.
    """
    send_optimizer_state(optimizer, root_rank, _STATE)


def send_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, called: str) -> None:
    """Do what ``broadcast_optimizer_state`` says, in operations whose names begin with ``called``."""
    if not hasattr(optimizer, "param_groups"):
        what = f"what has no param_groups is no optimizer: an object of {type(optimizer).__name__}"
        raise ValueError(explain(what, fix="give the optimizer; parameters are for broadcast_parameters"))
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(explain("the state of LBFGS cannot be broadcast", fix="use another optimizer"))
    rank = required().rank
    tensors: list[Tensor] = []
    described = _described(optimizer, tensors) if rank == root_rank else None
    described = broadcast_object(described, root_rank, called)
    shapes = _shapes(optimizer)
    fits = torch.tensor([shapes == described.shapes], dtype=torch.uint8)
    if not allreduce_(fits, name=f"{called}.fits", op=Min).item():
        what = "the optimizers of the ranks hold different parameters"
        value = "here " + _counted(shapes) + f", on rank {root_rank} " + _counted(described.shapes)
        fix = "build the same model and the same groups of parameters on every rank"
        raise ValueError(explain(what, value=value, rank=rank, fix=fix))
    taken = None if rank == root_rank else _Taken(optimizer, described)
    sent = tensors if taken is None else taken.tensors
    _overwrite(((f"{called}.{number}", tensor) for number, tensor in enumerate(sent)), root_rank)
    if taken is not None:
        taken.put(optimizer)


@dataclass(frozen=True)
class _Described:
    """Describes to other ranks a tensor of root's optimizer state, so that they can make one like it.

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
    """Describes root's optimizer to other ranks: options and shapes by group, state by parameter number and by other keys."""

    options: list[dict[str, Any]]
    shapes: list[list[tuple[int, ...]]]
    state: dict[int, Any]
    further: dict[Any, Any]


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
    """Return ``value`` with a ``_Described`` in place of each tensor; ``near`` is the parameter to which the value belongs."""
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
    """Optimizer state that a rank builds from root's description; :meth:`put` then stores it in the rank's optimizer.

    Attributes:
        tensors: the tensors that receive root's values, in the order in which ``_described`` appends them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, described: _Description) -> None:
        self.tensors: list[Tensor] = []
        self._small: list[tuple[Tensor, Tensor]] = []  # (this rank's tensor, root's values to copy into it)
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
        """Replace the state and options of the optimizer by those that were built from root's description."""
        for tensor, values in self._small:
            tensor.copy_(values)
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
            group.update(options)
        optimizer.state.clear()
        optimizer.state.update(self._state)

    def _unpacked(self, packed: Any, own: Any, near: Tensor | None) -> Any:
        """Undo ``_packed``; ``own`` is this rank's value in the same place, which is kept if it is a tensor that fits."""
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
