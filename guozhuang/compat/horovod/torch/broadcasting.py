"""Broadcast of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from guozhuang.errors import explain
from guozhuang.gradients.named import Handle, Kind

from ..common.process_sets import ProcessSet, global_process_set, member_of
from ..common.state import required
from .handles import synchronize
from .reducing import allreduce
from .submitting import Average, enqueue


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return root's tensor, as a new one on every rank. Every member of the process set must call.

    Differentiable: the gradient on root is the *mean* of the gradients over the ranks, elsewhere it is zero.

    Args:
        tensor: contiguous, of the same shape and dtype on all ranks.
        root_rank: rank in the global process set, also where another set is given; a member of that.
        name: by which ranks find each other's call; None: by the order of unnamed calls.
        process_set: whose members take part.

    Raises:
        ValueError: what cannot be sent; root is no member.
        HorovodInternalError: ranks differ, or one is lost; a rank has joined.
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return, no-untyped-call]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``broadcast`` and return a handle for ``synchronize``. Not differentiable."""
    return _begin(tensor, root_rank, name, process_set, in_place=False)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As ``broadcast``, into the tensor itself, which is returned. Not differentiable."""
    return synchronize(_begin(tensor, root_rank, name, process_set, in_place=True))  # type: ignore[no-any-return]


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``broadcast_`` and return a handle for ``synchronize``."""
    return _begin(tensor, root_rank, name, process_set, in_place=True)


def _begin(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool) -> int:
    members = member_of(process_set).ranks
    if root_rank not in members:
        what = f"root_rank is no member of the process set, which has the ranks {list(members)}"
        fix = "give root's rank among all ranks, hvd.rank() there, also inside a process set"
        raise ValueError(explain(what, value=root_rank, rank=required().rank, fix=fix))

    def finish(outputs: list[Tensor], _: Handle) -> Tensor:
        return tensor if in_place else outputs[0]

    root = members.index(root_rank)
    return enqueue(Kind.BROADCAST, "broadcast", [tensor], name, process_set, finish, in_place=in_place, root=root)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(_begin(tensor, root_rank, name, process_set, in_place=False))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        mean = allreduce(gradient.contiguous(), op=Average, process_set=ctx.process_set)
        if required().rank != ctx.root_rank:  # zeros that lead back to the others' gradients, which may be infinite
            mean = mean.masked_fill(torch.ones((), dtype=torch.bool, device=mean.device), 0)
        return mean, None, None, None
