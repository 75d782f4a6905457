"""Batch normalization over the joined batch of all ranks, on any device.

As ``guozhuang.sync_batch_norm``, where the formulas are, with collectives that are matched by name: forward gathers (count,
mean, sum of squared deviations) of each channel, and backward adds up two sums for each channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from guozhuang.errors import explain

from ..common.state import required
from .gathering import allgather_async
from .handles import synchronize
from .reducing import allreduce_
from .submitting import Sum


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm`` whose statistics in training are those of all ranks together.

    In training, forward and its backward each issue one unnamed collective: every rank must call them, and in the same order.
    Ranks may have different numbers of samples, none among them; with none in all it is an error.

    Args:
        num_features: C of an input of shape (N, C, ...) with any number of further dimensions.
        eps: added to the variance.
        momentum: of the running statistics; None: the mean of all.
        affine: has weight and bias.
        track_running_stats: has running statistics, by which it normalizes in evaluation.

    Raises:
        ValueError: an input with fewer than two dimensions, or another number of channels; one value for each channel on all
            ranks together.
        HorovodInternalError: a rank is lost, or has joined.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            what = f"batch normalization of {self.num_features} channels needs an input of shape (N, {self.num_features}, ...)"
            raise ValueError(explain(what, value=tuple(input.shape)))

    def forward(self, input: Tensor) -> Tensor:  # the name is PyTorch's
        """Normalize over the joined batch in training, by the running statistics in evaluation."""
        self._check_input_dim(input)
        if not self.training or required().size == 1:
            return self._local(input)
        rate = self._counted_rate()
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
                unbiased = variance * (count / (count - 1.0))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)
        return output  # type: ignore[no-any-return]

    def _counted_rate(self) -> float:
        """Count this batch; return how much it changes the running statistics."""
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    def _local(self, input: Tensor) -> Tensor:
        rate = self._counted_rate() if self.training else 0.0
        by_batch = self.training or self.running_mean is None
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, by_batch, rate, self.eps
        )


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        dims, shape, num_channels = _layout(x)
        num_values = x.numel() // num_channels
        variance, mean = x.new_zeros(2, num_channels).unbind()
        if num_values:
            variance, mean = torch.var_mean(x, dims, correction=0)
        mine = torch.cat([x.new_full((1,), float(num_values)), mean, variance * num_values])
        everyone = synchronize(allgather_async(mine.unsqueeze(0)))
        counts, means, squares = everyone.split([1, num_channels, num_channels], dim=1)
        count = counts.sum()
        if count <= 1:
            what = "batch normalization needs more than one value for each channel over all ranks"
            raise ValueError(explain(what, value=tuple(input.shape), fix="use a larger batch, or evaluation mode"))
        mean = (counts * means).sum(0) / count
        variance = (squares.sum(0) + (counts * (means - mean) ** 2).sum(0)) / count
        inverse = torch.rsqrt(variance + eps)
        output = (x - mean.view(shape)) * inverse.view(shape)
        output = output if weight is None else output * weight.to(x.dtype).view(shape)
        output = output if bias is None else output + bias.to(x.dtype).view(shape)
        ctx.save_for_backward(input, weight, mean, inverse, count)
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        input, weight, mean, inverse, count = ctx.saved_tensors
        x, dy = input.to(mean.dtype), gradient.to(mean.dtype)
        dims, shape = _layout(x)[:2]
        normal = (x - mean.view(shape)) * inverse.view(shape)
        sums = torch.stack([dy.sum(dims), (dy * normal).sum(dims)])
        # The rank's own sums: an optimizer of all ranks averages them as it does other gradients.
        d_bias = sums[0].to(input.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        d_weight = None if weight is None else sums[1].to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            # On all ranks alike: whether an input needs a gradient follows from the model.
            return None, d_weight, d_bias, None
        mean_dy, mean_dy_normal = allreduce_(sums.clone(), op=Sum) / count
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        dx = (dy - mean_dy.view(shape) - normal * mean_dy_normal.view(shape)) * scale.view(shape)
        return dx.to(input.dtype), d_weight, d_bias, None


def _layout(x: Tensor) -> tuple[list[int], list[int], int]:
    """The dimensions to sum over, the shape of a channel's values against ``x``, and how many channels there are."""
    return [d for d in range(x.dim()) if d != 1], [1, x.shape[1]] + [1] * (x.dim() - 2), x.shape[1]
