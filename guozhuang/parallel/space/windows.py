"""Operations on windows of rows: each rank gets the rows that its outputs need, and computes as one process does.

[Note: memory of windows] The rows of a rank together with those that it receives are a copy that lives as long as the operation
runs. For backward the rank's own rows, which the operation before keeps anyway, and the received ones are saved; the copy is
made again. So the division adds the received rows to what one process would save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..activations.tensor import DividedTensor
from .exchange import assemble, give_back, receive
from .ranges import RowPlan, Window, window_plan
from .region import Region, made_of_rows

Ints = int | Sequence[int]


class RowsWork(Protocol):
    """An operation on the rows that a rank has assembled."""

    def forward(self, rows: Tensor, *tensors: Tensor | None) -> Tensor:
        """Return this rank's rows of the result."""

    def backward(
        self, gradient: Tensor, rows: Tensor, tensors: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the rows and of the other tensors, None for those that are not needed."""


class _Windowed(torch.autograd.Function):
    """See [Note: memory of windows]."""

    @staticmethod
    def forward(
        ctx: Any, work: RowsWork, region: Region, plan: RowPlan, at: int, local: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        received = receive(region, local, at, plan)
        ctx.work, ctx.region, ctx.plan, ctx.at, ctx.num_received = work, region, plan, at, len(received)
        ctx.save_for_backward(local, *received, *tensors)
        with torch.autocast(local.device.type, enabled=False):
            return work.forward(assemble(local, received, at, plan), *tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        local, *saved = ctx.saved_tensors
        received, tensors = saved[: ctx.num_received], saved[ctx.num_received :]
        rows = assemble(local, received, ctx.at, ctx.plan)
        with torch.autocast(local.device.type, enabled=False):
            mine, *others = ctx.work.backward(gradient, rows, tensors, ctx.needs_input_grad[4:])
        if mine is not None:
            mine = give_back(ctx.region, mine, ctx.at, ctx.plan, is_own=True)
        return None, None, None, None, mine, *others


def plan_of(input: DividedTensor, window: Window) -> RowPlan | None:
    """Return how every rank gets the rows that its part of a window's outputs needs; None if a rank would have no output."""
    ranks, size = input.place.ranks, input.place.size
    return None if window.num_outputs(size) < ranks.size else window_plan(window, size, ranks.size, ranks.rank)


def run_windowed(
    input: DividedTensor, work: RowsWork, plan: RowPlan, num_rows: int, *tensors: Tensor | None
) -> DividedTensor:
    """Return ``num_rows`` rows of the work on what a plan assembles. See [Note: memory of windows]."""
    local = _Windowed.apply(work, input.place.ranks, plan, input.at, input.local, *tensors)  # type: ignore[no-untyped-call]
    return made_of_rows(input, local, num_rows)


class Again:
    """An operation whose forward runs once more in backward, so that the assembled rows are not saved."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def forward(self, rows: Tensor, *tensors: Tensor | None) -> Tensor:
        """Compute the operation."""
        return self._function(rows)

    def backward(
        self, gradient: Tensor, rows: Tensor, tensors: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Compute it again, and return the gradient of the rows."""
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            return torch.autograd.grad(self._function(rows), rows, gradient)


def each_of(value: Ints | None, num: int) -> list[int]:
    """Return one number for each of ``num`` dimensions."""
    if isinstance(value, int):
        return [value] * num
    assert value is not None
    found = [int(each) for each in value]
    return found * num if len(found) == 1 else found


def spatial(input: Any, num: int) -> int | None:
    """Return which of the ``num`` spatial dimensions is divided; None if it is none of them, or there is no division."""
    if not isinstance(input, DividedTensor) or not num + 1 <= input.dim() <= num + 2:
        return None
    return num + input.position if num + input.position >= 0 else None
