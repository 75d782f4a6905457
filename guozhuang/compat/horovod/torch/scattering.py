"""Reduce-scatter: of one tensor, and of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from guozhuang.errors import explain
from guozhuang.gradients.named import Handle, Kind, Reduction

from ..common.process_sets import ProcessSet, global_process_set
from .compression import Compression, Compressor
from .gathering import gather_all
from .handles import synchronize
from .submitting import Average, Sum, check_group, enqueue, scales


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine a tensor over all ranks, and return this rank's rows of the result. Every member of the set must call.

    The first dimension is cut into consecutive parts, one for each rank; where it cannot be divided evenly the first ranks
    have a row more. Differentiable: the gradient is the all-gather of the gradients, for Sum times the number of ranks,
    times both factors.

    Args:
        tensor: contiguous, of the same shape and dtype on all ranks, with a dimension at least.
        name: by which ranks find each other's call; None: by the order of unnamed calls.
        compression: applied before, undone after.
        op: Average or Sum.
        process_set: whose members take part.
        prescale_factor: multiplies each tensor before.
        postscale_factor: multiplies the result.

    Raises:
        ValueError: what cannot be sent; another ``op``.
        HorovodInternalError: ranks differ, or one is lost; a tensor has no dimension; a rank has joined.
    """
    sent, ctx = compression.compress(tensor)
    (part,) = _ReduceScatter.apply(False, name, op, process_set, prescale_factor, postscale_factor, sent)  # type: ignore[no-untyped-call]
    return compression.decompress(part, ctx)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin ``reducescatter`` and return a handle for ``synchronize``. Not differentiable."""
    return _begin([tensor], name, op, process_set, prescale_factor, postscale_factor, is_group=False)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce-scatter several tensors as one unit: all of them or none. As ``reducescatter`` otherwise; returns a list."""
    check_group(tensors)
    sent = [compression.compress(tensor) for tensor in tensors]
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    parts = _ReduceScatter.apply(True, *arguments, *(tensor for tensor, _ in sent))  # type: ignore[no-untyped-call]
    return [compression.decompress(part, ctx) for part, (_, ctx) in zip(parts, sent, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin ``grouped_reducescatter`` and return a handle for ``synchronize``, which gives a list. Not differentiable."""
    return _begin(tensors, name, op, process_set, prescale_factor, postscale_factor, is_group=True)


def _begin(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    *,
    is_group: bool,
) -> int:
    if is_group:
        check_group(tensors)
    if op not in (Average, Sum):
        raise ValueError(explain("reducescatter combines by Average or Sum", value=op))

    def finish(outputs: list[Tensor], _: Handle) -> Tensor | list[Tensor]:
        return outputs if is_group else outputs[0]

    return enqueue(
        Kind.REDUCESCATTER,
        "grouped_reducescatter" if is_group else "reducescatter",
        tensors,
        name,
        process_set,
        finish,
        reduction=Reduction(op),
        **scales(prescale, postscale),
    )


class _ReduceScatter(torch.autograd.Function):
    """Of one tensor or several; the arguments before them are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        is_group: bool,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.is_group, ctx.process_set = is_group, process_set
        result = synchronize(_begin(tensors, name, op, process_set, prescale, postscale, is_group=is_group))
        ctx.factor = prescale * postscale * (process_set.size() or 1 if op == Sum else 1)
        return tuple(result) if is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent = [(gradient * ctx.factor if ctx.factor != 1 else gradient).contiguous() for gradient in gradients]
        return (None,) * 6 + gather_all(sent, None, ctx.process_set, is_group=ctx.is_group)
