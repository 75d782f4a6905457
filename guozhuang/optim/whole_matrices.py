"""Steps of optimizers that need whole matrices, of which the ranks of a tensor group hold slices.

[Note: the keeper of a matrix] One rank of the group keeps the optimizer's state of a cut matrix, as of the whole one, and makes
its steps: the slices of the weight and of the gradient travel to it before the step, and slices of the new weight back, in one
all-to-all each. So a step is that of one process, and each rank works on its share of the matrices. A parameter is the same
object as ever: while its keeper steps, it holds the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.division import Division, division_of, keep_whole, spans_of_ranks


@contextmanager
def joined(
    held: Sequence[list[Tensor]], parameter_of: Callable[[Tensor], Tensor] = lambda weight: weight
) -> Iterator[list[list[Tensor]]]:
    """Make the matrices whole that this rank keeps, for a step. Every rank of the tensor group must enter the context.

    See [Note: the keeper of a matrix].

    Args:
        held: what the optimizer is to step, by group.
        parameter_of: returns the model's parameter for one of these.

    Yields:
        What is to be stepped here: cut matrices by their keepers alone, and all others.
    """
    cut: list[tuple[Tensor, Division]] = []
    for weight in (each for some in held for each in some):
        division = division_of(parameter_of(weight))
        if division is not None and division.dim is not None and division.is_owned:
            cut.append((weight, division if division.keeper is not None else keep_whole(parameter_of(weight), 0)))
    if not cut:
        yield list(held)
        return
    group = cut[0][1].group
    assert group is not None
    has = torch.tensor([int(weight.grad is not None) for weight, _ in cut], dtype=torch.int32, device=cut[0][0].device)
    dist.all_reduce(has, group=group)
    used = [pair for pair, count in zip(cut, has.tolist(), strict=True) if count]
    for _, division in used:
        spans_of_ranks(division)  # which every rank has to ask for
    kinds = [[pair for pair in used if pair[0].dtype == dtype] for dtype in dict.fromkeys(w.dtype for w, _ in used)]
    own = [(weight, division) for kind in kinds for weight, division in kind if division.keeper == group.rank()]
    left = {id(weight) for weight, _ in cut} - {id(weight) for weight, _ in own}
    kept = [(weight, weight.data, weight.grad) for weight, _ in used]
    weights = [each for kind in kinds for each in _to_keepers([(w.data, d) for w, d in kind], group)]
    given = [[(torch.zeros_like(w) if w.grad is None else w.grad, d) for w, d in kind] for kind in kinds]
    gradients = [each for kind in given for each in _to_keepers(kind, group)]
    for (weight, _), whole, gradient in zip(own, weights, gradients, strict=True):
        weight.grad = None
        weight.data, weight.grad = whole, gradient
    try:
        yield [[weight for weight in some if id(weight) not in left] for some in held]
    finally:
        found = iter([weight.data for weight, _ in own])
        for weight, place, own_gradient in kept:
            weight.grad = None
            weight.data, weight.grad = place, own_gradient
    for kind in kinds:
        _from_keepers(found, kind, group)
    torch.autograd.graph.increment_version([weight for weight, _ in used])


def _to_keepers(parts: Sequence[tuple[Tensor, Division]], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the whole of each tensor that this rank keeps, of which every rank of the group gives its part."""
    rank, ranks = group.rank(), range(group.size())
    own = [division for _, division in parts if division.keeper == rank]
    sent = [[tensor for tensor, division in parts if division.keeper == to] for to in ranks]
    shapes = [[_shape(division, by) for division in own] for by in ranks]
    received = _swapped(sent, shapes, parts[0][0], group)
    return [spans_of_ranks(d).joined([received[by][i] for by in ranks], _dim(d)) for i, d in enumerate(own)]


def _from_keepers(wholes: Iterator[Tensor], used: Sequence[tuple[Tensor, Division]], group: dist.ProcessGroup) -> None:
    """Write to each rank's parts what the keepers have made of the whole tensors."""
    rank, ranks = group.rank(), range(group.size())
    own = [(next(wholes), division) for _, division in used if division.keeper == rank]
    sent = [[spans_of_ranks(d).part(w, _dim(d), to) for w, d in own] for to in ranks]
    mine = [[(weight, division) for weight, division in used if division.keeper == by] for by in ranks]
    received = _swapped(sent, [[weight.shape for weight, _ in some] for some in mine], used[0][0], group)
    with torch.no_grad():
        for some, tensors in zip(mine, received, strict=True):
            for (weight, _), tensor in zip(some, tensors, strict=True):
                weight.data.copy_(tensor)


def _shape(division: Division, rank: int) -> torch.Size:
    dim, length = _dim(division), spans_of_ranks(division).counts[rank]
    return torch.Size([*division.shape[:dim], length, *division.shape[dim + 1 :]])


def _dim(division: Division) -> int:
    assert division.dim is not None
    return division.dim


def _swapped(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]], like: Tensor, group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Send some tensors to each rank, and return those that each rank has sent here; all of dtype and device of ``like``."""
    gives = [sum(tensor.numel() for tensor in some) for some in sent]
    takes = [sum(shape.numel() for shape in some) for some in shapes]
    flat = torch.cat([like.new_empty(0), *(tensor.detach().reshape(-1) for some in sent for tensor in some)])
    into = flat.new_empty(sum(takes))
    dist.all_to_all_single(into, flat, takes, gives, group=group)
    pieces = iter(into.split([shape.numel() for some in shapes for shape in some]))
    return [[next(pieces).view(shape) for shape in some] for some in shapes]
