"""Tensors as one flat tensor, and back; and the mean of a value over the last seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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


class StatisticalAverage:
    """The mean of a value over the last seconds: of the last one, two, four and so on, and of all.

    Args:
        last_update_time: when the value was recorded last, in seconds since 1970; None: now.
        records: the means over the last 1, 2, 4, ... seconds before that time.
        record_tail: how many seconds were recorded beyond the longest of these, and the mean over all seconds.
    """

    def __init__(
        self,
        last_update_time: float | None = None,
        records: Sequence[float] = (),
        record_tail: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.last_update_time = time.time() if last_update_time is None else last_update_time
        self.records, self.record_tail = list(records), record_tail

    def record_seconds(self) -> float:
        """Return the longest time of which ``records`` has a mean, in seconds."""
        return 2.0 ** (len(self.records) - 1) if self.records else 0.0

    def total_recording_time(self) -> float:
        """Return how many seconds were recorded in all."""
        return self.record_seconds() + self.record_tail[0]

    def get_records_mean(self, last_n_seconds: float) -> float:
        """Return the mean over so many seconds before the last record; a straight line between two known means; 0 for none."""
        if last_n_seconds <= 0:
            return 0.0
        seconds, means = [2.0**i for i in range(len(self.records))], list(self.records)
        if self.record_tail[0] > 0 or not means:
            seconds.append(self.total_recording_time())
            means.append(self.record_tail[1])
        return float(np.interp(last_n_seconds, seconds, means))

    def record(self, val: float) -> None:
        """Record that the value was ``val`` since the last record."""
        now = time.time()
        passed_s = now - self.last_update_time
        total_s = passed_s + self.total_recording_time()

        def mean(over_s: float) -> float:
            earlier_s = over_s - passed_s
            return val if earlier_s <= 0 else (val * passed_s + self.get_records_mean(earlier_s) * earlier_s) / over_s

        records: list[float] = []
        while 2.0 ** len(records) <= total_s:
            records.append(mean(2.0 ** len(records)))
        tail = mean(total_s) if total_s > 0 else val
        self.last_update_time, self.records = now, records
        self.record_tail = total_s - self.record_seconds(), tail

    def get(self, last_n_seconds: float) -> float:
        """Return the mean over the last seconds; what passed since the last record counts for nothing."""
        passed_s = time.time() - self.last_update_time
        if last_n_seconds <= passed_s:
            return self.records[0] if self.records else self.record_tail[1]
        return self.get_records_mean(last_n_seconds - passed_s)

    def __str__(self) -> str:
        return str(vars(self))
