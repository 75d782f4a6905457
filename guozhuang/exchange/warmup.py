"""Uses one gradient exchange in the first steps and another exchange after them, of gradients or of weights.

Formula and error: those of the exchange in use. Lossy methods do best once the first, large changes of the weights are over;
1-bit Adam and PowerSGD need a warm-up.
Source: Tang et al. 2021, arXiv:2102.02888 (1-bit Adam's warm-up); PyTorch's ``start_powerSGD_iter``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from ..weights.flat import Named
from .around import AroundGradients, AroundWeights
from .average import Average
from .base import GradientExchange, Work, check_saved
from .weights import WeightExchange


@dataclass(frozen=True)
class Warmup(AroundGradients[tuple[Any, Any, int]], inner="then"):
    """Exchanges gradients through ``first`` for ``steps`` steps, then through ``then``.

    Its state holds the states of both, and the number of ranks. ``traffic`` is that of a step after the warm-up.

    Args:
        steps: how many synchronized backward passes ``first`` serves; optimizer steps if ``WeightWarmup`` made this object.
        first: usually ``AllReduce()``.
        then: the exchange after the warm-up.
        restarts: whether ``then`` counts its steps from the end of the warm-up.

    Raises:
        UsageError: a negative number of steps, or one exchange gives a mean and the other one does not, as ``Adasum``.
    """

    steps: int
    first: GradientExchange[Any]
    then: GradientExchange[Any]
    restarts: bool = False

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise UsageError(explain("steps is a count, at least 0", value=self.steps))
        for each in (self.first, self.then):
            if not isinstance(each, GradientExchange):
                fix = "WeightWarmup(steps, AllReduce(), ...) is followed by an exchange of weights"
                raise UsageError(explain("Warmup takes two exchanges of gradients", value=each, fix=fix))
        # The reducer asks once for all steps. Inside of nodes, to which WeightWarmup may lead, ``join`` has no effect anyway.
        if self.first.averages != self.then.averages and not self.restarts:
            what = "one of these exchanges gives a mean and the other one does not, and join() takes all steps of a model alike"
            fix = "take two that give a mean, such as AllReduce() and PowerSGD(), or leave the warm-up out"
            raise UsageError(explain(what, value=f"{self.first} and {self.then}", fix=fix))

    @property
    @override
    def one_round(self) -> bool:
        return self.first.one_round and self.then.one_round

    @override
    def input_scale(self, world_size: int) -> float:
        return 1.0  # start() applies the scale of the exchange in use

    @override
    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: tuple[Any, Any, int] | None = None
    ) -> tuple[Any, Any, int]:
        was_first, was_then, _ = before if before is not None else (None, None, 0)
        states = self.first.prepare(buckets, group, was_first), self.then.prepare(buckets, group, was_then)
        return (*states, group.size())

    @override
    def start(self, bucket: Bucket, state: tuple[Any, Any, int], step: int) -> Work:
        chosen, its_state = (self.first, state[0]) if step < self.steps else (self.then, state[1])
        if self.restarts and step >= self.steps:
            step -= self.steps
        return chosen.scale_and_start(bucket, its_state, step, state[2])

    @override
    def state_dict(self, state: tuple[Any, Any, int]) -> dict[str, Any]:
        return {"first": self.first.state_dict(state[0]), "then": self.then.state_dict(state[1])}

    @override
    def load_state_dict(self, state: tuple[Any, Any, int], saved: Mapping[str, Any]) -> None:
        check_saved(saved, {"first", "then"}, "this warm-up")
        self.first.load_state_dict(state[0], saved["first"])
        self.then.load_state_dict(state[1], saved["then"])


@dataclass
class WeightWarmupState:
    """The state of :class:`WeightWarmup`: the arguments of ``then.prepare``, and its result once the warm-up has ended.

    Attributes:
        parameters: the parameters that are trained.
        group: the ranks.
        then: the state of the exchange of weights, made at the end of the warm-up.
        begun: whether ``then`` was made, that is, whether the warm-up is over.
    """

    parameters: Named
    group: dist.ProcessGroup
    then: Any = None
    begun: bool = False


@dataclass(frozen=True)
class WeightWarmup(AroundWeights[WeightWarmupState], inner="then"):
    """Exchanges gradients through ``first`` for ``steps`` steps, then weights through ``then``.

    Args:
        steps: how many first optimizer steps exchange gradients.
        first: the exchange of gradients, usually ``AllReduce()``.
        then: the exchange of weights after the warm-up; it counts its steps from the end of the warm-up.

    Raises:
        UsageError: ``steps`` is negative, ``first`` is no gradient exchange, or ``then`` is no weight exchange.
    """

    steps: int
    first: GradientExchange[Any]
    then: WeightExchange[Any]

    def __post_init__(self) -> None:
        if not isinstance(self.then, WeightExchange):
            fix = "Warmup(steps, first, then) is for two exchanges of gradients"
            raise UsageError(explain("WeightWarmup ends in an exchange of weights", value=self.then, fix=fix))
        Warmup(self.steps, self.first, self.first)  # only to check ``steps`` and ``first``

    @override
    def inner_state(self, state: WeightWarmupState) -> Any:
        return state.then

    @override
    def inner_acts(self, state: WeightWarmupState) -> bool:
        return state.begun

    @override
    def inner_step(self, step: int) -> int:
        return step - self.steps

    @override
    def averages_gradients(self, step: int) -> bool:
        return step < self.steps or super().averages_gradients(step)

    @override
    def averages_over_all(self, step: int) -> bool:
        return step < self.steps or super().averages_over_all(step)

    @override
    def gradients(self) -> GradientExchange[Any] | None:
        """Return ``first``, or, if ``then`` exchanges gradients too, a ``Warmup`` from ``first`` to that exchange."""
        then = self.then.gradients()
        return self.first if then is None else Warmup(self.steps, self.first, then, restarts=True)

    @override
    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> WeightWarmupState:
        """Send nothing yet: ``then`` starts from the weights at the end of the warm-up."""
        return WeightWarmupState(tuple(parameters), group)

    @override
    def before_step(self, state: WeightWarmupState, step: int) -> None:
        if step >= self.steps:
            if not state.begun:
                self._begin(state)
            super().before_step(state, step)

    @override
    def after_step(self, state: WeightWarmupState, step: int) -> None:
        if step + 1 == self.steps:  # the end of the warm-up; all ranks still make this step together
            self._begin(state)
        if step >= self.steps:
            super().after_step(state, step)

    def _begin(self, state: WeightWarmupState) -> None:
        self._average(state)  # ranks whose data ended during the warm-up made no steps, so their weights differ
        state.then = self.then.prepare(state.parameters, state.group)
        state.begun = True

    def _average(self, state: WeightWarmupState) -> None:
        average = Average()
        average.agree(average.prepare(state.parameters, state.group))

    @override
    def agree(self, state: WeightWarmupState) -> None:
        if state.begun:
            super().agree(state)
        else:
            self._average(state)

    @override
    def state_dict(self, state: WeightWarmupState) -> dict[str, Any]:
        return {"then": super().state_dict(state)} if state.begun else {}

    @override
    def load_state_dict(self, state: WeightWarmupState, saved: Mapping[str, Any]) -> None:
        if not saved:  # a checkpoint made during the warm-up holds no state of ``then``
            return
        check_saved(saved, {"then"}, "this warm-up")
        if not state.begun:
            state.then, state.begun = self.then.prepare(state.parameters, state.group), True
        super().load_state_dict(state, saved["then"])


def after_warmups(exchange: WeightExchange[Any]) -> WeightExchange[Any]:
    """Return the exchange that remains after all warm-ups: ``exchange`` without the ``WeightWarmup`` wrappers around it."""
    while isinstance(exchange, WeightWarmup):
        exchange = exchange.then
    return exchange
