"""Convolutions and transposed convolutions of divided images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .exchange import Region, add_shares, receive
from .ranges import RowPlan, SlidingWindow, TransposedWindow, parts, transposed_plan, window_plan
from .tensor import SpaceTensor, handles
from .windows import Ints, each_of, run_windowed, spatial

# A copy of a row costs about as much as this many output channels of its convolution.
_PAYS = 2


class _Convolution:
    """A convolution, padded only in dimensions that are not divided, whose rows ``keep`` are this rank's.

    Args:
        keep: (dimension, first, count) of the rows of the result; None for all.
    """

    def __init__(
        self, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, transposed: bool = False,
        extra: Sequence[int] = (), keep: tuple[int, int, int] | None = None,
    ) -> None:  # fmt: skip
        self._numbers = (
            list(stride),
            list(padding),
            list(dilation),
            transposed,
            list(extra) or [0] * len(stride),
            groups,
        )
        self._keep = keep

    def forward(self, rows: Tensor, *tensors: Tensor | None) -> Tensor:
        """Convolve."""
        weight, bias = tensors
        found = torch.ops.aten.convolution(rows, weight, bias, *self._numbers)
        return found.narrow(*self._keep) if self._keep else found  # type: ignore[no-any-return]

    def backward(
        self, gradient: Tensor, rows: Tensor, tensors: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of rows, weight and bias."""
        weight, bias = tensors
        assert weight is not None
        stride, padding, dilation, transposed, extra, groups = self._numbers
        if self._keep:
            dim, first, count = self._keep
            i = dim - 2
            made = (
                (rows.shape[dim] - 1) * stride[i]
                - 2 * padding[i]
                + dilation[i] * (weight.shape[dim] - 1)
                + extra[i]
                + 1
            )
            whole_shape = list(gradient.shape)
            whole_shape[dim] = made
            widened = gradient.new_zeros(whole_shape)
            widened.narrow(dim, first, count).copy_(gradient)
            gradient = widened
        found = torch.ops.aten.convolution_backward(
            gradient, rows, weight, None if bias is None else list(bias.shape), stride, padding, dilation, transposed,
            extra, groups, [needed[0], needed[1], bias is not None and needed[2]],
        )  # fmt: skip
        return found  # type: ignore[no-any-return]


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
        needed = list(ctx.needs_input_grad[4:])
        biases = None if bias is None else list(bias.shape)
        shares: list[Tensor] = []
        with torch.autocast(local.device.type, enabled=False):
            compute = torch.ops.aten.convolution_backward
            mine, d_weight, d_bias = compute(
                gradient, local, weight, biases, *ctx.numbers, [*needed[:2], bias is not None and needed[2]]
            )
            if received and (needed[0] or needed[1]):
                edges = torch.cat(_edges(gradient, ctx.at, ctx.plan, ctx.numbers))
                strips = _strips(received, ctx.at, ctx.plan)
                numbers = _without_padding(ctx.numbers, ctx.at)
                d_strips, more, _ = compute(edges, strips, weight, None, *numbers, [needed[0], needed[1], False])
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


def _batched(divided: SpaceTensor, num: int) -> SpaceTensor:
    return divided.like(divided.local.unsqueeze(0), divided.at + 1) if divided.dim() == num + 1 else divided


def _cast(local: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Cast what autocast would cast for a convolution."""
    kind = local.device.type
    if not torch.is_autocast_enabled(kind) or local.dtype == torch.float64:
        return [local, *tensors]
    dtype = torch.get_autocast_dtype(kind)
    return [None if each is None else each.to(dtype) for each in (local, *tensors)]


@handles("conv1d", "conv2d", "conv3d")
def _convolve(
    func: Any, input: Any, weight: Tensor, bias: Tensor | None = None, stride: Ints = 1, padding: Ints | str = 0,
    dilation: Ints = 1, groups: int = 1,
) -> Any:  # fmt: skip
    num = weight.dim() - 2
    i = spatial(input, num)
    if i is None or isinstance(weight, SpaceTensor):
        return NotImplemented
    strides, dilations, kernel = each_of(stride, num), each_of(dilation, num), weight.shape[2:]
    if isinstance(padding, str):
        sums = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, kernel, strict=True)]
        before, after = [each // 2 for each in sums], [each - each // 2 for each in sums]
    else:
        before = after = each_of(padding, num)
    window = SlidingWindow(kernel[i], strides[i], dilations[i], before[i], after[i])
    num_rows = window.num_outputs(input.rows)
    if num_rows < input.region.size:
        return NotImplemented
    divided = _batched(input, num)
    local, weight_, bias_ = _cast(divided.local, weight, bias)
    assert local is not None
    uneven = [(0, 0) if d == i else (0, after[d] - before[d]) for d in range(num)]
    if any(more for _, more in uneven):
        local = F.pad(local, [each for pair in reversed(uneven) for each in pair])
    plan = window_plan(window, input.rows, input.region.size, input.region.index)
    reach = before[i]
    shortest = input.rows // input.region.size
    keeps_rows = strides[i] == 1 and reach == after[i] and 2 * reach == dilations[i] * (kernel[i] - 1)
    if keeps_rows and reach and shortest >= reach * max(1, weight.shape[0] // groups // _PAYS):
        numbers = (strides, before, dilations, False, [0] * num, groups)
        found = divided.like(_InPlace.apply(divided.region, plan, divided.at, numbers, local, weight_, bias_))  # type: ignore[no-untyped-call]
        return found.squeeze(0) if input.dim() == num + 1 else found
    before[i] = 0
    work = _Convolution(strides, before, dilations, groups)
    found = run_windowed(divided.like(local), work, plan, num_rows, weight_, bias_)
    return found.squeeze(0) if input.dim() == num + 1 else found


@handles("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(
    func: Any, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    num = weight.dim() - 2
    i = spatial(input, num)
    if i is None or isinstance(weight, SpaceTensor):
        return NotImplemented
    strides, dilations, paddings = each_of(stride, num), each_of(dilation, num), each_of(padding, num)
    extra = each_of(output_padding, num)
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        return NotImplemented  # PyTorch says what is wrong
    window = TransposedWindow(weight.shape[2 + i], strides[i], dilations[i], paddings[i], extra[i])
    region, num_rows = input.region, window.num_outputs(input.rows)
    if num_rows < region.size:
        return NotImplemented
    divided = _batched(input, num)
    local, weight_, bias_ = _cast(divided.local, weight, bias)
    assert local is not None
    span = parts(num_rows, region.size)[region.index]
    keep = (divided.at, span[0] - window.first_made(span), span[1] - span[0])
    paddings[i] = extra[i] = 0
    plan = transposed_plan(window, input.rows, region.size, region.index)
    work = _Convolution(strides, paddings, dilations, groups, True, extra, keep)
    found = run_windowed(divided.like(local), work, plan, num_rows, weight_, bias_)
    return found.squeeze(0) if input.dim() == num + 1 else found
