"""The collectives that carry a channel's data; they call the methods of a process group directly.

``torch.distributed``'s functions cannot be used: they do not know the group over gloo connections that can be cut, and replace
a group's errors by errors of their own. Each call returns when the result is there; on an accelerator, when it is ordered in
the current stream.

[Note: whose error] An error that a group raises mostly means that a peer is lost; an error from other code of this package is a
fault of its own. Both are RuntimeErrors. So a group's errors are wrapped in ``CarrierError`` where they are raised, and the
engine, when it ends, distinguishes the two by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import MismatchError
from ...groups.verbs import start


class CarrierError(RuntimeError):
    """A group failed in a collective; ``__cause__`` is the group's own error. See [Note: whose error]."""


def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
    """Reduce a tensor over all ranks, in place."""
    _wait(group, "allreduce", [tensor], reduceOp=op)


def broadcast(tensor: Tensor, root: int, group: Any) -> None:
    """Copy the tensor of rank ``root`` of the group to all ranks, in place."""
    _wait(group, "broadcast", [tensor], rootRank=root)


def all_gather(output: Tensor, given: Tensor, group: Any) -> None:
    """Write the tensors of all ranks into ``output``, one after the other."""
    _wait(group, "all_gather_single", output, given)


def reduce_scatter(output: Tensor, given: Tensor, op: Any, group: Any) -> None:
    """Reduce the r-th parts of all ranks' tensors into ``output`` on rank r."""
    _wait(group, "reduce_scatter_single", output, given, reduceOp=op)


def all_to_all(output: Tensor, given: Tensor, takes: Sequence[int], gives: Sequence[int], group: Any) -> None:
    """Send part r of each rank's tensor to rank r; sizes of the parts are in elements, and empty lists mean equal parts."""
    _wait(group, "all_to_all_single", output, given, list(takes), list(gives))


def _wait(group: Any, method: str, *arguments: Any, **fields: Any) -> None:
    """Call a method of a group, whose options have these fields, and wait for the result."""
    try:
        start(group, method, *arguments, **fields).wait()
    except (MismatchError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise CarrierError(str(error)) from error
