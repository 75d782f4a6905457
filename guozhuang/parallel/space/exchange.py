"""Rows that travel between the ranks of a region, and sums over them, with their backward.

See [Note: gradients of parts] in parallel/activations/tensor.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..activations.tensor import Ranks
from ..spans import memory_format
from .ranges import RowPlan


def _rows(tensor: Tensor, dim: int, rows: range) -> Tensor:
    if rows.step == 1:
        return tensor.narrow(dim, rows.start, len(rows))
    low, high = min(rows[0], rows[-1]), max(rows[0], rows[-1])
    index = [slice(None)] * dim + [slice(low, high + 1, abs(rows.step))]
    found = tensor[tuple(index)]
    return found if rows.step > 0 else found.flip(dim)


def _like(tensor: Tensor, dim: int, num_rows: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = num_rows
    return tensor.new_empty(shape)


def _travel(region: Ranks, away: list[tuple[int, Tensor]], coming: list[tuple[int, Tensor]]) -> None:
    if any(tensor.is_meta for _, tensor in (*away, *coming)):
        return  # a forward for shapes alone
    operations = [dist.P2POp(dist.irecv, buffer, group=region.group, group_peer=peer) for peer, buffer in coming]
    operations += [dist.P2POp(dist.isend, rows, group=region.group, group_peer=peer) for peer, rows in away]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def receive(region: Ranks, local: Tensor, dim: int, plan: RowPlan) -> list[Tensor]:
    """Send and receive the rows of a plan; return one tensor for each of its ``receives``. Every rank must call it."""
    away = [
        (peer, torch.cat([_rows(local, dim, rows) for rows in ranges], dim).contiguous()) for peer, ranges in plan.sends
    ]
    coming = [(peer, _like(local, dim, sum(len(p.rows) for p in pieces))) for peer, pieces in plan.receives]
    _travel(region, away, coming)
    return [buffer for _, buffer in coming]


def assemble(local: Tensor, received: list[Tensor], dim: int, plan: RowPlan, fill: float = 0.0) -> Tensor:
    """Return the plan's target: own rows, received rows, and the constant elsewhere. It may be a view of ``local``."""
    found = [(piece, local) for piece in plan.own]
    for (_, pieces), message in zip(plan.receives, received, strict=True):
        found += [(piece, message) for piece in pieces]
    layout, blocks, at = memory_format(local), [], 0
    for piece, source in sorted(found, key=lambda each: each[0].at):
        if piece.at > at:
            blocks.append(_like(local, dim, piece.at - at).fill_(fill))
        block = _rows(source, dim, piece.rows)
        blocks.append(block if source is local else block.contiguous(memory_format=layout))
        at = piece.at + len(piece.rows)
    if at < plan.length or not blocks:
        blocks.append(_like(local, dim, plan.length - at).fill_(fill))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)


def give_back(region: Ranks, gradient: Tensor, dim: int, plan: RowPlan, is_own: bool = False) -> Tensor:
    """Return the gradient of this rank's rows from that of the plan's target: all ranks' shares, added.

    Args:
        is_own: nobody else has ``gradient``, which then may be changed and be the base of the result.
    """
    shares = [torch.cat([gradient.narrow(dim, p.at, len(p.rows)) for p in pieces], dim) for _, pieces in plan.receives]
    if len(plan.own) == 1 and plan.own[0].rows == range(plan.num_rows):
        result = gradient.narrow(dim, plan.own[0].at, plan.num_rows)
        result = result if is_own else result.clone(memory_format=memory_format(gradient))
    else:
        result = _like(gradient, dim, plan.num_rows).zero_()
        for piece in plan.own:
            _add(result, dim, piece.rows, gradient.narrow(dim, piece.at, len(piece.rows)))
    return add_shares(region, result, shares, dim, plan)


def add_shares(region: Ranks, result: Tensor, shares: list[Tensor], dim: int, plan: RowPlan) -> Tensor:
    """Send the gradient of each message of ``receives`` back, and add those that come to this rank's ``result`` in place."""
    away = [(peer, share.contiguous()) for (peer, _), share in zip(plan.receives, shares, strict=True)]
    coming = [(peer, _like(result, dim, sum(map(len, ranges)))) for peer, ranges in plan.sends]
    _travel(region, away, coming)
    for (_, ranges), (_, message) in zip(plan.sends, coming, strict=True):
        at = 0
        for rows in ranges:
            _add(result, dim, rows, message.narrow(dim, at, len(rows)))
            at += len(rows)
    return result


def _add(target: Tensor, dim: int, rows: range, values: Tensor) -> None:
    if rows.step < 0:
        rows, values = rows[::-1], values.flip(dim)
    _rows(target, dim, rows).add_(values)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, region: Ranks, dim: int, plan: RowPlan, fill: float) -> Tensor:
        ctx.region, ctx.dim, ctx.plan = region, dim, plan
        found = assemble(local, receive(region, local, dim, plan), dim, plan, fill)
        return found.clone() if found._base is not None or found is local else found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return give_back(ctx.region, gradient, ctx.dim, ctx.plan), None, None, None, None


def fetch(region: Ranks, local: Tensor, dim: int, plan: RowPlan, fill: float = 0.0) -> Tensor:
    """Return the plan's target, made of the rows of all ranks; differentiable. Every rank of the region calls it."""
    return local if plan.is_identity else _Fetch.apply(local, region, dim, plan, fill)  # type: ignore[no-untyped-call]


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, region: Ranks) -> Tensor:
        ctx.region = region
        return region.combine(mine.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.region.combine(gradient.clone(memory_format=torch.contiguous_format)), None


def total(region: Ranks, mine: Tensor) -> Tensor:
    """Return the sum over the ranks on every rank; differentiable."""
    return _Total.apply(mine, region)  # type: ignore[no-any-return,no-untyped-call]


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, region: Ranks, dims: tuple[int, ...], largest: bool) -> Tensor:
        found = (local.amax if largest else local.amin)(dims, keepdim=True).contiguous()
        region.combine(found, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)
        ctx.save_for_backward(local, found)
        ctx.region, ctx.dims = region, dims
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        local, found = ctx.saved_tensors
        among = (local == found).to(gradient.dtype)
        count = ctx.region.combine(among.sum(ctx.dims, keepdim=True).contiguous())
        whole = ctx.region.combine(gradient.clone(memory_format=torch.contiguous_format))
        return among * (whole / count), None, None, None


def extreme(region: Ranks, local: Tensor, dims: tuple[int, ...], largest: bool) -> Tensor:
    """Return the largest or smallest over the dimensions, which stay with size 1, and all ranks; ties share its gradient."""
    return _Extreme.apply(local, region, dims, largest)  # type: ignore[no-any-return,no-untyped-call]
