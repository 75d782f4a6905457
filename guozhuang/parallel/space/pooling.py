"""Pooling of divided images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations.tensor import DividedTensor, whole_of
from ..spans import parts
from .exchange import assemble, give_back, receive, total
from .ranges import RowPlan, SlidingWindow
from .region import Region, handles_rows, made_of_rows
from .windows import Again, each_of, plan_of, run_windowed, spatial


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


def _window_sizes(num: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1) -> list[list[int]] | None:
    """Return kernels, strides, paddings and dilations of each dimension; None for paddings that PyTorch refuses."""
    kernels, paddings = each_of(kernel, num), each_of(padding, num)
    strides = each_of(stride, num) if stride not in (None, (), []) else list(kernels)
    refused = any(2 * p > k for p, k in zip(paddings, kernels, strict=True))
    return None if refused else [kernels, strides, paddings, each_of(dilation, num)]


@handles_rows("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(
    func: Any, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    num = int(func.__name__[-2])
    i, sizes = spatial(input, num), _window_sizes(num, kernel_size, stride, padding, dilation)
    if i is None or sizes is None or return_indices:
        return NotImplemented
    kernels, strides, paddings, dilations = sizes
    window = SlidingWindow(kernels[i], strides[i], dilations[i], paddings[i], paddings[i], ceil_mode)
    plan = plan_of(input, window)
    if plan is None:
        return NotImplemented
    paddings[i] = 0
    local, at = input.local, input.at
    if num == 1:  # pooling of one dimension is that of two, of which the first has one row
        local, at = local.unsqueeze(-2), at + 1
        sizes = [[1, *kernels], [1, *strides], [0, *paddings], [1, *dilations]]
    found = _MaxPool.apply(local, input.place.ranks, plan, at, (*sizes, ceil_mode))  # type: ignore[no-untyped-call]
    found = found.squeeze(-2) if num == 1 else found
    return made_of_rows(input, found, window.num_outputs(input.place.size))


@handles_rows("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _average_pool(
    func: Any, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    num = int(func.__name__[-2])
    i, sizes = spatial(input, num), _window_sizes(num, kernel_size, stride, padding)
    if i is None or sizes is None or divisor_override == 0:
        return NotImplemented
    kernels, strides, paddings, _ = sizes
    windows = [SlidingWindow(k, s, 1, p, p, ceil_mode) for k, s, p in zip(kernels, strides, paddings, strict=True)]
    plan, num_rows = plan_of(input, windows[i]), windows[i].num_outputs(input.place.size)
    if plan is None:
        return NotImplemented
    count, divisor = divisor_override or math.prod(kernels), None
    if divisor_override is None and (ceil_mode or not count_include_pad):
        divisor = torch.ones((), dtype=torch.float64)
        for d, (window, size) in enumerate(zip(windows, input.shape[-num:], strict=True)):
            ranks, every = input.place.ranks, (0, window.num_outputs(size))
            outputs = range(*(parts(num_rows, ranks.size)[ranks.rank] if d == i else every))
            counts = [window.num_inside(j, size, count_include_pad) for j in outputs]
            shape = [1] * num
            shape[d] = len(counts)
            divisor = divisor * torch.tensor(counts, dtype=torch.float64).view(shape)
    paddings[i] = 0
    if num == 1:  # the pooling of one dimension has no divisor of one's own
        kernels, strides, paddings = [1, *kernels], [1, *strides], [0, *paddings]

    def compute(rows: Tensor) -> Tensor:
        rows = rows.unsqueeze(-2) if num == 1 else rows
        pool = F.avg_pool3d if num == 3 else F.avg_pool2d
        found = pool(rows, kernels, strides, paddings, ceil_mode, True, count)
        found = found.squeeze(-2) if num == 1 else found
        return found if divisor is None else found * (count / divisor).to(found)

    if plan.is_identity:
        return made_of_rows(input, compute(input.local), num_rows)
    return run_windowed(input, Again(compute), plan, num_rows)


def _output_sizes(input: DividedTensor, output_size: Any, num: int) -> list[int]:
    given = [output_size] * num if output_size is None or isinstance(output_size, int) else list(output_size)
    return [input.shape[d - num] if each is None else int(each) for d, each in enumerate(given)]


@handles_rows("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_average_pool(func: Any, input: Any, output_size: Any) -> Any:
    """Average over the rows by a matrix of weights: each rank adds what its rows contribute. The result is whole."""
    num = int(func.__name__[-2])
    i = spatial(input, num)
    if i is None:
        return NotImplemented
    sizes = _output_sizes(input, output_size, num)
    num_rows, ((start, stop),), size = sizes[i], input.place.own_ranges, input.place.size
    sizes[i] = stop - start
    weights = torch.zeros(num_rows, stop - start, dtype=torch.float64)
    for j in range(num_rows):
        first, behind = j * size // num_rows, -(-(j + 1) * size // num_rows)
        weights[j, max(first - start, 0) : max(behind - start, 0)] = 1.0 / (behind - first)
    local = func(input.local, sizes).movedim(input.at, -1)
    with torch.autocast(local.device.type, enabled=False):
        mine = local @ weights.to(local.dtype).to(local.device).T
    return total(input.place.ranks, mine.movedim(-1, input.at))


@handles_rows("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(func: Any, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """Take the largest of each rank's rows, then of the ranks: the gradient goes to the first of several largest, as in one."""
    num = int(func.__name__[-2])
    i = spatial(input, num)
    if i is None or return_indices or (sizes := _output_sizes(input, output_size, num))[i] != 1:
        return NotImplemented

    def largest(tensor: Tensor) -> Tensor:
        found: Any = func(tensor, sizes)
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]

    return largest(whole_of(made_of_rows(input, largest(input.local), input.place.ranks.size)))
