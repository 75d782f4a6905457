"""All-gather, broadcast, all-to-all and reduce-scatter: the collectives other than all-reduce.

Every rank of the group must call them. Except in reduce-scatter, tensors are sent as bytes, so any group can send any dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import collectives
from .reductions import combine
from .requests import NamedRequest


def all_gather(given: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, joined along dim 0 in rank order.

    Args:
        given: tensor of this rank, of shape (rows of this rank, ...).
        rows: number of rows of each rank.
        group: the ranks.
    """
    output = given.new_empty((sum(rows), *given.shape[1:]))
    row_bytes = prod(given.shape[1:]) * given.itemsize
    longest = max(rows) * row_bytes
    if longest == 0:
        return output
    if len(rows) == 1:
        return output.copy_(given)
    if min(rows) == max(rows):
        collectives.all_gather(_bytes(output), _bytes(given), group)
        return output
    padded = given.new_zeros(longest, dtype=torch.uint8)
    padded[: given.shape[0] * row_bytes] = _bytes(given)
    taken = padded.new_empty(len(rows), longest)
    collectives.all_gather(taken.view(-1), padded, group)
    for part, num, row in zip(output.split(list(rows)), rows, taken, strict=True):
        _bytes(part).copy_(row[: num * row_bytes])
    return output


def broadcast(
    given: Sequence[Tensor], outputs: Sequence[Tensor], root: int, rank: int, group: dist.ProcessGroup
) -> None:
    """Copy the root's tensors to all ranks; several tensors are packed into one.

    Args:
        given: tensors of this rank; only the root's values matter.
        outputs: tensors to write to, of the same shapes and dtypes, or ``given`` itself.
        root: rank in the group.
        rank: rank of this process in the group.
        group: the ranks.
    """
    if rank == root:
        for tensor, output in zip(given, outputs, strict=True):
            if output is not tensor:
                output.copy_(tensor)
    filled = [_bytes(output) for output in outputs if output.numel()]
    if not filled or group.size() == 1:
        return
    if len(filled) == 1:
        collectives.broadcast(filled[0], root, group)
        return
    packed = torch.cat(filled)
    collectives.broadcast(packed, root, group)
    if rank != root:
        for one, part in zip(filled, packed.split([len(each) for each in filled]), strict=True):
            one.copy_(part)


def all_to_all(
    given: Tensor, splits: Sequence[Sequence[int]], rank: int, group: dist.ProcessGroup
) -> tuple[Tensor, list[int]]:
    """Send each rank its rows; return the received rows, in rank order, and how many came from each rank.

    Args:
        given: tensor of this rank, of shape (rows, ...).
        splits: for each rank, how many rows it sends to each rank.
        rank: rank of this process in the group.
        group: the ranks.
    """
    gives, takes = list(splits[rank]), [row[rank] for row in splits]
    row_bytes = prod(given.shape[1:]) * given.itemsize
    output = given.new_empty((sum(takes), *given.shape[1:]))
    sent = given[: sum(gives)]
    if len(splits) == 1:
        output.copy_(sent)
    elif row_bytes and any(map(sum, splits)):
        sizes = [num * row_bytes for num in takes], [num * row_bytes for num in gives]
        collectives.all_to_all(_bytes(output), _bytes(sent), *sizes, group)
    return output, takes


def reduce_scatter(given: Tensor, request: NamedRequest, rank: int, averages: bool, group: dist.ProcessGroup) -> Tensor:
    """Reduce a tensor over all ranks and return this rank's rows; if rows do not divide evenly, the first ranks get one more.

    Args:
        given: tensor of shape (rows, ...), the same shape on all ranks; it is not changed.
        request: the request, for its reduction and scales.
        rank: rank of this process in the group.
        averages: see ``combine``.
        group: the ranks.
    """
    size = group.size()
    base, extra = divmod(given.shape[0], size)
    rows = [base + (each < extra) for each in range(size)]
    num_per_row = prod(given.shape[1:])
    longest = rows[0] * num_per_row
    shape = (rows[rank], *given.shape[1:])
    if longest == 0:
        return given.new_empty(shape)
    parts = given.new_zeros(size, longest)
    for part, own in zip(parts, given.split(rows), strict=True):
        part[: own.numel()].copy_(own.reshape(-1))

    def collective(flat: Tensor, op: Any) -> Tensor:
        if size == 1:
            return flat
        output = flat.new_empty(longest)
        collectives.reduce_scatter(output, flat, op, group)
        return output

    result = combine(parts.view(-1), request, size, averages, collective)
    return result[: prod(shape)].view(shape)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
