"""Send picklable objects from one rank to all, or from all ranks to all.

Like Horovod, a rank unpickles what others send: run it among processes that trust each other.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import torch
from torch import Tensor

from guozhuang.errors import UsageError, explain

from ..common.process_sets import ProcessSet, global_process_set, member_of
from ..common.state import required
from .handles import synchronize_all
from .verbs import allgather_async, broadcast_


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return root's object on every rank; root gets its own object back. Every member of the process set must call.

    Args:
        obj: on root a picklable object, with cloudpickle installed also lambdas and local classes; ignored on other ranks.
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
    """Return the objects of all ranks, in rank order. Every member of the process set must call.

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
    """Return the object's pickle as a tensor of bytes; made by cloudpickle if that is installed.

    Raises:
        UsageError: the object cannot be pickled.
    """
    try:
        dumps, fix = importlib.import_module("cloudpickle").dumps, "send what it is made from"
    except ImportError:
        dumps, fix = (
            pickle.dumps,
            "install cloudpickle, which takes functions and classes that are defined inside of others",
        )
    try:
        data = dumps(obj)
    except Exception as error:  # __reduce__ of the object may raise anything
        what = f"the object cannot be pickled: {type(error).__name__}: {error}"
        raise UsageError(explain(what, value=type(obj).__name__, fix=fix)) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpickled(data: Tensor) -> Any:
    """Return the object that :func:`pickled` turned into these bytes."""
    return pickle.loads(data.numpy().tobytes())
