"""What crosses the border of a divided region: the two autograd functions of tensor parallelism, and the gather.

A region begins where every rank has the same whole tensor and its first layers are cut by their outputs, and ends where layers
that are cut by their inputs have made one addend of the whole result on each rank. Entering costs nothing forward and one
all_reduce backward, leaving the other way round. Gradients of what is whole are equal on all ranks, because each of these
functions sums over all of them.
Activations of which each rank has some rows or tokens are classes of their own. They know these functions by name, and have
them act on their rows, since none of them joins rows.
Source: Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from typing_extensions import override

from ..spans import SpansOfRanks


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The gradient is a fresh sum of products of the layers that read what was entered, and nobody else's: it may change.
        return _SumParts.apply(gradient.contiguous(), ctx.group), None  # type: ignore[no-untyped-call]


class _SumParts(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, addend: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.mark_dirty(addend)
        if not addend.is_meta:
            dist.all_reduce(addend, group=group)
        return addend

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _EnterRegion.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, mine: Tensor, dim: int, spans: SpansOfRanks, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.spans, ctx.group = dim, spans, group
        return spans.gathered(mine, dim, group)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.spans.part(gradient, ctx.dim, ctx.group.rank()), None, None, None


def enter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor, equal on all ranks of the group, for layers of which each rank has a part.

    Backward sums the ranks' gradients: one all_reduce, which every rank of the group must reach.
    """
    if has_torch_function_unary(whole):
        return handle_torch_function(enter, (whole,), whole, group)
    if whole.is_meta or not (torch.is_grad_enabled() and whole.requires_grad):
        return whole
    return _EnterRegion.apply(whole, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(addend: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' tensors of one shape, in place where the tensor is dense; every rank of the group must call it.

    The tensor must be new and no operation's saved one, such as a product's result.
    """
    if has_torch_function_unary(addend):
        return handle_torch_function(summed, (addend,), addend, group)
    return _SumParts.apply(addend.contiguous(), group)  # type: ignore[no-any-return, no-untyped-call]


def gathered(mine: Tensor, dim: int, spans: SpansOfRanks, group: dist.ProcessGroup) -> Tensor:
    """Join the ranks' parts of a tensor along ``dim``; every rank of the group must call it.

    Backward takes this rank's part of the gradient, which is equal on all ranks because what was joined is.
    """
    if has_torch_function_unary(mine):
        return handle_torch_function(gathered, (mine,), mine, dim, spans, group)
    return _GatherFeatures.apply(mine, dim % mine.dim(), spans, group)  # type: ignore[no-any-return, no-untyped-call]
