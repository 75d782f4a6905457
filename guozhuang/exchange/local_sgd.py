"""Mean of the weights over all ranks every H steps; in between, each rank trains alone.

Formula, with n ranks: after steps H, 2 H, ... every rank sets w <- (w_1 + ... + w_n) / n. With ``start_step`` (post-local SGD)
gradients are averaged in the first steps instead, and weights after steps start_step + H, start_step + 2 H, ...
Error: rounding only, with H = 1 and plain SGD: the mean of the weights then equals a step with the mean of the gradients.
Otherwise the ranks' weights drift apart between means, because their gradients differ. After a mean all ranks hold equal bits.
Traffic: an all-reduce of the weights every H steps, in float32 for narrower weights.
Source: local SGD, Stich 2019, arXiv:1805.09767; post-local SGD, Lin et al. 2020, arXiv:1808.07217.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from ..errors import UsageError, explain
from ..weights.flat import Named
from .average import Average, AverageState
from .weights import WeightExchange


@dataclass(frozen=True)
class LocalSGD(WeightExchange[AverageState]):
    """Averages the weights every ``every`` steps, with any optimizer. Memory: a copy of the weights.

    Args:
        every: optimizer steps between two means.
        start_step: how many first steps average gradients instead, as plain data-parallel training does.

    Raises:
        UsageError: ``every`` is below 1, or ``start_step`` below 0.
    """

    every: int
    start_step: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(explain("every is a number of optimizer steps, at least 1", value=self.every))
        if self.start_step < 0:
            raise UsageError(explain("start_step is a count, at least 0", value=self.start_step))

    @override
    def averages_gradients(self, step: int) -> bool:
        return step < self.start_step

    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> AverageState:
        """Allocate a copy of the weights; nothing is sent."""
        return Average().prepare(parameters, group)

    def before_step(self, state: AverageState, step: int) -> None:
        """Record the step's number, and that the ranks' weights may differ from now on."""
        state.step, state.settled = step, False

    @override
    def after_step(self, state: AverageState, step: int) -> None:
        past = step + 1 - self.start_step
        if past > 0 and past % self.every == 0:
            self.agree(state)

    def agree(self, state: AverageState) -> None:
        """Average the weights, unless there was no step since the last mean."""
        if not state.settled:
            Average().agree(state)
            state.settled = True

    @override
    def load_state_dict(self, state: AverageState, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(state, saved)
        state.settled = True

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float:
        """Return the bytes of a ring all-reduce divided by ``every``; each of the first ``start_step`` steps sends all."""
        return Average().traffic(num_elements, element_bytes, world_size) / self.every
