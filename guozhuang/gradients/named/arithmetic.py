"""What a reduction does besides adding: scales, averages, and what sums of integers and of truth values mean."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from .submission import Reduction
from .table import Request

_OPS: Final = MappingProxyType(
    {
        Reduction.AVERAGE: dist.ReduceOp.SUM,
        Reduction.SUM: dist.ReduceOp.SUM,
        Reduction.MIN: dist.ReduceOp.MIN,
        Reduction.MAX: dist.ReduceOp.MAX,
        Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
    }
)


def combine(
    given: Tensor, request: Request, size: int, averages: bool, collective: Callable[[Tensor, Any], Tensor]
) -> Tensor:
    """Reduce a tensor as a request wants it; return the result.

    Integers are scaled and averaged as float64 and cut toward zero. Truth values are true where one is (MIN, PRODUCT: where all
    are). Floating-point numbers of 16 bits are scaled in 32.

    Args:
        given: of this rank; it is overwritten.
        request: reduction and scales; the tensor's dtype may be any of its dtypes.
        size: number of ranks.
        averages: whether the group averages floating-point numbers by itself.
        collective: reduces, on all ranks, from what it is given to what it returns.
    """
    scale(given, request.prescale)
    if given.dtype == torch.bool:
        every = request.reduction in (Reduction.MIN, Reduction.PRODUCT)
        op = dist.ReduceOp.MIN if every else dist.ReduceOp.MAX
        result = collective(given.view(torch.uint8), op).view(torch.bool)
        scale(result, request.postscale)
        return result
    is_mean = request.reduction == Reduction.AVERAGE
    if is_mean and averages and given.is_floating_point():
        result = collective(given, dist.ReduceOp.AVG)
        scale(result, request.postscale)
        return result
    result = collective(given, _OPS[request.reduction])
    scale(result, request.postscale, size if is_mean else 1)
    return result


def scale(tensor: Tensor, factor: float, divisor: int = 1) -> None:
    """Multiply a tensor, and divide it, in place."""
    if factor == 1.0 and divisor == 1:
        return
    if not tensor.is_floating_point():
        tensor.copy_(tensor.to(torch.float64).mul_(factor).div_(divisor))
    elif factor == 1.0:
        tensor.div_(divisor)
    else:
        tensor.mul_(factor / divisor)
