"""The interface between the optimizer's step and a method of exchanging weights.

As with gradients, hyper-parameters are fields of a frozen dataclass, and what changes while training is the state that
``prepare`` returns and the caller keeps.

Gradients stay where they were computed, unless the method says otherwise: each rank's optimizer steps with its own. So the
ranks' weights differ between exchanges; :meth:`WeightExchange.agree` makes them one again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from ..errors import UsageError, explain
from ..weights.flat import Named
from .base import GradientExchange

State = TypeVar("State")


class WeightExchange(ABC, Generic[State]):
    """What is done with the weights before and after each ``optimizer.step()``.

    A step that a rank shadows, because its data ended before that of others, is ``before_step`` and ``after_step`` with nothing
    between: it takes part with the weights that it has.
    """

    @property
    def in_step(self) -> bool:
        """Whether every rank must make every step for the others to get on. False for asynchronous methods."""
        return True

    def averages_gradients(self, step: int) -> bool:
        """Tell whether gradients cross the wire in this step, as they do without a weight exchange. By default never."""
        return False

    def averages_over_all(self, step: int) -> bool:
        """Tell whether this step leaves equal weights equal on all ranks, because their gradients are averaged over all."""
        return self.averages_gradients(step)

    def gradients(self) -> GradientExchange[Any] | None:
        """Return what gradients go through in steps that average them; None leaves the wrapper's own exchange in place."""
        return None

    @abstractmethod
    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> State:
        """Make the state. Every rank must call, with equal weights.

        Args:
            parameters: those that are trained; of any dtypes and shapes, on one device type.
            group: the ranks. A method that sends from a thread makes a twin of it.
        """

    def miss_step(self, state: State, step: int) -> None:
        """Note that this rank makes no optimizer step in the coming step, which it only shadows. Not collective."""

    def before_step(self, state: State, step: int) -> None:
        """Act after backward and before the optimizer; by default not at all. ``step`` counts optimizer steps from 0."""

    @abstractmethod
    def after_step(self, state: State, step: int) -> None:
        """Act after the optimizer."""

    @abstractmethod
    def agree(self, state: State) -> None:
        """Bring the weights of all ranks to one value, bit for bit, from which training goes on. Every rank must call.

        Called before evaluation and checkpoints, if there was a step since; what is under way ends first.
        """

    def rest(self, state: State) -> None:
        """Hold nobody up until the next step: this rank's data has ended. For methods that are not in step; not collective."""

    def close(self, state: State) -> None:
        """Stop what runs in the background. Not collective; the state is not used again."""

    def end(self, state: State) -> None:
        """Finish what is under way, leave the weights alone, and end the groups that ``prepare`` made; then as :meth:`close`.

        Every rank must call, at one point, where training begins anew with other weights. By default only :meth:`close`: right
        for a method that made no groups.
        """
        self.close(state)

    def state_dict(self, state: State) -> dict[str, Any]:
        """Return what a checkpoint needs besides the weights to go on exactly. Every rank must call, after :meth:`agree`."""
        return {}

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned on this rank; the weights were loaded before. Every rank must call.

        Raises:
            UsageError: it belongs to another method, or to other parameters.
        """
        if saved:
            what = f"{type(self).__name__} keeps no state, and the checkpoint holds some for {sorted(saved)}"
            raise UsageError(explain(what, fix="choose the exchange that the checkpoint was saved with"))

    @abstractmethod
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float | None:
        """Return the bytes that one rank sends per step on average, for that many weights; None if only counting can tell."""
