"""Convolutions and pooling of divided images: each rank gets the rows that its outputs need, and computes as one process does.

[Note: memory of windows] The rows of a rank together with those that it receives are a copy that lives as long as the operation
runs. For backward the rank's own rows, which the operation before keeps anyway, and the received ones are saved; the copy is
made again. So the division adds the received rows to what one process would save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .exchange import Region, add_shares, assemble, give_back, receive, total, whole
from .ranges import RowPlan, SlidingWindow, TransposedWindow, parts, transposed_plan, window_plan
from .tensor import SpaceTensor, handles

Ints = int | Sequence[int]

# A copy of a row costs about as much as this many output channels of its convolution.
_PAYS = 2


class _Work(Protocol):
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
        ctx: Any,
        work: _Work,
        region: Region,
        plan: RowPlan,
        at: int,
        fill: float,
        local: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        received = receive(region, local, at, plan)
        ctx.work, ctx.region, ctx.plan, ctx.at, ctx.fill, ctx.num_received = work, region, plan, at, fill, len(received)
        ctx.save_for_backward(local, *received, *tensors)
        with torch.autocast(local.device.type, enabled=False):
            return work.forward(assemble(local, received, at, plan, fill), *tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        local, *saved = ctx.saved_tensors
        received, tensors = saved[: ctx.num_received], saved[ctx.num_received :]
        rows = assemble(local, received, ctx.at, ctx.plan, ctx.fill)
        with torch.autocast(local.device.type, enabled=False):
            mine, *others = ctx.work.backward(gradient, rows, tensors, ctx.needs_input_grad[5:])
        if mine is not None:
            mine = give_back(ctx.region, mine, ctx.at, ctx.plan, is_own=True)
        return None, None, None, None, None, mine, *others


def _run(
    divided: SpaceTensor, work: _Work, plan: RowPlan, num_rows: int, *tensors: Tensor | None, fill: float = 0.0
) -> SpaceTensor:
    local = _Windowed.apply(work, divided.region, plan, divided.at, fill, divided.local, *tensors)  # type: ignore[no-untyped-call]
    return divided.like(local, size=num_rows)


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


class _Again:
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


def _each(value: Ints | None, num: int) -> list[int]:
    if isinstance(value, int):
        return [value] * num
    assert value is not None
    found = [int(each) for each in value]
    return found * num if len(found) == 1 else found


def _spatial(divided: Any, num: int) -> int | None:
    """Return which of the ``num`` spatial dimensions is divided; None if it is none of them, or there is no division."""
    if not isinstance(divided, SpaceTensor) or not num + 1 <= divided.dim() <= num + 2:
        return None
    return i if (i := divided.at - (divided.dim() - num)) >= 0 else None


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
    i = _spatial(input, num)
    if i is None or isinstance(weight, SpaceTensor):
        return NotImplemented
    strides, dilations, kernel = _each(stride, num), _each(dilation, num), weight.shape[2:]
    if isinstance(padding, str):
        sums = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, kernel, strict=True)]
        before, after = [each // 2 for each in sums], [each - each // 2 for each in sums]
    else:
        before = after = _each(padding, num)
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
    found = _run(divided.like(local), work, plan, num_rows, weight_, bias_)
    return found.squeeze(0) if input.dim() == num + 1 else found


@handles("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(
    func: Any, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    num = weight.dim() - 2
    i = _spatial(input, num)
    if i is None or isinstance(weight, SpaceTensor):
        return NotImplemented
    strides, dilations, paddings = _each(stride, num), _each(dilation, num), _each(padding, num)
    extra = _each(output_padding, num)
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
    found = _run(divided.like(local), work, plan, num_rows, weight_, bias_)
    return found.squeeze(0) if input.dim() == num + 1 else found


class _MaxPool(torch.autograd.Function):
    """Saves where the largest elements are, and nothing else."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, region: Region, plan: RowPlan, at: int, numbers: Sequence[Any]) -> Tensor:
        fill = -math.inf if local.dtype.is_floating_point else torch.iinfo(local.dtype).min
        rows = assemble(local, receive(region, local, at, plan), at, plan, fill)
        num = len(numbers[0])
        found, where = getattr(torch.ops.aten, f"max_pool{num}d_with_indices")(rows, *numbers)
        ctx.region, ctx.plan, ctx.at, ctx.numbers, ctx.shape = region, plan, at, numbers, rows.shape
        ctx.save_for_backward(where)
        return found  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (where,) = ctx.saved_tensors
        shaped = gradient.new_empty(ctx.shape)  # only its shape counts
        compute = getattr(torch.ops.aten, f"max_pool{len(ctx.numbers[0])}d_with_indices_backward")
        found = compute(gradient.contiguous(), shaped, *ctx.numbers, where)
        return give_back(ctx.region, found, ctx.at, ctx.plan, is_own=True), None, None, None, None


