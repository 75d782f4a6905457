"""One exchange for the first steps, another one after them: of gradients, or of gradients and then of weights.

Formula and error: those of the one in use. Methods that lose something do best once the first, large changes are over; 1-bit
Adam and PowerSGD need it.
Source: Tang et al. 2021, arXiv:2102.02888 (1-bit Adam's warm-up); PyTorch's ``start_powerSGD_iter``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from ..weights.flat import Named
from .average import Average
from .base import GradientExchange, Work
from .weights import WeightExchange


@dataclass(frozen=True)
class Warmup(GradientExchange[tuple[Any, Any, int]]):
    """``first`` for so many steps, then ``then``. Its state: those of both, and the number of ranks.

    Args:
        steps: how many synchronized backward passes ``first`` serves; optimizer steps where ``WeightWarmup`` made this.
        first: usually ``AllReduce()``.
        then: what follows.
        restarts: whether ``then`` counts its steps from the end of the warm-up.

    Raises:
        UsageError: a negative number of steps.
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

    @property
    def one_round(self) -> bool:
        """True if both are."""
        return self.first.one_round and self.then.one_round

    @property
    def averages(self) -> bool:
        """As what follows the warm-up."""
        return self.then.averages

    def prepare(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, before: tuple[Any, Any, int] | None = None
    ) -> tuple[Any, Any, int]:
        """Prepare both."""
        was_first, was_then, _ = before if before is not None else (None, None, 0)
        states = self.first.prepare(buckets, group, was_first), self.then.prepare(buckets, group, was_then)
        return (*states, group.size())

    def start(self, bucket: Bucket, state: tuple[Any, Any, int], step: int) -> Work:
        """Start the one whose turn it is."""
        chosen, its_state = (self.first, state[0]) if step < self.steps else (self.then, state[1])
        if self.restarts and step >= self.steps:
            step -= self.steps
        scale = chosen.input_scale(state[2])
        if scale != 1.0:
            bucket.flat.mul_(scale)
        return chosen.start(bucket, its_state, step)

    def state_dict(self, state: tuple[Any, Any, int]) -> dict[str, Any]:
        """Return those of both."""
        return {"first": self.first.state_dict(state[0]), "then": self.then.state_dict(state[1])}

    def load_state_dict(self, state: tuple[Any, Any, int], saved: Mapping[str, Any]) -> None:
        """Hand it to both."""
        if saved.keys() != {"first", "then"}:
            what = "the checkpoint was saved without this warm-up"
            raise UsageError(explain(what, value=sorted(saved), fix="choose the exchange that it was saved with"))
        self.first.load_state_dict(state[0], saved["first"])
        self.then.load_state_dict(state[1], saved["then"])

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> int | None:
        """Return what a step after the warm-up sends."""
        return self.then.traffic(num_elements, element_bytes, world_size)


@dataclass
class WeightWarmupState:
    """What is known before the warm-up ends, and what follows it.

    Attributes:
        parameters: those that are trained.
        group: the ranks.
        then: the state of the exchange of weights, made at the end of the warm-up.
        begun: whether it was made.
    """

    parameters: Named
    group: dist.ProcessGroup
    then: Any = None
    begun: bool = False


