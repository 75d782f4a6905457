"""All-gather: of one tensor, and of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from guozhuang.gradients.named import Handle, Kind

from ..common.exceptions import HorovodInternalError
from ..common.process_sets import ProcessSet, global_process_set
from . import reducing
from .handles import synchronize
from .submitting import Average, check_group, enqueue


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Join the tensors of all ranks along their first dimension, in rank order. Every member of the set must call.

    Differentiable: the gradient is this rank's part of the *mean* of the gradients over the ranks.

    Args:
        tensor: contiguous; the first dimension may differ between ranks, the others and the dtype may not.
        name: by which ranks find each other's call; None: by the order of unnamed calls.
        process_set: whose members take part.

    Raises:
        ValueError: what cannot be sent.
        HorovodInternalError: ranks differ, or one is lost; a tensor has no dimension; a rank has joined.
    """
    (gathered,) = gather_all([tensor], name, process_set, is_group=False)
    return gathered


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin ``allgather`` and return a handle for ``synchronize``. Not differentiable."""
    return _begin([tensor], name, process_set, is_group=False)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """All-gather several tensors as one unit: all of them or none. As ``allgather`` otherwise; returns a list."""
    check_group(tensors)
    return list(gather_all(tensors, name, process_set, is_group=True))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``grouped_allgather`` and return a handle for ``synchronize``, which gives a list. Not differentiable."""
    return _begin(tensors, name, process_set, is_group=True)


def gather_all(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, *, is_group: bool
) -> tuple[Tensor, ...]:
    """As ``grouped_allgather`` with ``is_group``, else as ``allgather`` of the one tensor."""
    return tuple(_AllGather.apply(is_group, name, process_set, *tensors))  # type: ignore[no-untyped-call]


def _begin(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, *, is_group: bool) -> int:
    if is_group:
        check_group(tensors)

    def finish(outputs: list[Tensor], _: Handle) -> Tensor | list[Tensor]:
        return outputs if is_group else outputs[0]

    operation = "grouped_allgather" if is_group else "allgather"
    return enqueue(Kind.ALLGATHER, operation, tensors, name, process_set, finish)


class _AllGather(torch.autograd.Function):
    """Of one tensor or several; the arguments before them are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any, is_group: bool, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.is_group, ctx.process_set = is_group, process_set
        ctx.num_rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        result = synchronize(_begin(tensors, name, process_set, is_group=is_group))
        return tuple(result) if is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Together with the gradients, in one round: how many rows each rank has of each tensor.
        rows = _begin([torch.tensor([ctx.num_rows])], None, ctx.process_set, is_group=False)
        sent = [gradient.contiguous() for gradient in gradients]
        try:
            mean = reducing.grouped_allreduce(sent, op=Average, process_set=ctx.process_set)
        except HorovodInternalError:
            with contextlib.suppress(HorovodInternalError):
                synchronize(rows)  # nothing is left under way
            raise
        starts = synchronize(rows)[: ctx.process_set.rank()].sum(0).tolist()
        own = [each.narrow(0, start, count) for each, start, count in zip(mean, starts, ctx.num_rows, strict=True)]
        return (None, None, None, *own)
