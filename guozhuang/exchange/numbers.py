"""What a bucket holds, seen as numbers: real ones, and whether all of them are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..gradients.buckets import Bucket


def num_numbers(bucket: Bucket) -> int:
    """Return how many real numbers a bucket holds; a complex element is two."""
    return bucket.flat.numel() * (2 if bucket.flat.is_complex() else 1)


def numbers(bucket: Bucket) -> Tensor:
    """Return a bucket's memory as real numbers."""
    return torch.view_as_real(bucket.flat).view(-1) if bucket.flat.is_complex() else bucket.flat


def is_finite(values: Tensor) -> bool:
    """Tell whether no NaN and no infinity is there."""
    # A sum is one pass; only where it overflows or holds NaN every number is looked at.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def in_float32(values: Tensor) -> Tensor:
    """Return float64 as float32, where what is too large is infinity; all else, which float32 holds, as it is."""
    return values.to(torch.float32) if values.dtype == torch.float64 else values


def where_not_finite(bucket: Bucket, then: str = "all gradients of its bucket become NaN on all ranks") -> str:
    """Say which parameters' gradients hold NaN or infinity, in float32.

    Args:
        bucket: whose gradients are looked at.
        then: what follows, for the text.
    """
    found = []
    for name, view in zip(bucket.names, bucket.views, strict=True):
        real = torch.view_as_real(view) if view.is_complex() else view
        if not is_finite(in_float32(real)):
            found.append(name)
    return f"the gradient of {some_of(found)} holds NaN or infinity; {then}"


def some_of(names: Sequence[str]) -> str:
    """Name parameters in a message: the first, and how many more."""
    if not names:
        return "some parameter"
    return repr(names[0]) + (f" and of {len(names) - 1} more parameters" if len(names) > 1 else "")
