"""Convolutions and transposed convolutions of divided images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations.products import autocast
from ..activations.tensor import DividedTensor
from ..spans import parts
from .exchange import add_shares, receive
from .ranges import RowPlan, SlidingWindow, TransposedWindow
from .region import Region, handles_rows
from .windows import Ints, each_of, plan_of, run_windowed, spatial

# A copy of a row costs about as much as this many output channels of its convolution.
_PAYS = 2


class _Convolution:
    """A convolution, padded only in dimensions that are not divided, whose rows ``keep`` are this rank's.

    Args:
        numbers: stride, padding, dilation, whether it is transposed, output padding, and groups.
        keep: (dimension, first, count) of the rows of the result; None for all.
    """

    def __init__(self, numbers: Sequence[Any], keep: tuple[int, int, int] | None = None) -> None:
        self._numbers, self._keep = numbers, keep

    def forward(self, rows: Tensor, *tensors: Tensor | None) -> Tensor:
        """Convolve."""
        found: Tensor = torch.ops.aten.convolution(rows, *tensors, *self._numbers)
        # Not a view of more: what the model sees as lying together does so, and a view of it changes with it.
        is_all = self._keep is None or found.shape[self._keep[0]] == self._keep[2]
        return found if is_all else found.narrow(*self._keep).clone()  # type: ignore[misc]

    def backward(
        self, gradient: Tensor, rows: Tensor, tensors: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of rows, weight and bias."""
        weight, bias = tensors
        assert weight is not None
        if self._keep:
            dim, first, count = self._keep
            stride, padding, dilation, _, extra, _ = (
                each[dim - 2] if isinstance(each, list) else 0 for each in self._numbers
            )
            shape = list(gradient.shape)
            shape[dim] = TransposedWindow(weight.shape[dim], stride, dilation, padding, extra).num_outputs(
                rows.shape[dim]
            )
            kept, gradient = gradient, gradient.new_zeros(shape)
            gradient.narrow(dim, first, count).copy_(kept)
        return _backward(gradient, rows, weight, bias, self._numbers, needed)


def _backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, numbers: Sequence[Any], needed: Sequence[bool]
) -> list[Any]:
    """Return the gradients of rows, weight and bias that are needed."""
    sizes = None if bias is None else list(bias.shape)
    wanted = [needed[0], needed[1], bias is not None and needed[2]]
    found: list[Any] = torch.ops.aten.convolution_backward(gradient, rows, weight, sizes, *numbers, wanted)
    return found


