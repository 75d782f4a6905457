"""What a bucket holds, seen as numbers: real ones, and whether all of them are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buckets import Bucket


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


def where_not_finite(bucket: Bucket) -> str:
    """Say which parameters' gradients hold NaN or infinity; a lossy code cannot carry them."""
    names = [name for name, view in zip(bucket.names, bucket.views, strict=True) if not bool(view.isfinite().all())]
    more = f" and of {len(names) - 1} more parameters" if len(names) > 1 else ""
    return f"the gradient of {names[0]!r}{more} holds NaN or infinity; all ranks get NaN for the parts with it"
