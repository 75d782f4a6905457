"""The ranks that divide a sequence between them, and what they send: gathers, all-to-alls and turns of a ring.

[Note: scale of gradients] On every rank the gradient of a tensor that all ranks hold whole, a parameter among them, is such
that the mean over the ranks is the gradient of one process. Where each rank computes the same from whole tensors the ranks'
gradients are equal. Where a rank computes from its own tokens its gradient is n times its tokens' share. Therefore the backward
of a gather adds all ranks' gradients of a rank's tokens, which makes them n times as large; the backward of a cut fills with
zeros and sends nothing, because the mean over the ranks adds the shares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from guozhuang.world.versions import all_gather_single, reduce_scatter_single

from .spans import TokenSpans


@dataclass(eq=False)
class Team:
    """The ranks of one sequence, as one of them sees it, and what they agreed on.

    Attributes:
        group: the ranks, in the order of the parts of a sequence.
        attention: ``"auto"``, ``"ulysses"`` or ``"ring"``.
        names: of the model's modules, by their ``id``.
        in_blocks: names of the blocks that are running now, outermost first.
        sees_causal: whether attention with a causal mask was met in a ring; later sequences are then divided in zigzag order.
    """

    group: dist.ProcessGroup
    attention: str = "auto"
    names: dict[int, str] = field(default_factory=dict)
    in_blocks: list[str] = field(default_factory=list)
    sees_causal: bool = False

    def __post_init__(self) -> None:
        self.rank, self.size = self.group.rank(), self.group.size()

    def spans(self, length: int) -> TokenSpans:
        """Return how a sequence of ``length`` tokens is divided now."""
        if self.sees_causal and length >= 2 * self.size:
            return TokenSpans.zigzag(length, self.size)
        return TokenSpans.in_order(length, self.size)

    def gathered(self, local: Tensor, dim: int, spans: TokenSpans) -> Tensor:
        """Return the whole of a divided tensor, without a gradient. Every rank must call it."""
        rows, most = local.movedim(dim, 0), max(spans.counts)
        given = rows.contiguous()
        if len(rows) < most:
            given = rows.new_zeros(most, *rows.shape[1:])
            given[: len(rows)] = rows
        everyones = given.new_empty(self.size * most, *rows.shape[1:])
        all_gather_single(everyones, given, group=self.group)
        if spans.is_in_order and min(spans.counts) == most:
            return everyones.movedim(0, dim)
        return spans.joined(everyones.split(most), 0).movedim(0, dim)

    def summed_part(self, whole: Tensor, dim: int, spans: TokenSpans) -> Tensor:
        """Return this rank's tokens of the sum of all ranks' ``whole``. Every rank must call it."""
        rows, most = whole.movedim(dim, 0), max(spans.counts)
        given = rows.new_zeros(self.size, most, *rows.shape[1:])
        for rank, count in enumerate(spans.counts):
            given[rank, :count] = spans.part(rows, 0, rank)
        mine = given.new_empty(most, *rows.shape[1:])
        reduce_scatter_single(mine, given.view(-1, *rows.shape[1:]), group=self.group)
        return mine[: spans.counts[self.rank]].movedim(0, dim)

    def to_heads(self, local: Tensor, spans: TokenSpans) -> Tensor:
        """From ``(batch, all heads, own tokens, features)`` to ``(batch, own heads, all tokens, features)``."""
        batch, num_heads, num_tokens, width = local.shape
        own_heads = num_heads // self.size
        given = (
            local.transpose(0, 1).contiguous().view(-1)
        )  # heads are outermost: the first part goes to the first rank
        gives = [own_heads * batch * num_tokens * width] * self.size
        takes = [own_heads * batch * count * width for count in spans.counts]
        got = given.new_empty(sum(takes))
        dist.all_to_all_single(got, given, takes, gives, group=self.group)
        parts = [
            part.view(own_heads, batch, count, width)
            for part, count in zip(got.split(takes), spans.counts, strict=True)
        ]
        return spans.joined(parts, 2).transpose(0, 1)

    def to_tokens(self, local: Tensor, spans: TokenSpans) -> Tensor:
        """From ``(batch, own heads, all tokens, features)`` to ``(batch, all heads, own tokens, features)``."""
        batch, own_heads, _, width = local.shape
        heads = local.transpose(0, 1)
        parts = [spans.part(heads, 2, rank).reshape(-1) for rank in range(self.size)]
        given = torch.cat(parts)
        count = spans.counts[self.rank]
        takes = [own_heads * batch * count * width] * self.size
        got = given.new_empty(sum(takes))
        dist.all_to_all_single(got, given, takes, [part.numel() for part in parts], group=self.group)
        return got.view(self.size * own_heads, batch, count, width).transpose(0, 1)

    def passed_on(self, flat: Tensor, num_got: int) -> tuple[Tensor, dist.Work]:
        """Start to send ``flat`` to the next rank and to receive ``num_got`` elements from the one before.

        Returns:
            What is received, and the work to wait for.
        """
        got = flat.new_empty(num_got)
        gives, takes = [0] * self.size, [0] * self.size
        gives[(self.rank + 1) % self.size], takes[(self.rank - 1) % self.size] = flat.numel(), num_got
        work = dist.all_to_all_single(got, flat, takes, gives, group=self.group, async_op=True)
        assert work is not None
        return got, work


class _Gather(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, dim: int, spans: TokenSpans, team: Team) -> Tensor:
        ctx.dim, ctx.spans, ctx.team = dim, spans, team
        return team.gathered(local, dim, spans)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.team.summed_part(gradient, ctx.dim, ctx.spans), None, None, None


class _GatherEqual(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, dim: int, spans: TokenSpans, team: Team) -> Tensor:
        ctx.dim, ctx.spans, ctx.team = dim, spans, team
        return team.gathered(local, dim, spans)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.spans.part(gradient, ctx.dim, ctx.team.rank) * ctx.team.size, None, None, None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, spans: TokenSpans, team: Team) -> Tensor:
        ctx.spans, ctx.team = spans, team
        return team.to_heads(local, spans)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.team.to_tokens(gradient, ctx.spans), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, spans: TokenSpans, team: Team) -> Tensor:
        ctx.spans, ctx.team = spans, team
        return team.to_tokens(local, spans)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.team.to_heads(gradient, ctx.spans), None, None


class _MatmulGathered(torch.autograd.Function):
    """``left @ whole``, of which this rank has a part; the whole is gathered again in the backward instead of being kept."""

    @staticmethod
    @override
    def forward(ctx: Any, left: Tensor, local: Tensor, dim: int, spans: TokenSpans, team: Team) -> Tensor:
        ctx.dim, ctx.spans, ctx.team = dim, spans, team
        ctx.save_for_backward(left, local)
        return left @ team.gathered(local, dim, spans)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        left, local = ctx.saved_tensors
        for_left = for_local = None
        if ctx.needs_input_grad[0]:
            for_left = _summed_to(gradient @ ctx.team.gathered(local, ctx.dim, ctx.spans).mT, left.shape)
        if ctx.needs_input_grad[1]:
            shape = list(local.shape)
            shape[ctx.dim] = ctx.spans.length
            whole = _summed_to(left.mT @ gradient, torch.Size(shape))
            for_local = ctx.team.summed_part(whole, ctx.dim, ctx.spans)
        return for_left, for_local, None, None, None


def _summed_to(gradient: Tensor, shape: torch.Size) -> Tensor:
    return gradient.sum_to_size(shape) if gradient.shape != shape else gradient


class _Sum(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, share: Tensor, team: Team) -> Tensor:
        ctx.team = team
        total = share.detach().clone()
        dist.all_reduce(total, group=team.group)
        return total

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.team.group)
        return total, None


def gather(local: Tensor, dim: int, spans: TokenSpans, team: Team) -> Tensor:
    """Return the whole of a divided tensor on every rank, whatever each rank does with it. Collective, the backward too.

    See [Note: scale of gradients].
    """
    whole: Tensor = _Gather.apply(local, dim, spans, team)  # type: ignore[no-untyped-call]
    return whole


def gather_equal(local: Tensor, dim: int, spans: TokenSpans, team: Team) -> Tensor:
    """``gather()`` for a whole from which all ranks compute the same, as they do from outputs: the backward sends nothing."""
    whole: Tensor = _GatherEqual.apply(local, dim, spans, team)  # type: ignore[no-untyped-call]
    return whole


def to_heads(local: Tensor, spans: TokenSpans, team: Team) -> Tensor:
    """``Team.to_heads()`` with gradients."""
    result: Tensor = _ToHeads.apply(local, spans, team)  # type: ignore[no-untyped-call]
    return result


def to_tokens(local: Tensor, spans: TokenSpans, team: Team) -> Tensor:
    """``Team.to_tokens()`` with gradients."""
    result: Tensor = _ToTokens.apply(local, spans, team)  # type: ignore[no-untyped-call]
    return result


def matmul_gathered(left: Tensor, local: Tensor, dim: int, spans: TokenSpans, team: Team) -> Tensor:
    """Return ``left`` times the whole of the divided ``local``, of which this rank keeps its own part alone for the backward.

    Args:
        dim: of ``local``, which is divided there: its last or last but one.
    """
    result: Tensor = _MatmulGathered.apply(left, local, dim, spans, team)  # type: ignore[no-untyped-call]
    return result


def sum_shares(share: Tensor, team: Team) -> Tensor:
    """Return the sum of all ranks' values, on every rank."""
    result: Tensor = _Sum.apply(share, team)  # type: ignore[no-untyped-call]
    return result
