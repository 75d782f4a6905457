"""``all_gather``: rows of all ranks, through which gradients flow as in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import MismatchError, UsageError, explain, rank_table
from ..registry import registry
from ..world import current

_MOST_DIMS = 64  # as many as PyTorch's operations take
_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


def all_gather(x: Tensor) -> Tensor:
    """Return the rows of all ranks, in the order of ranks; the gradient is that of one process. Every rank must call it.

    For losses that compare samples of the whole batch (contrastive ones). Compute the loss of all rows on each rank, or on
    each rank that of its own rows as a mean, and call ``backward`` as usual: gradients are averaged over ranks, and the result
    is that of one process on the whole batch, without a factor::

        images, texts = map(gz.all_gather, model(x, y))
        logits = images @ texts.T / temperature
        F.cross_entropy(logits, torch.arange(len(logits))).backward()

    Where ranks share the samples of a batch (``pipeline``, ``tensor`` and their like), a rank has all rows already, and gets
    them back. The backward is a collective too: every rank must run it, or none.

    Args:
        x: rows along its first dim; ranks may have different numbers of them, but not other shapes or dtypes.

    Raises:
        UsageError: it has no dim, or the layout divides both the model and the data.
        MismatchError: ranks have rows of different shapes or dtypes; on every rank.
    """
    if not isinstance(x, Tensor) or x.dim() == 0:
        raise UsageError(explain("all_gather takes a tensor of rows", value=x, fix="give it a first dim: x[None]"))
    world = current()
    if world is not None and world.layout.model_size > 1:
        if world.layout.dp == 1:
            return x
        what = "gz.all_gather works where ranks divide the data, or the model, but not both"
        raise UsageError(explain(what, value=str(world.layout), rank=world.rank, fix="leave one of the two axes out"))
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return x
    found: Tensor = _RowsOfAll.apply(x, _lengths(x))  # type: ignore[no-untyped-call]
    return found


def _lengths(x: Tensor) -> list[int]:
    """Return how many rows each rank has, after comparing the rest of their shapes."""
    # Of one size on all ranks, whatever they give: backends differ in what they do where sizes differ.
    shape = [*x.shape, *[-1] * _MOST_DIMS][1:_MOST_DIMS]
    mine = torch.tensor([len(x), x.dim(), _DTYPES.index(str(x.dtype)), *shape], dtype=torch.int64, device=x.device)
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(told, mine)
    rows = torch.stack(told).tolist()
    if any(row[1:] != rows[0][1:] for row in rows):
        what = "ranks gave gz.all_gather rows of different shapes or dtypes"
        shown = [(rank, str(tuple(n for n in row[3:] if n >= 0)), _DTYPES[row[2]]) for rank, row in enumerate(rows)]
        text = explain(
            what, value=f"{x.dtype} {tuple(x.shape)}", rank=dist.get_rank(), fix="give the same kind everywhere"
        )
        raise MismatchError(f"{text}\n{rank_table(('rank', 'shape of a row', 'dtype'), shown)}")
    return [row[0] for row in rows]


class _RowsOfAll(torch.autograd.Function):
    """Concatenates rows; backward sums what all ranks' losses ask of this rank's rows.

    [Note: no factor] Gradients of parameters are averaged over n ranks afterwards, so what is differentiated is the mean of the
    ranks' losses. A rank's rows are in all n losses, so their gradient is the sum over ranks, each of which counts 1/n: where
    all ranks compute one loss the sum is n times its gradient, and the mean gives it back. Where ranks count by the weight of
    their part, see [Note: unequal parts] in registry.py, the sum is weighed, and the weight of this rank is taken out again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int]) -> Tensor:
        ctx.lengths, ctx.rank, ctx.weight = lengths, dist.get_rank(), registry.weight.value
        longest = max(lengths)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in lengths]
        if padded.numel():
            dist.all_gather(parts, padded)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = (gradient * ctx.weight).contiguous()  # its strides may be other ones on other ranks
        if summed.numel():
            dist.all_reduce(summed)
        return summed.split(ctx.lengths)[ctx.rank] / ctx.weight, None
