"""The collectives that carry data, by the methods of the group itself.

``torch.distributed`` does not know the group that goes through gloo in connections that can be cut, and hides what such a group
raises behind an error of its own. Each call returns when the result is there; on an accelerator, when it is ordered in the
current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
    """Combine a tensor of all ranks, in place."""
    opts = dist.AllreduceOptions()
    opts.reduceOp, opts.asyncOp = op, False
    group.allreduce([tensor], opts).wait()


def broadcast(tensor: Tensor, root: int, group: Any) -> None:
    """Copy the tensor of a rank of the group to all ranks."""
    opts = dist.BroadcastOptions()
    opts.rootRank, opts.asyncOp = root, False
    group.broadcast([tensor], opts).wait()


def all_gather(output: Tensor, given: Tensor, group: Any) -> None:
    """Lay the tensors of all ranks one after the other."""
    opts = torch._C._distributed_c10d.AllgatherOptions()
    opts.asyncOp = False
    group._allgather_base(output, given, opts).wait()


def reduce_scatter(output: Tensor, given: Tensor, op: Any, group: Any) -> None:
    """Combine the r-th part of all ranks' tensors on rank r."""
    opts = dist.ReduceScatterOptions()
    opts.reduceOp, opts.asyncOp = op, False
    group._reduce_scatter_base(output, given, opts).wait()


def all_to_all(output: Tensor, given: Tensor, takes: Sequence[int], gives: Sequence[int], group: Any) -> None:
    """Send the r-th part of each rank's tensor to rank r; parts in elements, none for equal ones."""
    opts = dist.AllToAllOptions()
    opts.asyncOp = False
    group.alltoall_base(output, given, list(takes), list(gives), opts).wait()
