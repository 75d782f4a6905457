"""Matrix products and attention: rows stay divided, and what they are multiplied by is gathered where it is divided too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from ..random import divided as draws_part
from ..spans import Span, SpansOfRanks
from .tensor import DividedTensor, Place, Ranks, cut_where_it_meets, handles, whole_of


def autocast(*tensors: Any) -> list[Any]:
    """Return the operands, of which the first is a tensor, in the type that autocast gives to a product or convolution."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)

    def cast(each: Any) -> Any:
        is_cast = isinstance(each, Tensor) and each.is_floating_point() and each.dtype != torch.float64
        return each.to(dtype) if is_cast else each

    return [cast(each) for each in tensors]


class _MatmulGathered(torch.autograd.Function):
    """``left @ whole``, of which this rank has a part; the whole is gathered again in the backward instead of being kept."""

    @staticmethod
    @override
    def forward(ctx: Any, left: Tensor, local: Tensor, dim: int, spans: SpansOfRanks, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.spans, ctx.ranks = dim, spans, ranks
        ctx.save_for_backward(left, local)
        return left @ ranks.gathered(local, dim, spans)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        left, local = ctx.saved_tensors
        for_left = for_local = None
        if ctx.needs_input_grad[0]:
            for_left = (gradient @ ctx.ranks.gathered(local, ctx.dim, ctx.spans).mT).sum_to_size(left.shape)
        if ctx.needs_input_grad[1]:
            shape = list(local.shape)
            shape[ctx.dim] = ctx.spans.length
            for_local = ctx.ranks.summed_part((left.mT @ gradient).sum_to_size(shape), ctx.dim, ctx.spans)
        return for_left, for_local, None, None, None


@handles("matmul", "mm", "bmm", "__matmul__", "__rmatmul__")
def _product(func: Any, left: Any, right: Any) -> Any:
    if func.__name__ == "__rmatmul__":
        left, right = right, left
    if min(left.dim(), right.dim()) < 2:
        return NotImplemented
    row, column = (each.position if isinstance(each, DividedTensor) else None for each in (left, right))
    if row == -1 or (row is None and column == -2):
        return NotImplemented  # a sum over the divided dimension
    lead, position = (left, row) if row is not None else (right, column)
    place: Place = lead.place
    assert position is not None
    if row is None or row < -2:  # columns, or independent products
        if position == -1:
            local = left @ right.local
        else:
            local = torch.matmul(*(cut_where_it_meets(each, place, position) for each in (left, right)))
        return lead.like(local, local.dim() + position)
    if column in (-1, -2) and not right.place.is_folded:
        there = right.place
        operands = autocast(left.local, right.local)
        local = _MatmulGathered.apply(*operands, there.dim, there.spans, there.ranks)  # type: ignore[no-untyped-call]
    else:
        local = left.local @ whole_of(right)
    return left.like(local, local.dim() - 2)


@handles("addmm", "baddbmm")
def _added_product(func: Any, added: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    is_linear = func.__name__ == "addmm" and added.dim() == 1 and not isinstance(added, DividedTensor)
    if is_linear and not isinstance(right, DividedTensor) and isinstance(left, DividedTensor) and left.at == 0:
        return left.like(func(added, left.local, right, beta=beta, alpha=alpha))
    product = torch.matmul(left, right)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (added if beta == 1 else added * beta)


@handles("einsum")
def _einsum(func: Any, equation: Any, *given: Any) -> Any:
    operands = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    names = inputs.split(",")
    # The first letter of a divided dimension that the result has stays divided; other operands are gathered, or cut at it.
    leads = [
        (name[each.at], each)
        for name, each in zip(names, operands, strict=True)
        if isinstance(each, DividedTensor) and name[each.at] in output
    ]
    if not leads or any(len(set(each)) < len(each) for each in names):
        return NotImplemented
    letter, lead = leads[0]
    fitted = [
        cut_where_it_meets(each, lead.place, name.index(letter) - len(name)) if letter in name else whole_of(each)
        for name, each in zip(names, operands, strict=True)
    ]
    return lead.like(torch.einsum(equation, *fitted), output.index(letter))


def dropping(dropped: float, dim: int, spans: Iterable[Span], size: int) -> AbstractContextManager[object]:
    """Let attention within draw these spans of the weights that one process drops."""
    return draws_part(dim, spans, size) if dropped else contextlib.nullcontext()


@handles("scaled_dot_product_attention")
def _attend(
    func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    **given: Any,
) -> Any:  # fmt: skip
    """Compute the attention of divided queries, to whole keys where these are what is divided, or of some samples or heads."""
    if not isinstance(query, DividedTensor):
        return func(query, *map(whole_of, (key, value, attn_mask)), dropout_p, is_causal, **given)
    place, position = query.place, query.position
    if position == -1:
        return NotImplemented
    if position == -2:
        key, value = whole_of(key), whole_of(value)
        if is_causal:
            attn_mask = torch.ones(place.size, key.shape[-2], dtype=torch.bool, device=query.device).tril()
            is_causal = False
    else:
        key, value = (cut_where_it_meets(each, place, position) for each in (key, value))
    attn_mask = cut_where_it_meets(attn_mask, place, position)
    with dropping(dropout_p, place.dim, place.own_ranges, place.size):
        result = func(query.local, key, value, attn_mask, dropout_p, is_causal, **given)
    return query.like(result, result.dim() + position)