class _InPlace(torch.autograd.Function):
    """A convolution of stride 1 that keeps the number of rows, without a copy of the rank's own rows.

    The convolution is linear: that of the own rows between zeros, plus that of the received rows between zeros, of which only
    the first and the last ``reach`` outputs are made.
    """

    @staticmethod
    def forward(
        ctx: Any, region: Region, plan: RowPlan, at: int, numbers: Sequence[Any], local: Tensor, weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        received = receive(region, local, at, plan)
        ctx.region, ctx.plan, ctx.at, ctx.numbers = region, plan, at, numbers
        ctx.save_for_backward(local, weight, bias, *received)
        with torch.autocast(local.device.type, enabled=False):
            found = torch.ops.aten.convolution(local, weight, bias, *numbers)
            if received:
                strips = _strips(received, at, plan)
                edges = torch.ops.aten.convolution(strips, weight, None, *_without_padding(numbers, at))
                for edge, target in zip(edges.chunk(len(received)), _edges(found, at, plan, numbers), strict=True):
                    target.add_(edge)
        return found  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        local, weight, bias, *received = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        shares: list[Tensor] = []
        with torch.autocast(local.device.type, enabled=False):
            mine, d_weight, d_bias = _backward(gradient, local, weight, bias, ctx.numbers, needed)
            if received and (needed[0] or needed[1]):
                edges = torch.cat(_edges(gradient, ctx.at, ctx.plan, ctx.numbers))
                strips = _strips(received, ctx.at, ctx.plan)
                numbers = _without_padding(ctx.numbers, ctx.at)
                d_strips, more, _ = _backward(edges, strips, weight, None, numbers, needed)
                if needed[1]:
                    d_weight += more
                if needed[0]:
                    shares = _of_strips(d_strips, ctx.at, ctx.plan)
        if needed[0]:
            mine = add_shares(ctx.region, mine, shares, ctx.at, ctx.plan)
        return None, None, None, None, mine, d_weight, d_bias


def _without_padding(numbers: Sequence[Any], at: int) -> list[Any]:
    stride, padding, *rest = numbers
    return [stride, [0 if i == at - 2 else each for i, each in enumerate(padding)], *rest]


def _is_above(plan: RowPlan) -> list[bool]:
    """Return for each received message whether its rows lie above this rank's own."""
    return [pieces[0].at < plan.own[0].at for _, pieces in plan.receives]


def _edges(outputs: Tensor, at: int, plan: RowPlan, numbers: Sequence[Any]) -> list[Tensor]:
    """Return the first and the last outputs, as far as received rows contribute to them."""
    reach = numbers[1][at - 2]
    return [outputs.narrow(at, 0 if above else plan.num_rows - reach, reach) for above in _is_above(plan)]


def _strips(received: Sequence[Tensor], at: int, plan: RowPlan) -> Tensor:
    """Return the received rows with zeros in place of the rows next to them, as more samples."""
    blocks = []
    for rows, above in zip(received, _is_above(plan), strict=True):
        shape = list(rows.shape)
        shape[at] *= 2
        zeros = rows.new_zeros(shape)
        blocks.append(torch.cat([rows, zeros] if above else [zeros, rows], at))
    return torch.cat(blocks)


def _of_strips(strips: Tensor, at: int, plan: RowPlan) -> list[Tensor]:
    """Return the received rows' part of the gradient of what ``_strips`` returned."""
    above = _is_above(plan)
    num = strips.shape[at] // 3
    return [
        each.narrow(at, 0 if up else 2 * num, num) for each, up in zip(strips.chunk(len(above)), above, strict=True)
    ]


@handles_rows("conv1d", "conv2d", "conv3d")
def _convolve(
    func: Any, input: Any, weight: Tensor, bias: Tensor | None = None, stride: Ints = 1, padding: Ints | str = 0,
    dilation: Ints = 1, groups: int = 1,
) -> Any:  # fmt: skip
    num = weight.dim() - 2
    i = spatial(input, num)
    if i is None or isinstance(weight, DividedTensor):
        return NotImplemented
    if input.dim() == num + 1:
        return func(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    strides, dilations, kernel = each_of(stride, num), each_of(dilation, num), weight.shape[2:]
    if isinstance(padding, str):
        sums = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, kernel, strict=True)]
        before, after = [each // 2 for each in sums], [each - each // 2 for each in sums]
    else:
        before = after = each_of(padding, num)
    window = SlidingWindow(kernel[i], strides[i], dilations[i], before[i], after[i])
    plan = plan_of(input, window)
    if plan is None:
        return NotImplemented
    local, *tensors = autocast(input.local, weight, bias)
    uneven = [(0, 0) if d == i else (0, after[d] - before[d]) for d in range(num)]
    if any(more for _, more in uneven):
        local = F.pad(local, [each for pair in reversed(uneven) for each in pair])
    reach = before[i]
    shortest = input.place.size // input.place.ranks.size
    keeps_rows = strides[i] == 1 and reach == after[i] and 2 * reach == dilations[i] * (kernel[i] - 1)
    numbers = [strides, before, dilations, False, [0] * num, groups]
    if keeps_rows and reach and shortest >= reach * max(1, weight.shape[0] // groups // _PAYS):
        return input.like(_InPlace.apply(input.place.ranks, plan, input.at, numbers, local, *tensors))  # type: ignore[no-untyped-call]
    work = _Convolution(_without_padding(numbers, input.at))
    return run_windowed(input.like(local), work, plan, window.num_outputs(input.place.size), *tensors)


@handles_rows("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolve_transposed(
    func: Any, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    num = weight.dim() - 2
    i = spatial(input, num)
    if i is None or isinstance(weight, DividedTensor):
        return NotImplemented
    if input.dim() == num + 1:
        return func(input.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation).squeeze(0)
    strides, dilations, paddings = each_of(stride, num), each_of(dilation, num), each_of(padding, num)
    extra = each_of(output_padding, num)
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        return NotImplemented  # PyTorch says what is wrong
    window = TransposedWindow(weight.shape[2 + i], strides[i], dilations[i], paddings[i], extra[i])
    plan = plan_of(input, window)
    if plan is None:
        return NotImplemented
    num_rows = window.num_outputs(input.place.size)
    start, stop = parts(num_rows, input.place.ranks.size)[input.place.ranks.rank]
    paddings[i] = extra[i] = 0
    keep = (input.at, start - window.first_made((start, stop)), stop - start)
    work = _Convolution([strides, paddings, dilations, True, extra, groups], keep)
    local, *tensors = autocast(input.local, weight, bias)
    return run_windowed(input.like(local), work, plan, num_rows, *tensors)
