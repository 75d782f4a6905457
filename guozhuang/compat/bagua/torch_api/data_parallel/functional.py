"""Collectives through which gradients flow."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import UsageError, explain


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Tensor:
    """Return a new tensor that combines those of all ranks; its gradient is combined in the same way. Collective.

    Args:
        tensor: of equal shape and dtype on all ranks.
        op: SUM or MAX of ``torch.distributed.ReduceOp``.
        group: the ranks, a group of ``torch.distributed``; None: all.

    Raises:
        UsageError: another operation.
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        raise UsageError(
            explain("all_reduce with gradients sums or takes the maximum", value=op, fix="give SUM or MAX")
        )
    combined: Tensor = _AllReduce.apply(tensor, op, group)  # type: ignore[no-untyped-call]
    return combined


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: Any, group: Any) -> Tensor:
        ctx.op, ctx.group = op, group
        result = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, op=op, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _AllReduce.forward(ctx, gradients[0], ctx.op, ctx.group), None, None
