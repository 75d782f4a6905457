"""``NoiseScale``: measures how noisy gradients are while another exchange averages them, for the norms that it sees anyway.

Formula, with g_r the gradient of rank r on b samples, g their mean over n ranks, and means over ranks and steps: the squared
norm of the true gradient is G = (n |g|^2 - mean |g_r|^2) / (n - 1), the sum of the variances of one sample's gradient is
S = (mean |g_r|^2 - |g|^2) b / (1 - 1/n), both without bias, and the noise scale is S / G, in samples. With a batch of that
size a step makes half the progress of one with the true gradient, and training takes twice the samples that it needs at least:
larger ones cost more samples than they save steps. The two norms are averaged over steps before they are divided.
Error: none, gradients are what the inner exchange makes them.
Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, arXiv:1812.06162, appendix A.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..cost.laws import noise_scale_of
from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from .allreduce import AllReduce
from .around import AroundGradients
from .base import GradientExchange, Then, Work


class NoiseMeter:
    """Averages the squared norms of gradients over steps, and tells the gradient noise scale.

    Args:
        smoothing: the share of the earlier mean that is kept in each measured step, from 0 to below 1.
        every: measures one step of so many.

    Attributes:
        is_on: whether steps are measured at all; False costs nothing.
        num_steps: number of measured steps.

    Raises:
        UsageError: a value is out of its range.
    """

    def __init__(self, smoothing: float = 0.95, every: int = 1) -> None:
        if not 0.0 <= smoothing < 1.0 or every < 1:
            what = "smoothing is at least 0 and below 1, and every is a count of steps of at least 1"
            raise UsageError(explain(what, value=f"smoothing={smoothing}, every={every}", fix="give 0.95 and 1"))
        self.smoothing, self.every, self.is_on, self.num_steps = smoothing, every, True, 0
        self._mean = torch.zeros(2, dtype=torch.float64)
        self._group: dist.ProcessGroup | None = None

    def add(self, own: Tensor, averaged: Tensor, group: dist.ProcessGroup) -> None:
        """Take up a step: the squared norms of this rank's gradient and of the average. Not collective."""
        now = torch.stack([own, averaged]).double()
        self._mean = now + (self._mean.to(now.device) - now) * self.smoothing
        self.num_steps, self._group = self.num_steps + 1, group

    def noise_scale(self, batch_size: int) -> float | None:
        """Return the gradient noise scale in samples. Every rank must call it.

        Args:
            batch_size: samples behind one rank's gradient of a step, all its backwards together.

        Returns:
            The noise scale; infinity where the noise hides the gradient, so that a larger batch pays in any case; None with one
            rank, without a measured step, or if a gradient was not finite.
        """
        if self._group is None or self._group.size() == 1:
            return None
        n = self._group.size()
        found = (self._mean / (1.0 - self.smoothing**self.num_steps)).clone()
        dist.all_reduce(found, group=self._group)
        own, averaged = (found / n).tolist()
        return noise_scale_of(own, averaged, n, batch_size)


@dataclass
class _NoiseState:
    """The inner exchange's state, and the squared norms that the present step has shown so far."""

    inner: Any
    group: dist.ProcessGroup
    num_buckets: int
    norms: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class NoiseScale(AroundGradients[_NoiseState]):
    """Lets another exchange average gradients, and hands their norms before and after to a :class:`NoiseMeter`.

    A measured step reads each bucket twice more. Sparse gradients are left out.

    Args:
        inner: averages gradients exactly, at least nearly so: the error of a code counts as noise.
        meter: takes up the norms; ``meter.noise_scale(batch_size)`` tells the result.
    """

    inner: GradientExchange[Any] = field(default_factory=AllReduce)
    meter: NoiseMeter = field(default_factory=NoiseMeter, compare=False)

    @property
    @override
    def repeatable(self) -> bool:
        return False  # a bucket that is sent again would be counted twice

    @override
    def inner_state(self, state: _NoiseState) -> Any:
        return state.inner

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: _NoiseState | None = None
    ) -> _NoiseState:
        inner = self.inner.prepare(buckets, group, None if before is None else before.inner)
        return _NoiseState(inner, group, sum(not bucket.sparse for bucket in buckets))

    @override
    def start(self, bucket: Bucket, state: _NoiseState, step: int) -> Work:
        if not self.meter.is_on or step % self.meter.every:
            return self.inner.start(bucket, state.inner, step)
        # What arrives was multiplied already, so that a sum is a mean.
        own = _norm(bucket) / self.inner.input_scale(state.group.size())
        work = self.inner.start(bucket, state.inner, step)
        return Then(work, lambda: self._note(bucket, own, state))

    def _note(self, bucket: Bucket, own: Tensor, state: _NoiseState) -> None:
        state.norms.append((own, _norm(bucket)))
        if len(state.norms) == state.num_buckets:
            mine, averaged = (torch.stack(some).double().square().sum() for some in zip(*state.norms, strict=True))
            self.meter.add(mine, averaged, state.group)
            state.norms.clear()


def _norm(bucket: Bucket) -> Tensor:
    flat = bucket.flat  # in float16 the norm of many elements would overflow
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
    return norm
