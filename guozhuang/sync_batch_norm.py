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
from .registry import registry
from .watch.waits import waits

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


# Two functions that combine the statistics of the ranks: the first gathers a 1-dimensional tensor of each rank as (ranks,
# elements), the second sums a tensor over the ranks in place.
Collectives: TypeAlias = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], object]]


def collectives_of(group: dist.ProcessGroup) -> Collectives:
    """Return what combines statistics over a group. Tensors without data, which ask for shapes, are left as they are."""

    def gather(mine: Tensor) -> Tensor:
        everyone = mine.new_empty(group.size(), mine.numel())
        if not mine.is_meta:
            with waits.inside():
                dist.all_gather(list(everyone.unbind(0)), mine, group=group)
        return everyone

    def add(sums: Tensor) -> None:
        if not sums.is_meta:
            with waits.inside():
                dist.all_reduce(sums, group=group)

    return gather, add


class SyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` that works on the CPU too, with equal arguments and state; on other devices, PyTorch's.

    Training-mode forward and its backward each issue one collective; every rank of the group must call them. The input has the
    shape (N, C, ...) with any number of further dimensions and any floating-point dtype; statistics are in fp32 or wider.

    Raises:
        ValueError: the input has fewer than two dimensions, or only one value per channel on all ranks together.
    """

    def forward(self, input: Tensor) -> Tensor:  # PyTorch calls the argument ``input`` too
        """Normalize by the statistics of the joined batch in training mode, by the running statistics in evaluation mode."""
        if input.device.type != "cpu" and registry.weight.num_ranks == 0:
            return super().forward(input)
        group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        return self.normalized(input, None if group is None or group.size() == 1 else collectives_of(group))

    def normalized(self, input: Tensor, collectives: Collectives | None) -> Tensor:
        """Return the normalized input, on any device; ``collectives`` is None if there are no other ranks."""
        if input.dim() < 2:
            what = "batch normalization needs an input of shape (N, C, ...)"
            fix = "give it a dimension of channels behind that of samples"
            raise UsageError(explain(what, value=tuple(input.shape), fix=fix))
        if input.shape[1] != self.num_features:
            what = f"the input has {input.shape[1]} channels, the layer {self.num_features}"
            fix = f"make the layer with num_features={input.shape[1]}, or look at the layer before it"
            raise UsageError(explain(what, value=tuple(input.shape), fix=fix))
        use_batch = self.training or self.running_mean is None
        if not use_batch or collectives is None:
            return self._local(input, use_batch)
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if not self.training:  # no running statistics: PyTorch normalizes by the local batch in evaluation mode
            return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        weight = registry.weight.value
        output, mean, variance, count = normalize(input, self.weight, self.bias, self.eps, collectives, 1, weight)
        if self.track_running_stats:
            rate = 1.0 / float(self.num_batches_tracked or 1) if self.momentum is None else self.momentum
            update_running(self.running_mean, self.running_var, mean, variance, count, rate)
        return output

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
    """Forward and backward are one pass of PyTorch's kernels for given statistics each, and one for the sums.

    Statistics of a group of channels: a rank's values are as many in each, so the means of its channels combine without counts.
    With ``z = (x - mean) * inverse``, ``S1`` and ``S2`` the means of ``w * dy`` and ``w * dy * z`` over a group and all ranks:
    ``dx = inverse * (w * dy - S1 - z * S2)``, which is ``a * dy + b * (x - mean) + c`` with numbers for each channel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        collectives: Collectives,
        channels_of_group: int,
        weight_of_rank: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        x = input.to(wide)
        num_channels = x.shape[1]
        num_groups, per_channel = num_channels // channels_of_group, x.numel() // max(num_channels, 1)
        if per_channel:
            mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
            if channels_of_group > 1:
                means = mean.view(num_groups, channels_of_group)
                mean = means.mean(1)
                variance = variance.view_as(means).mean(1) + ((means - mean[:, None]) ** 2).mean(1)
        else:
            mean, variance = x.new_zeros(2, num_groups)
        local_count = per_channel * channels_of_group
        everyone = collectives[0](torch.cat([x.new_full((1,), float(local_count)), mean, variance * local_count]))
        counts, means, squares = everyone[:, :1], everyone[:, 1 : num_groups + 1], everyone[:, num_groups + 1 :]
        count = counts.sum()
        if not input.is_meta and count <= 1:
            what = "batch normalization needs more than one value per channel over all ranks"
            fix = "use a larger batch or evaluation mode"
            raise ValueError(explain(what, value=tuple(input.shape), fix=fix))
        mean = (counts * means).sum(0) / count
        variance = (squares.sum(0) + (counts * (means - mean) ** 2).sum(0)) / count
        scale, shift = (None if each is None else each.to(wide) for each in (weight, bias))
        means, variances = (_of_channels(each, channels_of_group) for each in (mean, variance))
        output = F.batch_norm(x, means, variances, scale, shift, False, 0.0, eps) if per_channel else x
        ctx.save_for_backward(input, weight, mean, variance, count)
        ctx.collectives, ctx.has_bias, ctx.eps, ctx.channels_of_group = (
            collectives,
            bias is not None,
            eps,
            channels_of_group,
        )
        ctx.weight_of_rank = weight_of_rank
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, gradient: Tensor, *_: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        input, weight, mean, variance, count = ctx.saved_tensors
        x, dy = input.to(mean.dtype), gradient.to(mean.dtype)
        mean, variance = (_of_channels(each, ctx.channels_of_group) for each in (mean, variance))
        inverse = torch.rsqrt(variance + ctx.eps)
        sum_dy_normal, sum_dy = _sums(dy, x, mean, variance, ctx.eps)
        d_weight = sum_dy_normal.to(weight.dtype) if weight is not None else None
        d_bias = sum_dy.to(weight.dtype) if ctx.has_bias else None
        if not ctx.needs_input_grad[0]:
            # All ranks skip the collective alike: whether the input needs a gradient depends on the model only.
            return None, d_weight, d_bias, None, None, None, None
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        sums = torch.stack([scale * sum_dy, scale * sum_dy_normal]).view(2, -1, ctx.channels_of_group).sum(2)
        if ctx.weight_of_rank != 1.0:
            sums.mul_(ctx.weight_of_rank)
        ctx.collectives[1](sums)
        # This rank's gradients are weighted later, so what they share with those of other ranks is divided by the weight here.
        mean_dy, mean_dy_normal = _of_channels(sums / count / ctx.weight_of_rank, ctx.channels_of_group)
        shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
        of_x = -inverse * inverse * mean_dy_normal
        # The mean is taken off first: a large one would take the digits of what is left.
        dx = torch.addcmul((-inverse * mean_dy).view(shape), x - mean.view(shape), of_x.view(shape))
        dx.addcmul_(dy, (inverse * scale).view(shape))
        return dx.to(input.dtype), d_weight, d_bias, None, None, None, None


def _of_channels(of_groups: Tensor, channels_of_group: int) -> Tensor:
    return of_groups if channels_of_group == 1 else of_groups.repeat_interleave(channels_of_group, dim=-1)


def _sums(dy: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sums of ``dy * (x - mean) / deviation`` and of ``dy`` over all but the channels."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    one = torch.ones_like(mean)
    mask = [False, True, True]
    found = torch.ops.aten.native_batch_norm_backward(dy, x, one, mean, variance, None, None, False, eps, mask)
    return found[1], found[2]


def normalize(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    collectives: Collectives,
    channels_of_group: int = 1,
    weight_of_rank: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize (N, C, ...) by the statistics of all ranks, which every rank must call; differentiable.

    Args:
        weight, bias: (C,), or None.
        collectives: how statistics of the ranks are combined.
        channels_of_group: neighbouring channels that have their statistics in common.
        weight_of_rank: how much this rank's gradients count; see [Note: unequal parts] in registry.py.

    Returns:
        The normalized input; the means and the variances (without Bessel's correction) of the groups of channels; the number
        of values that each of these was made from.

    Raises:
        ValueError: that number is 1 or less.
    """
    return _Normalize.apply(  # type: ignore[no-any-return,no-untyped-call]
        input, weight, bias, eps, collectives, channels_of_group, weight_of_rank
    )


@torch.no_grad()
def update_running(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, variance: Tensor, count: Tensor, rate: float
) -> None:
    """Move running statistics, where there are some, toward those that ``normalize`` returned, as PyTorch does."""
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), rate)
        running_var.lerp_((variance * (count / (count - 1.0))).to(running_var.dtype), rate)
