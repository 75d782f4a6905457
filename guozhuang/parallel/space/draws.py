"""Random operations on divided images: every rank draws what one process draws for the whole image, and takes its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tensor import SpaceTensor, handles, refuse_change, why_lost


def _own(like: SpaceTensor, drawn: Tensor) -> SpaceTensor:
    """Return this rank's rows of what was drawn for the whole image, where its size along the rows is not 1."""
    start, stop = like.span
    return like.like(drawn.narrow(like.at, start, stop - start).clone())


@handles("rand_like", "randn_like", "randint_like")
def _draw_like(func: Any, input: SpaceTensor, *args: Any, **kwargs: Any) -> Any:
    return _own(input, func(torch.empty(input.shape, dtype=input.dtype, device=input.device), *args, **kwargs))


@handles("dropout", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
def _dropout(func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Drop what one process drops: the same operation on a whole tensor of ones says by how much each element is multiplied."""
    if not isinstance(input, SpaceTensor):
        return NotImplemented
    if not training or p == 0.0:
        return input
    if "alpha" in func.__name__:
        return NotImplemented
    kept = func(torch.ones(input.shape, dtype=input.dtype, device=input.device), p, training)
    if inplace and why_lost(input.local):
        refuse_change(input)
    found = input.local * _own(input, kept).local
    return input.like(input.local.copy_(found) if inplace else found)
