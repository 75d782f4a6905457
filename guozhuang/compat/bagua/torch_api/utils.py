"""Tensors as one flat tensor, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new 1-dimensional tensor of the values of tensors of one dtype."""
    flat: Tensor = _flatten_dense_tensors(tuple(tensors))
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor with the shapes of ``tensors``, one behind the other."""
    return list(_unflatten_dense_tensors(flat, tuple(tensors)))


def apply_flattened_call(
    bucket: Sequence[Tensor], call: Callable[..., object], extra_args: Sequence[Any] | None = None
) -> None:
    """Call a function, which changes its argument in place, with the tensors as one, and write the values back.

    Args:
        bucket: tensors of one dtype.
        call: the function; after ``torch.distributed.all_reduce`` the values are divided by the number of ranks.
        extra_args: further arguments of the function.
    """
    flat = flatten([tensor.detach() for tensor in bucket])
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, part in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.detach().copy_(part)
