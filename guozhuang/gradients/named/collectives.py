"""The collectives that carry data, by the methods of the group itself.

``torch.distributed`` does not know the group that goes through gloo in connections that can be cut, and hides what such a group
raises behind an error of its own. Each call returns when the result is there; on an accelerator, when it is ordered in the
current stream.

[Note: whose error] What a group raises is mostly the loss of a peer; what this package, or PyTorch in its hands, raises is its
own fault. Both are RuntimeErrors. So the former is wrapped where it comes from, and whoever ends the engine tells them apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import MismatchError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class CarrierError(RuntimeError):
    """A group failed in a collective; the cause is what it raised. See [Note: whose error]."""


def carried(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function that does nothing but call a group tell the group's errors as such. See [Note: whose error]."""

    @functools.wraps(call)
    def calling(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except (MismatchError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise CarrierError(str(error)) from error

    return calling


@carried
def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
    """Combine a tensor of all ranks, in place."""
    group.allreduce([tensor], _options(dist.AllreduceOptions, reduceOp=op)).wait()


@carried
def broadcast(tensor: Tensor, root: int, group: Any) -> None:
    """Copy the tensor of a rank of the group to all ranks."""
    group.broadcast([tensor], _options(dist.BroadcastOptions, rootRank=root)).wait()


@carried
def all_gather(output: Tensor, given: Tensor, group: Any) -> None:
    """Lay the tensors of all ranks one after the other."""
    group._allgather_base(output, given, _options(torch._C._distributed_c10d.AllgatherOptions)).wait()


@carried
def reduce_scatter(output: Tensor, given: Tensor, op: Any, group: Any) -> None:
    """Combine the r-th part of all ranks' tensors on rank r."""
    group._reduce_scatter_base(output, given, _options(dist.ReduceScatterOptions, reduceOp=op)).wait()


@carried
def all_to_all(output: Tensor, given: Tensor, takes: Sequence[int], gives: Sequence[int], group: Any) -> None:
    """Send the r-th part of each rank's tensor to rank r; parts in elements, none for equal ones."""
    group.alltoall_base(output, given, list(takes), list(gives), _options(dist.AllToAllOptions)).wait()


def _options(kind: Any, **fields: Any) -> Any:
    options = kind()
    for name, value in {"asyncOp": False, **fields}.items():
        setattr(options, name, value)
    return options
