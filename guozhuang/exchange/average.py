"""Blocking mean of the weights over all ranks, used by local SGD and other methods.

Formula, with n ranks: w <- (w_1 + ... + w_n) / n, in float32 (float64 where weights are).
Error: the rounding of n additions; weights narrower than float32 are also rounded once, at the end. All ranks get equal bits.
Traffic: an all-reduce of the weights; weights narrower than float32 are sent as float32.
Source: parameter averaging, Zinkevich et al. 2010, Parallelized Stochastic Gradient Descent (NIPS).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..weights.flat import FlatWeights, Named, as_real
from .weight_lane import NotFinite, mean
from .weights import WeightExchange


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights of ``dtype`` are averaged."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class AverageState:
    """The group, the parameters and the buffers of an :class:`Average`.

    Attributes:
        group: the ranks.
        weights: the parameters, one entry for each dtype in which a mean is computed.
        flats: flat copies of the weights, per entry, which are all-reduced; empty for one rank.
        not_finite: per entry, logs which weights hold NaN or infinity.
        step: the number of the last step, for that log.
        settled: whether the weights are known to be equal on all ranks; ``LocalSGD`` then skips the mean.
    """

    group: dist.ProcessGroup
    weights: list[FlatWeights]
    flats: list[list[Tensor]]
    not_finite: list[NotFinite] = field(default_factory=list)
    step: int = 0
    settled: bool = True


@dataclass(frozen=True)
class Average(WeightExchange[AverageState]):
    """Mean of the weights after every step; less often with ``Every(H, Average())``. Memory: a copy of the weights."""

    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> AverageState:
        """Allocate flat copies of the weights; nothing is sent."""
        real = as_real(parameters)
        kinds = sorted({wide(p.dtype) for _, p in real}, key=str)
        weights = [FlatWeights([(n, p) for n, p in real if wide(p.dtype) == kind], kind) for kind in kinds]
        flats = [each.empty() for each in weights] if group.size() > 1 else []
        return AverageState(group, weights, flats, [NotFinite() for _ in weights])

    @override
    def before_step(self, state: AverageState, step: int) -> None:
        state.step = step

    @override
    def after_step(self, state: AverageState, step: int) -> None:
        self.agree(state)

    @override
    def agree(self, state: AverageState) -> None:
        if state.group.size() == 1:
            return
        for weights, flats, not_finite in zip(state.weights, state.flats, state.not_finite, strict=True):
            weights.read(flats)
            not_finite.look(weights, flats, state.step)
        mean([flat for flats in state.flats for flat in flats], state.group)
        for weights, flats in zip(state.weights, state.flats, strict=True):
            weights.write(flats)

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float:
        """Return the bytes of a ring all-reduce, with at least 4 bytes per element."""
        return 2 * (world_size - 1) * num_elements * max(4, element_bytes) / world_size
