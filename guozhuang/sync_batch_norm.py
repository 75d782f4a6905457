"""Batch normalization over the joined batch of all ranks, on CPU too.

Formulas: every rank sends (count, mean, M2) per channel, combined as in Chan, Golub and LeVeque 1979 (the pairwise update of
sums of squared deviations), which stays exact where the mean is large against the spread. Backward needs two sums per channel
over all ranks: of dy and of dy * (x - mean). Ranks may have different numbers of samples, including none.
Source: Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UsageError, explain

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


# Two functions that combine the statistics of the ranks: the first gathers a 1-dimensional tensor of each rank as (ranks,
# elements), the second sums a tensor over the ranks in place.
Collectives: TypeAlias = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], object]]


def _of_group(group: dist.ProcessGroup) -> Collectives:
    def gather(mine: Tensor) -> Tensor:
        everyone = mine.new_empty(group.size(), mine.numel())
        dist.all_gather(list(everyone.unbind(0)), mine, group=group)
        return everyone

    return gather, lambda sums: dist.all_reduce(sums, group=group)


class SyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` that works on the CPU too, with equal arguments and state; on other devices, PyTorch's.

    Training-mode forward and its backward each issue one collective; every rank of the group must call them. The input has the
    shape (N, C, ...) with any number of further dimensions and any floating-point dtype; statistics are in fp32 or wider.

    Raises:
        ValueError: the input has fewer than two dimensions, or only one value per channel on all ranks together.
    """

    def forward(self, input: Tensor) -> Tensor:  # PyTorch calls the argument ``input`` too
        """Normalize by the statistics of the joined batch in training mode, by the running statistics in evaluation mode."""
        if input.device.type != "cpu":
            return super().forward(input)
        group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        return self.normalized(input, None if group is None or group.size() == 1 else _of_group(group))

    def normalized(self, input: Tensor, collectives: Collectives | None) -> Tensor:
        """Return the normalized input, on any device; ``collectives`` is None if there are no other ranks."""
        if input.dim() < 2:
            raise UsageError(
                explain(
                    "batch normalization needs an input of shape (N, C, ...)",
                    value=tuple(input.shape),
                    fix="give it a dimension of channels behind that of samples",
                )
            )
        if input.shape[1] != self.num_features:
            raise UsageError(
                explain(
                    f"the input has {input.shape[1]} channels, the layer {self.num_features}",
                    value=tuple(input.shape),
                    fix=f"make the layer with num_features={input.shape[1]}, or look at the layer before it",
                )
            )
        use_batch = self.training or self.running_mean is None
        if not use_batch or collectives is None:
            return self._local(input, use_batch)
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if not self.training:  # no running statistics: PyTorch normalizes by the local batch in evaluation mode
            return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, collectives)  # type: ignore[no-untyped-call]
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            rate = 1.0 / float(self.num_batches_tracked or 1) if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
                unbiased = variance * (count / (count - 1.0))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)
        return output  # type: ignore[no-any-return]

    def _local(self, input: Tensor, use_batch: bool) -> Tensor:
        rate = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        keep = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if keep else (None, None)
        return F.batch_norm(input, mean, variance, self.weight, self.bias, use_batch, rate, self.eps)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Return the module with every BatchNorm submodule, including PyTorch's SyncBatchNorm, replaced by this class.

        The replacements hold the same parameter and buffer objects, and the hooks of forward and backward. A submodule that is
        used in several places gets one replacement. Other subclasses of SyncBatchNorm are not replaced.
        """
        return _replace(module, _is_batch_norm, process_group, {})


def use_on_cpu(module: nn.Module) -> nn.Module:
    """Return the module with PyTorch's SyncBatchNorm, which refuses CPU tensors, replaced by :class:`SyncBatchNorm`."""
    if not any(_is_torchs(part) for part in module.modules()):
        return module
    return _replace(module, _is_torchs, None, {})


def _is_torchs(part: nn.Module) -> bool:
    return type(part) is nn.SyncBatchNorm


def _is_batch_norm(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.batchnorm._BatchNorm) and (
        not isinstance(part, nn.SyncBatchNorm) or _is_torchs(part)
    )


def _replace(
    module: nn.Module,
    is_meant: Callable[[nn.Module], bool],
    group: dist.ProcessGroup | None,
    made: dict[int, nn.Module],
) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    result = module
    if is_meant(module):
        result = _converted(module, group)
    made[id(module)] = result
    for name, child in list(module._modules.items()):
        if child is not None:
            replacement = _replace(child, is_meant, group, made)
            if replacement is not child:
                setattr(result, name, replacement)
    return result


def _converted(part: Any, group: dist.ProcessGroup | None) -> SyncBatchNorm:
    group = getattr(part, "process_group", None) or group
    new = SyncBatchNorm(part.num_features, part.eps, part.momentum, part.affine, part.track_running_stats, group)
    new.training = part.training
    if part.affine:
        new.weight, new.bias = part.weight, part.bias
    new.running_mean, new.running_var = part.running_mean, part.running_var
    new.num_batches_tracked = part.num_batches_tracked
    for name in _HOOKS:
        # Share the dictionary instead of copying it, so that the user's handles still remove hooks.
        new.__dict__[name] = part.__dict__[name]
    return new


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, collectives: Collectives
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        x = input.to(wide)
        dims = [d for d in range(x.dim()) if d != 1]
        num_channels = x.shape[1]
        local_count = x.numel() // max(num_channels, 1)
        variance, mean = torch.var_mean(x, dims, correction=0) if local_count else (x.new_zeros(num_channels),) * 2
        mine = torch.cat([x.new_full((1,), float(local_count)), mean, variance * local_count])
        everyone = collectives[0](mine)
        counts, means, squares = everyone[:, :1], everyone[:, 1 : num_channels + 1], everyone[:, num_channels + 1 :]
        count = counts.sum()
        if count <= 1:
            raise ValueError(
                explain(
                    "batch normalization needs more than one value per channel over all ranks",
                    value=tuple(input.shape),
                    fix="use a larger batch or evaluation mode",
                )
            )
        mean = (counts * means).sum(0) / count
        variance = (squares.sum(0) + (counts * (means - mean) ** 2).sum(0)) / count
        inverse = torch.rsqrt(variance + eps)
        shape = [1, num_channels] + [1] * (x.dim() - 2)
        normal = (x - mean.view(shape)) * inverse.view(shape)
        output = normal if weight is None else normal * weight.to(wide).view(shape)
        output = output if bias is None else output + bias.to(wide).view(shape)
        ctx.save_for_backward(input, weight, mean, inverse, count)
        ctx.collectives, ctx.has_bias = collectives, bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        input, weight, mean, inverse, count = ctx.saved_tensors
        x, dy = input.to(mean.dtype), gradient.to(mean.dtype)
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
        normal = (x - mean.view(shape)) * inverse.view(shape)
        sum_dy, sum_dy_normal = dy.sum(dims), (dy * normal).sum(dims)
        d_weight = sum_dy_normal.to(weight.dtype) if weight is not None else None
        d_bias = sum_dy.to(weight.dtype) if ctx.has_bias else None
        if not ctx.needs_input_grad[0]:
            # All ranks skip the collective alike: whether the input needs a gradient depends on the model only.
            return None, d_weight, d_bias, None, None
        sums = torch.cat([sum_dy, sum_dy_normal])
        ctx.collectives[1](sums)
        sums /= count
        mean_dy, mean_dy_normal = sums.chunk(2)
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        dx = (dy - mean_dy.view(shape) - normal * mean_dy_normal.view(shape)) * scale.view(shape)
        return dx.to(input.dtype), d_weight, d_bias, None, None
