"""``GradientAllReduceAlgorithm``, and what it shares with other algorithms that exchange gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from guozhuang.exchange import AllReduce, GradientExchange
from guozhuang.exchange.hierarchical import Hierarchical
from guozhuang.exchange.total import Total

from .base import Algorithm, AlgorithmImpl


class GradientsImpl(AlgorithmImpl):
    """Exchanges gradients by one method in all steps."""

    def __init__(self, process_group: Any, exchange: GradientExchange[Any]) -> None:
        super().__init__(process_group)
        self._exchange = exchange

    @override
    def gradients(self, forward: int, optimizers: Sequence[torch.optim.Optimizer]) -> GradientExchange[Any]:
        return self._exchange


class GradientAllReduceAlgorithm(Algorithm):
    """Averages gradients exactly, as Guozhuang's strategy ``ddp``.

    Args:
        hierarchical: sum inside each node first; each rank still has equal weight, also if nodes have different sizes.
        average: False: the sum in place of the mean.
    """

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average

    @override
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return GradientsImpl(process_group, in_levels(AllReduce(), self.hierarchical, self.average))


def in_levels(exchange: GradientExchange[Any], hierarchical: bool, average: bool = True) -> GradientExchange[Any]:
    """Return the exchange between nodes after a sum inside them if ``hierarchical``; the sum over ranks if not ``average``."""
    levels = Hierarchical(AllReduce(), exchange) if hierarchical else exchange
    return levels if average else Total(levels)
