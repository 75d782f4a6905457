"""The interface between the optimizer's step and a method of exchanging weights.

As with gradients, a method is a frozen dataclass of hyper-parameters, and everything that changes during training is in the
state that ``prepare`` returns and the caller keeps.

Gradients are not exchanged unless the method asks for it: each rank's optimizer steps with the gradients of that rank. So the
ranks' weights differ between exchanges; :meth:`WeightExchange.agree` makes them equal again.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch.distributed as dist

from ..weights.flat import Named
from .base import Exchange, GradientExchange, State


class WeightExchange(Exchange[State]):
    """A method of exchanging weights before and after each ``optimizer.step()``.

    A rank whose data ended before that of other ranks shadows their steps: it calls ``before_step`` and ``after_step`` without
    an optimizer step in between, and so takes part in the exchange with its current weights.
    """

    @property
    def in_step(self) -> bool:
        """Whether ranks wait for each other in every step, so that each must make all steps. False for asynchronous methods."""
        return True

    def averages_gradients(self, step: int) -> bool:
        """Return whether gradients are averaged in this step, as they are without a weight exchange. By default never."""
        return False

    def averages_over_all(self, step: int) -> bool:
        """Return whether gradients are averaged over all ranks in this step, so that equal weights stay equal."""
        return self.averages_gradients(step)

    def gradients(self) -> GradientExchange[Any] | None:
        """Return the exchange of gradients for steps that average them; None to use the one that the wrapper already has."""
        return None

    @abstractmethod
    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> State:
        """Make the state of the exchange. Every rank must call, with equal weights.

        Args:
            parameters: the parameters that are trained; of any dtypes and shapes, on one device type.
            group: the ranks. A method that sends from a thread makes a second group of the same ranks for that.
        """

    def miss_step(self, state: State, step: int) -> None:
        """Record that this rank has no data for the next step, and will not step its optimizer. Not collective."""

    def before_step(self, state: State, step: int) -> None:
        """Exchange weights between backward and the optimizer's step; by default do nothing. ``step`` counts from 0."""

    @abstractmethod
    def after_step(self, state: State, step: int) -> None:
        """Exchange weights after the optimizer's step, or start to. ``step`` counts optimizer steps from 0."""

    @abstractmethod
    def agree(self, state: State) -> None:
        """Make the weights of all ranks equal, bit for bit; training continues from them. Every rank must call.

        Called before evaluation and checkpoints, if there was a step since the last call. Started exchanges are finished first.
        """

    def rest(self, state: State) -> None:
        """Let other ranks no longer wait for this rank, whose data has ended; for methods not ``in_step``. Not collective."""

    def close(self, state: State) -> None:
        """Stop the background threads of the state, which is not used again. Not collective."""

    def end(self, state: State) -> None:
        """Finish started exchanges without changing the weights, end the groups that ``prepare`` made, then :meth:`close`.

        Every rank must call, at the same point; training then restarts with other weights and a new state. The default, which
        only calls :meth:`close`, is right for a method that made no groups.
        """
        self.close(state)

    @abstractmethod
    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float | None:
        """Return the bytes that one rank sends per step on average for ``num_elements`` weights; None if unknown in advance."""
