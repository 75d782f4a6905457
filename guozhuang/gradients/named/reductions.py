"""Reductions over the ranks with scales and averages, also of integers and booleans, and the adaptive sum (Adasum)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ...exchange.adasum import factors
from . import collectives
from .requests import NamedRequest
from .submission import Reduction

_NUM_COLUMNS: Final = 1 << 18  # columns of an adaptive sum that are converted to float64 at a time, to limit memory

_WIDENED: Final = (torch.int16, torch.uint16)
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
    given: Tensor, request: NamedRequest, size: int, averages: bool, collective: Callable[[Tensor, Any], Tensor]
) -> Tensor:
    """Reduce a tensor over the ranks with the reduction and scales of a request; return the result.

    Integers are scaled and averaged as float64 and cut toward zero. A boolean result is true where any rank has true (MIN,
    PRODUCT: where all ranks have). 16-bit floating-point numbers are scaled in 32 bits, and 16-bit integers, which not every
    group can combine, are combined in 32 bits.

    Args:
        given: tensor of this rank; it is overwritten.
        request: the request, for its reduction and scales; the tensor's dtype may be any of its dtypes.
        size: number of ranks.
        averages: whether the group averages floating-point numbers by itself.
        collective: a function of a tensor and a ``ReduceOp`` that reduces the tensor over all ranks and returns the result.
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
    if given.dtype in _WIDENED:
        wide = given.to(torch.int32)
        result = collective(wide, _OPS[request.reduction])
        scale(result, request.postscale, size if is_mean else 1)
        return given.copy_(result) if result is wide else result.to(given.dtype)
    result = collective(given, _OPS[request.reduction])
    scale(result, request.postscale, size if is_mean else 1)
    return result


def scale(tensor: Tensor, factor: float, divisor: int = 1) -> None:
    """Multiply a tensor by ``factor`` and divide it by ``divisor``, in place."""
    if factor == 1.0 and divisor == 1:
        return
    if not tensor.is_floating_point():
        tensor.copy_(tensor.to(torch.float64).mul_(factor).div_(divisor))
    elif factor == 1.0:
        tensor.div_(divisor)
    else:
        tensor.mul_(factor / divisor)


def adaptive_sum(flat: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its adaptive sum over the ranks (factors: ``exchange.adasum``). Every rank must call it.

    Args:
        flat: the tensors, one after the other, of floating-point numbers; not empty.
        sizes: number of elements of each tensor.
        group: the ranks; their number may be any.
    """
    size, rank = group.size(), group.rank()
    length = -(-flat.numel() // size)
    sent = flat.new_zeros(size, length)
    sent.view(-1)[: flat.numel()].copy_(flat)
    got = torch.empty_like(sent)
    collectives.all_to_all(got, sent, (), (), group)
    grams = flat.new_zeros(len(sizes), size, size, dtype=torch.float64)
    pieces, begin = [], -rank * length
    for i, num_elements in enumerate(sizes):
        end = begin + num_elements
        if max(begin, 0) < min(end, length):
            pieces.append((i, max(begin, 0), min(end, length)))
        begin = end
    for i, first, last in pieces:
        for part in got[:, first:last].split(_NUM_COLUMNS, dim=1):
            part = part.to(torch.float64)
            grams[i].addmm_(part, part.mT)
    collectives.all_reduce(grams, dist.ReduceOp.SUM, group)
    by = factors(grams)
    own = sent.new_zeros(length)
    wide = torch.float64 if own.dtype == torch.float64 else torch.float32
    for i, first, last in pieces:
        own[first:last] = by[i].to(wide) @ got[:, first:last].to(wide)
    collectives.all_gather(got.view(-1), own, group)
    flat.copy_(got.view(-1)[: flat.numel()])