@handles("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(
    func: Any, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    num = int(func.__name__[-2])
    i = _spatial(input, num)
    if i is None or return_indices:
        return NotImplemented
    kernels, paddings, dilations = _each(kernel_size, num), _each(padding, num), _each(dilation, num)
    strides = _each(stride, num) if stride not in (None, (), []) else list(kernels)
    if any(2 * p > k for p, k in zip(paddings, kernels, strict=True)):
        return NotImplemented  # PyTorch says what is wrong
    window = SlidingWindow(kernels[i], strides[i], dilations[i], paddings[i], paddings[i], ceil_mode)
    num_rows = window.num_outputs(input.rows)
    if num_rows < input.region.size:
        return NotImplemented
    plan = window_plan(window, input.rows, input.region.size, input.region.index)
    paddings[i] = 0
    local, at = input.local, input.at
    if num == 1:  # pooling of one dimension is that of two, of which the first has one row
        local, at = local.unsqueeze(-2), at + 1
        kernels, strides, paddings, dilations = [1, *kernels], [1, *strides], [0, *paddings], [1, *dilations]
    found = _MaxPool.apply(local, input.region, plan, at, (kernels, strides, paddings, dilations, ceil_mode))  # type: ignore[no-untyped-call]
    return input.like(found.squeeze(-2) if num == 1 else found, size=num_rows)


@handles("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _average_pool(
    func: Any, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    num = int(func.__name__[-2])
    i = _spatial(input, num)
    if i is None:
        return NotImplemented
    kernels, paddings = _each(kernel_size, num), _each(padding, num)
    strides = _each(stride, num) if stride not in (None, (), []) else list(kernels)
    if any(2 * p > k for p, k in zip(paddings, kernels, strict=True)) or divisor_override == 0:
        return NotImplemented  # PyTorch says what is wrong
    sizes = list(input.shape[-num:])
    windows = [SlidingWindow(k, s, 1, p, p, ceil_mode) for k, s, p in zip(kernels, strides, paddings, strict=True)]
    num_rows, region = windows[i].num_outputs(input.rows), input.region
    if num_rows < region.size:
        return NotImplemented
    divisor: Tensor | float = float(divisor_override or math.prod(kernels))
    if divisor_override is None and (ceil_mode or not count_include_pad):
        divisor = torch.ones((), dtype=input.dtype, device=input.device)
        for d, window in enumerate(windows):
            outputs = (
                range(window.num_outputs(sizes[d])) if d != i else range(*parts(num_rows, region.size)[region.index])
            )
            counts = [window.num_inside(j, sizes[d], count_include_pad) for j in outputs]
            shape = [1] * num
            shape[d] = len(counts)
            divisor = divisor * torch.tensor(counts, dtype=input.dtype, device=input.device).view(shape)
    paddings[i] = 0
    if num == 1:  # the pooling of one dimension has no divisor of one's own
        kernels, strides, paddings = [1, *kernels], [1, *strides], [0, *paddings]

    def compute(rows: Tensor) -> Tensor:
        rows = rows.unsqueeze(-2) if num == 1 else rows
        pool = F.avg_pool3d if num == 3 else F.avg_pool2d
        sums = pool(rows, kernels, strides, paddings, ceil_mode, True, 1)
        return (sums.squeeze(-2) if num == 1 else sums) / divisor

    plan = window_plan(windows[i], input.rows, region.size, region.index)
    if plan.is_identity:
        return input.like(compute(input.local), size=num_rows)
    return _run(input, _Again(compute), plan, num_rows)


def _output_sizes(input: SpaceTensor, output_size: Any, num: int) -> list[int]:
    given = [output_size] * num if output_size is None or isinstance(output_size, int) else list(output_size)
    return [input.shape[d - num] if each is None else int(each) for d, each in enumerate(given)]


@handles("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_average_pool(func: Any, input: Any, output_size: Any) -> Any:
    """Average over the rows by a matrix of weights: each rank adds what its rows contribute. The result is whole."""
    num = int(func.__name__[-2])
    i = _spatial(input, num)
    if i is None:
        return NotImplemented
    sizes = _output_sizes(input, output_size, num)
    num_rows, (start, stop), size = sizes[i], input.span, input.rows
    sizes[i] = stop - start
    weights = torch.zeros(num_rows, stop - start, dtype=torch.float64)
    for j in range(num_rows):
        first, behind = j * size // num_rows, -(-(j + 1) * size // num_rows)
        weights[j, max(first - start, 0) : max(behind - start, 0)] = 1.0 / (behind - first)
    local = func(input.local, sizes).movedim(input.at, -1)
    mine = local @ weights.to(local.dtype).to(local.device).T
    return total(input.region, mine.movedim(-1, input.at))


@handles("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(func: Any, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """Take the largest of each rank's rows, then of the ranks: the gradient goes to the first of several largest, as in one."""
    num = int(func.__name__[-2])
    i = _spatial(input, num)
    if i is None or return_indices or (sizes := _output_sizes(input, output_size, num))[i] != 1:
        return NotImplemented
    local = func(input.local, sizes)
    local = local[0] if isinstance(local, tuple) else local
    everyone = whole(input.region, local, input.at, input.region.size)
    found = func(everyone, sizes)
    return found[0] if isinstance(found, tuple) else found


@handles("local_response_norm", "channel_shuffle")
def _over_channels(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute what looks at the channels of each place only."""
    if not isinstance(input, SpaceTensor) or input.at < 2:
        return NotImplemented
    return input.like(func(input.local, *args, **kwargs))
