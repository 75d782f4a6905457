"""Functions on the values of a bucket: a view as real numbers, checks of the dtype, and searches for NaN and infinity."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket


def check_floating_point(buckets: Sequence[Bucket], who: str, takes_complex: bool = True) -> None:
    """Raise if an exchange does not support the dtype of some gradients.

    Args:
        buckets: all buckets of a layout.
        who: the name of the exchange, for the error text.
        takes_complex: whether the exchange also supports complex gradients, as two real numbers each.

    Raises:
        UsageError: the dtype of a bucket is not supported; the text names the bucket's first parameter.
    """
    for bucket in buckets:
        if not (bucket.flat.is_floating_point() or (takes_complex and bucket.flat.is_complex())):
            what = f"{who} takes {'' if takes_complex else 'real '}floating-point gradients, not {bucket.flat.dtype}"
            raise UsageError(explain(what, value=bucket.names[0], fix="exchange such a model with ddp"))


def num_numbers(bucket: Bucket) -> int:
    """Return how many real numbers a bucket holds; a complex element is two."""
    return bucket.flat.numel() * (2 if bucket.flat.is_complex() else 1)


def numbers(bucket: Bucket) -> Tensor:
    """Return a flat view of a bucket's gradients as real numbers."""
    return torch.view_as_real(bucket.flat).view(-1) if bucket.flat.is_complex() else bucket.flat


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite: no NaN, no infinity."""
    # The sum needs a single pass; only if it is not finite is every value checked.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def in_float32(values: Tensor) -> Tensor:
    """Return float64 values as float32, where too large ones become infinity; return values of other dtypes unchanged."""
    return values.to(torch.float32) if values.dtype == torch.float64 else values


def where_not_finite(bucket: Bucket, then: str = "all gradients of its bucket become NaN on all ranks") -> str:
    """Return a sentence that names the parameters whose gradients, as float32, hold NaN or infinity.

    Args:
        bucket: holds the gradients that are checked.
        then: the consequence, with which the sentence ends.
    """
    found = []
    for name, view in zip(bucket.names, bucket.views, strict=True):
        real = torch.view_as_real(view) if view.is_complex() else view
        if not is_finite(in_float32(real)):
            found.append(name)
    return f"the gradient of {some_of(found)} holds NaN or infinity; {then}"


def some_of(names: Sequence[str]) -> str:
    """Return a text that names the first parameter and says how many more there are."""
    if not names:
        return "some parameter"
    return repr(names[0]) + (f" and of {len(names) - 1} more parameters" if len(names) > 1 else "")
