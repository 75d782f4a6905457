"""Normalization of divided images: statistics are those of the whole image, over all ranks of the region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...sync_batch_norm import collectives_of, normalize, update_running
from ..activations.tensor import DividedTensor
from .region import handles_rows


@handles_rows("batch_norm")
def _batch_norm(
    func: Any, input: Any, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    # The operation of the same name in torch itself takes its arguments in another order.
    if not isinstance(input, DividedTensor) or input.at < 2 or func is not F.batch_norm:
        return NotImplemented
    if not training:
        return input.like(F.batch_norm(input.local, running_mean, running_var, weight, bias, False, momentum, eps))
    local, mean, variance, count = normalize(input.local, weight, bias, eps, collectives_of(input.place.ranks.group))
    update_running(running_mean, running_var, mean, variance, count, momentum)
    return input.like(local)


def _by_groups(
    input: DividedTensor, weight: Tensor | None, bias: Tensor | None, eps: float, channels_of_group: int
) -> DividedTensor:
    """Normalize each group of channels of each sample: the samples' channels are the channels of one large sample."""
    local = input.local
    num = local.shape[0]
    weight, bias = (None if each is None else each.repeat(num) for each in (weight, bias))
    one = local.reshape(1, num * local.shape[1], *local.shape[2:])
    found, *_ = normalize(one, weight, bias, eps, collectives_of(input.place.ranks.group), channels_of_group)
    return input.like(found.view(local.shape))


@handles_rows("group_norm")
def _group_norm(
    func: Any, input: Any, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *_: Any,
) -> Any:  # fmt: skip
    if not isinstance(input, DividedTensor) or input.at < 2 or input.shape[1] % num_groups or not input.numel():
        return NotImplemented
    return _by_groups(input, weight, bias, eps, input.shape[1] // num_groups)


@handles_rows("instance_norm")
def _instance_norm(
    func: Any, input: Any, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    if not isinstance(input, DividedTensor) or input.at < 2 or func is not F.instance_norm or not input.numel():
        return NotImplemented
    if not use_input_stats:
        return _batch_norm(F.batch_norm, input, running_mean, running_var, weight, bias, False, momentum, eps)
    return NotImplemented if running_mean is not None else _by_groups(input, weight, bias, eps, 1)


@handles_rows("layer_norm")
def _layer_norm(
    func: Any, input: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    if not isinstance(input, DividedTensor):
        return NotImplemented
    first = input.dim() - len(normalized_shape)
    if input.at < first or first < 1 or not input.numel() or tuple(input.shape[first:]) != tuple(normalized_shape):
        return NotImplemented
    samples = input.like(input.local.flatten(0, first - 1).unsqueeze(1), input.at - first + 2)
    normal = _by_groups(samples, None, None, eps, 1)
    found: Tensor = input.like(normal.local.view(input.local.shape))
    found = found if weight is None else found * weight
    return (found if bias is None else found + bias).to(input.dtype)  # under autocast the weight may be wider
