"""The collectives that carry data; they call the methods of a group directly.

``torch.distributed``'s functions cannot be used: they do not know the group over gloo connections that can be cut, and replace
a group's errors by errors of their own. Each call returns when the result is there; on an accelerator, when it is ordered in
the current stream.

[Note: whose error] An error that a group raises mostly means that a peer is lost; an error from other code of this package is a
fault of its own. Both are RuntimeErrors. So a group's errors are wrapped in ``CarrierError`` where they are raised, and the
engine, when it ends, tells the two apart by that.
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
    """A group failed in a collective; ``__cause__`` is the group's own error. See [Note: whose error]."""


def carried(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function that only calls a group, so that the group's errors become ``CarrierError``. See [Note: whose error]."""

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
    """Reduce a tensor over all ranks, in place."""
    group.allreduce([tensor], _options(dist.AllreduceOptions, reduceOp=op)).wait()


@carried
def broadcast(tensor: Tensor, root: int, group: Any) -> None:
    """Copy the tensor of rank ``root`` of the group to all ranks, in place."""
    group.broadcast([tensor], _options(dist.BroadcastOptions, rootRank=root)).wait()


@carried
def all_gather(output: Tensor, given: Tensor, group: Any) -> None:
    """Write the tensors of all ranks into ``output``, one after the other."""
    group._allgather_base(output, given, _options(torch._C._distributed_c10d.AllgatherOptions)).wait()


@carried
def reduce_scatter(output: Tensor, given: Tensor, op: Any, group: Any) -> None:
    """Reduce the r-th parts of all ranks' tensors into ``output`` on rank r."""
    group._reduce_scatter_base(output, given, _options(dist.ReduceScatterOptions, reduceOp=op)).wait()


@carried
def all_to_all(output: Tensor, given: Tensor, takes: Sequence[int], gives: Sequence[int], group: Any) -> None:
    """Send part r of each rank's tensor to rank r; sizes of the parts are in elements, and empty lists mean equal parts."""
    group.alltoall_base(output, given, list(takes), list(gives), _options(dist.AllToAllOptions)).wait()


def _options(kind: Any, **fields: Any) -> Any:
    options = kind()
    for name, value in {"asyncOp": False, **fields}.items():
        setattr(options, name, value)
    return options
