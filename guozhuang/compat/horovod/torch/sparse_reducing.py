"""All-reduce of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from guozhuang.errors import explain

from ..common.exceptions import HorovodInternalError
from ..common.process_sets import ProcessSet, global_process_set, member_of
from .gathering import grouped_allgather_async
from .handles import synchronize
from .submitting import Average, Sum


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin to add up sparse COO tensors: indices and values of all ranks are gathered.

    Args:
        tensor: sparse; how many values it has may differ between ranks, its shape may not.
        name: as in ``allreduce``.
        op: Average or Sum.
        process_set: whose members take part.

    Returns:
        A function that waits, and returns the sum or the mean as a sparse tensor, not coalesced. For the mean of integers each
        value is divided in float64 and cut towards zero. It raises HorovodInternalError where ranks differ, or one is lost or
        has joined.

    Raises:
        ValueError: another ``op``; a dense tensor, or one of a layout other than COO.
    """
    if op not in (Average, Sum):
        raise ValueError(explain("sparse tensors are combined by Average or Sum", value=op))
    if not tensor.is_sparse:
        raise ValueError(explain("a sparse COO tensor is needed", value=str(tensor.layout), fix="use allreduce_async"))
    ranks = member_of(process_set).ranks
    # Gathering joins the first dimension: of the values that is the one of what is stored, of the indices the second. Shapes
    # go along, each behind its length: indices of a larger tensor would point outside of a smaller one.
    shape = torch.tensor([tensor.dim(), *tensor.shape], device=tensor.device)
    parts = [shape, tensor._indices().t().contiguous(), tensor._values().contiguous()]
    handle = grouped_allgather_async(parts, None if name is None else f"sparse.{name}", process_set)

    def finish() -> Tensor:
        shapes, indices, values = synchronize(handle)
        _check_shapes(shapes.tolist(), ranks)
        if op == Average:
            mean = values / len(ranks) if values.is_floating_point() else (values.double() / len(ranks)).trunc()
            values = mean.to(values.dtype)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)

    return finish


def _check_shapes(told: list[int], ranks: Sequence[int]) -> None:
    shapes = []
    while told:
        num_dims = told[0]
        shapes.append(tuple(told[1 : 1 + num_dims]))
        told = told[1 + num_dims :]
    for rank, shape in zip(ranks, shapes, strict=True):
        if shape != shapes[0]:
            what = f"rank {ranks[0]} has {shapes[0]}, and rank {rank} has {shape}"
            fix = "give sparse tensors of one shape on all ranks"
            raise HorovodInternalError(explain(f"Mismatched allreduce tensor shapes: {what}", fix=fix))
