"""Mean or sum of sparse gradients (``Embedding(sparse=True)``): an all-gather sends the rows of each rank to all ranks.

Rows that several ranks touched are summed when the result is coalesced, in rank order, so all ranks hold the same bits.
Two rounds: the number of rows, then indices and values padded to the largest number.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..gradients.buckets import gradient_dtype
from ..watch.waits import waits


def all_gather_mean(gradient: Tensor, divisor: float, group: dist.ProcessGroup, works: list[object]) -> Tensor:
    """Average a sparse COO tensor over the group. Every rank of the group must call it.

    Args:
        gradient: the same shape and dtype on every rank; sparse COO with any number of entries, or dense.
        divisor: the number by which the sum over ranks is divided: how many have data, or 1 for a sum, over this rank's weight.
        group: the ranks.
        works: a list to which the issued collectives are appended, so that the caller keeps them alive.

    Returns:
        A coalesced sparse tensor, equal on all ranks.
    """
    gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
    indices, values = gradient.indices(), gradient.values() / divisor
    if group.size() > 1:
        counts = [torch.empty(1, dtype=torch.int64, device=values.device) for _ in range(group.size())]
        _all_gather(counts, torch.tensor([values.shape[0]], dtype=torch.int64, device=values.device), group, works)
        num_rows = [int(count) for count in torch.cat(counts).tolist()]
        indices = _gather_rows(indices.t().contiguous(), num_rows, group, works).t()
        values = _gather_rows(values, num_rows, group, works)
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False).coalesce()


def no_rows(parameter: Tensor) -> Tensor:
    """Return an empty sparse gradient, with the shape of a parameter that was not used, and the dtype of its gradients."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=gradient_dtype(parameter), device=parameter.device)
    return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)


def _all_gather(parts: list[Tensor], mine: Tensor, group: dist.ProcessGroup, works: list[object]) -> None:
    work = dist.all_gather(parts, mine, group=group, async_op=True)
    works.append(work)
    waits.for_work(work)


def _gather_rows(rows: Tensor, num_rows: list[int], group: dist.ProcessGroup, works: list[object]) -> Tensor:
    padded = rows.new_zeros((max(num_rows), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    if padded.numel() == 0:
        return rows
    wire = torch.view_as_real(padded) if padded.is_complex() else padded  # gloo does not support complex dtypes
    parts = [torch.empty_like(wire) for _ in num_rows]
    _all_gather(parts, wire, group, works)
    if padded.is_complex():
        parts = [torch.view_as_complex(part) for part in parts]
    return torch.cat([part[:count] for part, count in zip(parts, num_rows, strict=True)])
