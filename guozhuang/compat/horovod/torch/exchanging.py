"""All-to-all: every rank sends some rows to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from guozhuang.errors import explain
from guozhuang.gradients.named import Handle, Kind

from ..common.process_sets import ProcessSet, global_process_set, member_of
from ..common.state import required
from .handles import synchronize
from .submitting import enqueue

Splits = Sequence[int] | Tensor


def alltoall(
    tensor: Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of the first dimension to each rank, and join what comes from them in rank order.

    Every member of the process set must call. Differentiable: the gradient goes back the way the rows came; rows that were
    not sent have none.

    Args:
        tensor: contiguous; the first dimension may differ between ranks, the others and the dtype may not.
        splits: how many rows go to each member, as integers; what is left over goes nowhere. None: equally many.
        name: by which ranks find each other's call; None: by the order of unnamed calls.
        process_set: whose members take part.

    Returns:
        The rows that came; with ``splits`` given (them, how many came from each rank as an int32 tensor).

    Raises:
        ValueError: what cannot be sent; ``splits`` are no integers, not as many as members, negative, or more than there are
            rows; without them, the rows cannot be divided evenly.
        HorovodInternalError: ranks differ, or one is lost; a tensor has no dimension; a rank has joined.
    """
    output, received = _AllToAll.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``alltoall`` and return a handle for ``synchronize``, which always gives the pair. Not differentiable."""
    member_of(process_set)  # before the splits are looked at: the first thing that is wrong
    chosen = None if splits is None else _whole(splits)
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")

    def finish(outputs: list[Tensor], handle: Handle) -> tuple[Tensor, Tensor]:
        assert handle.received_splits is not None
        return outputs[0], torch.tensor(handle.received_splits, dtype=torch.int32, device=device)

    return enqueue(Kind.ALLTOALL, "alltoall", [tensor], name, process_set, finish, splits=chosen)


def _whole(splits: Splits) -> tuple[int, ...]:
    given = splits.tolist() if isinstance(splits, Tensor) else list(splits)
    if not isinstance(given, list) or not all(_is_whole(each) for each in given):
        what, fix = "splits are whole numbers, one for each rank", "give a list of int, or a tensor of dtype int32"
        raise ValueError(explain(what, value=given, rank=required().rank, fix=fix))
    return tuple(int(each) for each in given)


def _is_whole(value: object) -> bool:
    # numpy's integers among them; no bool, no float
    return not isinstance(value, bool | float) and hasattr(value, "__index__")


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Splits | None, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        ctx.shape, ctx.process_set = tensor.shape, process_set
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received = received.tolist()
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        back, _ = _AllToAll.apply(gradient.contiguous(), ctx.received, None, ctx.process_set)  # type: ignore[no-untyped-call]
        unsent = ctx.shape[0] - back.shape[0]
        if unsent:
            back = torch.cat([back, back.new_zeros(unsent, *ctx.shape[1:])])
        return back, None, None, None
