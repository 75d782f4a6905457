"""Wraps a weight exchange so that it acts in every k-th optimizer step only.

Formula: the inner exchange acts in steps k-1, 2k-1, ... (counted from 0), which it counts as its own steps 0, 1, ...
Error: that of the inner exchange, plus the drift of the ranks apart during k steps. Traffic: 1/k of the inner exchange's.
Source: the interval of local SGD (Stich 2019, arXiv:1805.09767), for any exchange of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from ..errors import UsageError, explain
from ..weights.flat import Named
from .around import AroundWeights
from .base import GradientExchange
from .warmup import after_warmups
from .weight_hierarchical import WeightHierarchical
from .weights import WeightExchange


@dataclass(frozen=True)
class Every(AroundWeights[Any]):
    """Lets ``inner`` act in every ``steps``-th optimizer step; ranks train alone in between. The state is that of ``inner``.

    Args:
        steps: optimizer steps from one exchange to the next, at least 1.
        inner: the exchange of weights, e.g. ``Average()``.

    Raises:
        UsageError: ``steps`` is below 1, or ``inner`` exchanges gradients, has its own ``every``, or is hierarchical.
    """

    steps: int
    inner: WeightExchange[Any]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(explain("the interval is a number of optimizer steps, at least 1", value=self.steps))
        if isinstance(self.inner, GradientExchange):
            what = "gradients that are exchanged in some steps only would let the ranks' weights drift apart for good"
            fix = "accumulate with no_sync(), or exchange weights: LocalSGD(every=...), Every(k, Average())"
            raise UsageError(explain(what, value=self.inner, fix=fix))
        if not isinstance(self.inner, WeightExchange):
            raise UsageError(explain("Every takes a WeightExchange", value=self.inner, fix="e.g. Every(8, Average())"))
        if hasattr(self.inner, "every"):
            what = "the inner exchange counts steps itself"
            raise UsageError(explain(what, value=self.inner, fix="choose its interval with its option `every`"))
        if isinstance(after_warmups(self.inner), WeightHierarchical):
            what = "the ranks of a node act in every step; only what acts between nodes may leave some out"
            fix = "put Every inside: WeightHierarchical(AllReduce(), Every(8, Average()))"
            raise UsageError(explain(what, value=self.inner, fix=fix))

    @override
    def inner_step(self, step: int) -> int:
        return step // self.steps

    @override
    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> Any:
        return self.inner.prepare(parameters, group)

    @override
    def before_step(self, state: Any, step: int) -> None:
        if (step + 1) % self.steps == 0:
            super().before_step(state, step)

    @override
    def after_step(self, state: Any, step: int) -> None:
        if (step + 1) % self.steps == 0:
            super().after_step(state, step)

    @override
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float | None:
        inner = self.inner.traffic(num_elements, element_bytes, world_size)
        return None if inner is None else inner / self.steps
