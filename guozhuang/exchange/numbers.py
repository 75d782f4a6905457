"""The memory of a bucket as real numbers; checks of their kind, and whether all of them are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket


def check_floating_point(buckets: Sequence[Bucket], who: str, takes_complex: bool = True) -> None:
    """Refuse gradients that an exchange cannot express.

    Args:
        buckets: all buckets of a layout.
        who: the exchange, for the text of the error.
        takes_complex: whether complex gradients are served too, as two real numbers each.

    Raises:
        UsageError: the gradients of a bucket are no floating-point numbers; the text names its first parameter.
    """
    for bucket in buckets:
        if not (bucket.flat.is_floating_point() or (takes_complex and bucket.flat.is_complex())):
            what = f"{who} takes {'' if takes_complex else 'real '}floating-point gradients, not {bucket.flat.dtype}"
            raise UsageError(explain(what, value=bucket.names[0], fix="exchange such a model with ddp"))


def num_numbers(bucket: Bucket) -> int:
    """Return how many real numbers a bucket holds; a complex element is two."""
    return bucket.flat.numel() * (2 if bucket.flat.is_complex() else 1)


def numbers(bucket: Bucket) -> Tensor:
    """Return a bucket's memory as real numbers."""
    return torch.view_as_real(bucket.flat).view(-1) if bucket.flat.is_complex() else bucket.flat


def is_finite(values: Tensor) -> bool:
    """Tell whether all values are finite: no NaN, no infinity."""
    # A sum is one pass; only where it overflows or holds NaN every number is looked at.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def in_float32(values: Tensor) -> Tensor:
    """Return float64 values as float32, too large ones as infinity; values of other dtypes, which float32 holds, unchanged."""
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
