"""Functions on the values of a bucket: a view as real numbers, checks of the dtype, and searches for NaN and infinity."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket

_log = logging.getLogger("guozhuang")


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
    # The sum needs a single pass over the values; each value is checked only if the sum is not finite.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def in_float32(values: Tensor) -> Tensor:
    """Return float64 values as float32, where too large ones become infinity; return values of other dtypes unchanged."""
    return values.to(torch.float32) if values.dtype == torch.float64 else values


def warn_unless_finite(bucket: Bucket, values: Tensor, step: int, rank: int, then: str) -> bool:
    """Log a warning that names the parameters whose gradients hold NaN or infinity, if any; return whether all are finite.

    Args:
        bucket: holds the gradients, which are searched by parameter, as float32, if ``values`` are not finite.
        values: the same gradients, or a part of them, as the method computes with them.
        step: the number of the step, for the text.
        rank: this rank, for the text.
        then: the consequence, with which the text ends.
    """
    if is_finite(values):
        return True
    found = []
    for name, view in zip(bucket.names, bucket.views, strict=True):
        real = torch.view_as_real(view) if view.is_complex() else view
        if not is_finite(in_float32(real)):
            found.append(name)
    what = f"step {step}: the gradient of {some_of(found)} holds NaN or infinity; {then}"
    _log.warning("%s", explain(what, rank=rank))
    return False


def some_of(names: Sequence[str]) -> str:
    """Return a text that names the first parameter and says how many more there are."""
    if not names:
        return "some parameter"
    return repr(names[0]) + (f" and of {len(names) - 1} more parameters" if len(names) > 1 else "")
