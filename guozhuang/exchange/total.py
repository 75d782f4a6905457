"""Sum of the gradients over all ranks in place of their mean.

Formula: ``inner`` gets n g_r from each rank r of n, so its mean is the sum of the g_r. Error and traffic: those of ``inner``;
float16 overflows if the sum does.
Source: the option ``average=False`` of Bagua (Gan et al. 2021, arXiv:2107.01499).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from ..gradients.buckets import Bucket
from .around import AroundGradients
from .base import GradientExchange, Work


@dataclass(frozen=True)
class Total(AroundGradients[Any]):
    """Gives the sum over ranks in place of the mean.

    Args:
        inner: an exchange that averages.
    """

    inner: GradientExchange[Any]

    @property
    @override
    def averages(self) -> bool:
        return False

    @property
    @override
    def sums(self) -> bool:
        return True

    @override
    def input_scale(self, world_size: int) -> float:
        return world_size * self.inner.input_scale(world_size)

    @override
    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: Any = None) -> Any:
        return self.inner.prepare(buckets, group, before)

    @override
    def start(self, bucket: Bucket, state: Any, step: int) -> Work:
        return self.inner.start(bucket, state, step)
