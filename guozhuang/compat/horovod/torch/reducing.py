"""All-reduce: of one tensor, and of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from guozhuang.errors import explain
from guozhuang.gradients.named import Handle, Kind, Reduction

from ..common.process_sets import ProcessSet, global_process_set
from ..common.util import get_average_backwards_compatibility_fun
from . import submitting
from .compression import Compression, Compressor
from .handles import synchronize
from .submitting import Adasum, check_group, enqueue, scales

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(submitting)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine a tensor over all ranks into a new one. Every member of the process set must call; all get the same.

    Differentiable: the gradient is the all-reduce of the gradients with the same ``op`` and factors.

    Args:
        tensor: contiguous, of the same shape and dtype on all ranks. Integers are averaged and scaled in float64 and cut
            towards zero; float16 and bfloat16 are scaled in float32.
        average: deprecated; True for ``op=Average``, False for ``op=Sum``.
        name: by which ranks find each other's call, in any order; None: by the order of unnamed calls.
        compression: applied before, undone after.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies each tensor before.
        postscale_factor: multiplies the result.
        process_set: whose members take part.

    Raises:
        ValueError: what cannot be sent; see ``hvd.mpi_ops.enqueue``. Both ``op`` and ``average``.
        HorovodInternalError: ranks differ, or one is lost.
        NotImplementedError: Adasum in a process set other than the global one.
    """
    op = handle_average_backwards_compatibility(op, average)
    sent, ctx = compression.compress(tensor)
    (reduced,) = _AllReduce.apply(False, name, op, prescale_factor, postscale_factor, process_set, sent)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, ctx)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``allreduce`` and return a handle for ``synchronize``. The tensor must not change before. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    return _begin([tensor], name, op, prescale_factor, postscale_factor, process_set, is_group=False)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As ``allreduce``, into the tensor itself, which is returned. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    handle = _begin([tensor], name, op, prescale_factor, postscale_factor, process_set, is_group=False, in_place=True)
    return synchronize(handle)  # type: ignore[no-any-return]


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``allreduce_`` and return a handle for ``synchronize``."""
    op = handle_average_backwards_compatibility(op, average)
    return _begin([tensor], name, op, prescale_factor, postscale_factor, process_set, is_group=False, in_place=True)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """All-reduce several tensors as one unit: all of them or none. As ``allreduce`` otherwise; returns a list."""
    op = handle_average_backwards_compatibility(op, average)
    check_group(tensors)
    sent = [compression.compress(tensor) for tensor in tensors]
    arguments = (name, op, prescale_factor, postscale_factor, process_set)
    reduced = _AllReduce.apply(True, *arguments, *(tensor for tensor, _ in sent))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, sent, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``grouped_allreduce`` and return a handle for ``synchronize``, which gives a list. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    return _begin(tensors, name, op, prescale_factor, postscale_factor, process_set, is_group=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As ``grouped_allreduce``, into the tensors themselves, which are returned. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    handle = _begin(tensors, name, op, prescale_factor, postscale_factor, process_set, is_group=True, in_place=True)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``grouped_allreduce_`` and return a handle for ``synchronize``, which gives a list."""
    op = handle_average_backwards_compatibility(op, average)
    return _begin(tensors, name, op, prescale_factor, postscale_factor, process_set, is_group=True, in_place=True)


def _begin(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    is_group: bool,
    in_place: bool = False,
) -> int:
    if is_group:
        check_group(tensors)
    try:
        reduction = Reduction(op)
    except ValueError:
        fix = "use hvd.Average and the like"
        raise ValueError(
            explain("op is none of Average, Sum, Adasum, Min, Max and Product", value=op, fix=fix)
        ) from None
    if op == Adasum and process_set.process_set_id != 0:
        raise NotImplementedError("Adasum works among all ranks only, not in other process sets than the global one")

    def finish(outputs: list[Tensor], _: Handle) -> Tensor | list[Tensor]:
        results = list(tensors) if in_place else outputs
        return results if is_group else results[0]

    return enqueue(
        Kind.ALLREDUCE,
        "grouped_allreduce" if is_group else "allreduce",
        tensors,
        name,
        process_set,
        finish,
        in_place=in_place,
        reduction=reduction,
        **scales(prescale, postscale),
    )


class _AllReduce(torch.autograd.Function):
    """Of one tensor or several; the arguments before them are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        is_group: bool,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.is_group, ctx.arguments = is_group, (op, prescale, postscale, process_set)
        result = synchronize(_begin(tensors, name, op, prescale, postscale, process_set, is_group=is_group))
        return tuple(result) if is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent = [gradient.contiguous() for gradient in gradients]
        return (None,) * 6 + tuple(_AllReduce.apply(ctx.is_group, None, *ctx.arguments, *sent))  # type: ignore[no-untyped-call]
