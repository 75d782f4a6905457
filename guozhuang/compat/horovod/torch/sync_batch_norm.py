"""Batch normalization over the joined batch of all ranks, on any device, with collectives that are matched by name."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

import guozhuang.sync_batch_norm

from ..common.state import required
from .handles import synchronize
from .submitting import Sum
from .verbs import allgather_async, allreduce_


class HorovodSyncBatchNorm(guozhuang.sync_batch_norm.SyncBatchNorm):
    """``torch.nn.BatchNorm`` whose statistics in training are those of all ranks together.

    In training, forward and its backward each issue one unnamed collective: every rank must call them, and in the same order.
    Ranks may have different numbers of samples, some also none; it is an error if all ranks have none.

    Args:
        num_features: C of an input of shape (N, C, ...) with any number of further dimensions.
        eps: added to the variance.
        momentum: weight of a new batch in the running statistics; None: they are the mean over all batches.
        affine: whether it has weight and bias.
        track_running_stats: whether it keeps running statistics, by which it normalizes in evaluation.

    Raises:
        ValueError: an input has fewer than two dimensions, or another number of channels, or all ranks together have only one
            value for each channel.
        HorovodInternalError: a rank is lost, or has joined.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    @override
    def _get_name(self) -> str:  # printed models show the public name
        return "SyncBatchNorm"

    @override
    def forward(self, input: Tensor) -> Tensor:  # PyTorch names this argument ``input``
        if not self.training or required().size == 1:
            return self.normalized(input, None)
        return self.normalized(
            input,
            (lambda mine: synchronize(allgather_async(mine.unsqueeze(0))), lambda sums: allreduce_(sums, op=Sum)),
        )


SyncBatchNorm = HorovodSyncBatchNorm