@dataclass(frozen=True)
class WeightWarmup(WeightExchange[WeightWarmupState]):
    """Gradients through ``first`` for so many steps, then weights through ``then``.

    Args:
        steps: how many first optimizer steps have their gradients exchanged.
        first: what gradients go through, usually ``AllReduce()``.
        then: what follows. It counts its steps from the end of the warm-up.

    Raises:
        UsageError: a negative number of steps, or exchanges of the wrong kind.
    """

    steps: int
    first: GradientExchange[Any]
    then: WeightExchange[Any]

    def __post_init__(self) -> None:
        if not isinstance(self.then, WeightExchange):
            fix = "Warmup(steps, first, then) is for two exchanges of gradients"
            raise UsageError(explain("WeightWarmup ends in an exchange of weights", value=self.then, fix=fix))
        Warmup(self.steps, self.first, self.first)  # checks the rest

    @property
    def in_step(self) -> bool:
        """As ``then``; in the warm-up gradients keep the ranks in step."""
        return self.then.in_step

    def averages_gradients(self, step: int) -> bool:
        """Tell whether it is the warm-up, or ``then`` does."""
        return step < self.steps or self.then.averages_gradients(step - self.steps)

    def averages_over_all(self, step: int) -> bool:
        """Tell whether it is the warm-up, or ``then`` does."""
        return step < self.steps or self.then.averages_over_all(step - self.steps)

    def gradients(self) -> GradientExchange[Any] | None:
        """Return ``first``; where ``then`` has one of its own, that after it."""
        then = self.then.gradients()
        return self.first if then is None else Warmup(self.steps, self.first, then, restarts=True)

    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> WeightWarmupState:
        """Nothing yet: ``then`` starts from the weights at the end of the warm-up."""
        return WeightWarmupState(tuple(parameters), group)

    def miss_step(self, state: WeightWarmupState, step: int) -> None:
        """Tell ``then``, after the warm-up."""
        if state.begun:
            self.then.miss_step(state.then, step - self.steps)

    def before_step(self, state: WeightWarmupState, step: int) -> None:
        """Let ``then`` act, after the warm-up."""
        if step >= self.steps:
            if not state.begun:
                self._begin(state)
            self.then.before_step(state.then, step - self.steps)

    def after_step(self, state: WeightWarmupState, step: int) -> None:
        """Let ``then`` act, after the warm-up; at its end, where all ranks are still in step, begin."""
        if step + 1 == self.steps:
            self._begin(state)
        if step >= self.steps:
            self.then.after_step(state.then, step - self.steps)

    def _begin(self, state: WeightWarmupState) -> None:
        self._average(state)  # ranks whose data had ended during the warm-up made no steps
        state.then = self.then.prepare(state.parameters, state.group)
        state.begun = True

    def rest(self, state: WeightWarmupState) -> None:
        """Let ``then`` rest, after the warm-up."""
        if state.begun:
            self.then.rest(state.then)

    def _average(self, state: WeightWarmupState) -> None:
        average = Average()
        average.agree(average.prepare(state.parameters, state.group))

    def agree(self, state: WeightWarmupState) -> None:
        """Let ``then`` agree; in the warm-up, average."""
        if state.begun:
            self.then.agree(state.then)
        else:
            self._average(state)

    def close(self, state: WeightWarmupState) -> None:
        """Close ``then``."""
        if state.begun:
            self.then.close(state.then)

    def end(self, state: WeightWarmupState) -> None:
        """End ``then``. Every rank must call, in or after the warm-up alike."""
        if state.begun:
            self.then.end(state.then)

    def state_dict(self, state: WeightWarmupState) -> dict[str, Any]:
        """Return that of ``then``; empty in the warm-up."""
        return {"then": self.then.state_dict(state.then)} if state.begun else {}

    def load_state_dict(self, state: WeightWarmupState, saved: Mapping[str, Any]) -> None:
        """Hand it to ``then``."""
        if not saved:
            return
        if saved.keys() != {"then"}:
            what = "the checkpoint was saved without this warm-up"
            raise UsageError(explain(what, value=sorted(saved), fix="choose the exchange that it was saved with"))
        if not state.begun:
            state.then, state.begun = self.then.prepare(state.parameters, state.group), True
        self.then.load_state_dict(state.then, saved["then"])

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float | None:
        """Return what a step after the warm-up sends."""
        return self.then.traffic(num_elements, element_bytes, world_size)


def after_warmups(exchange: WeightExchange[Any]) -> WeightExchange[Any]:
    """Return what is left of an exchange when all its warm-ups are over."""
    while isinstance(exchange, WeightWarmup):
        exchange = exchange.then
    return exchange
