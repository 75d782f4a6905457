"""The interface between the optimizer's step and a method of exchanging weights.

As with gradients, hyper-parameters are fields of a frozen dataclass, and what changes while training is the state that
``prepare`` returns and the caller keeps.

Gradients stay where they were computed, unless the method says otherwise: each rank's optimizer steps with its own. So the
ranks' weights differ between exchanges; :meth:`WeightExchange.agree` makes them one again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError, explain
from .base import GradientExchange

State = TypeVar("State")

#: (name, parameter) pairs in one order on all ranks.
Named = Sequence[tuple[str, Tensor]]


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

    @abstractmethod
    def before_step(self, state: State, step: int) -> None:
        """Act after backward and before the optimizer. ``step`` counts optimizer steps from 0."""

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


class FlatWeights:
    """Copies of many parameters as few flat tensors: one per device and dtype, in the order of the parameters.

    Args:
        parameters: (name, parameter) pairs; whole tensors of any shape, contiguous or not.
        dtype: of the copies; None keeps each parameter's own.

    Attributes:
        names: of the parameters in each flat tensor.
    """

    def __init__(self, parameters: Named, dtype: torch.dtype | None = None) -> None:
        self._groups: list[list[Tensor]] = []
        self.names: list[list[str]] = []
        self._kinds: list[tuple[torch.device, torch.dtype]] = []
        for name, parameter in parameters:
            kind = parameter.device, dtype or parameter.dtype
            if kind not in self._kinds:
                self._kinds.append(kind)
                self._groups.append([])
                self.names.append([])
            at = self._kinds.index(kind)
            self._groups[at].append(parameter.detach())
            self.names[at].append(name)

    def __len__(self) -> int:
        """Return the number of flat tensors."""
        return len(self._groups)

    def empty(self) -> list[Tensor]:
        """Make flat tensors, not filled."""
        sizes = [sum(p.numel() for p in group) for group in self._groups]
        return [
            torch.empty(n, dtype=dtype, device=device) for n, (device, dtype) in zip(sizes, self._kinds, strict=True)
        ]

    def copy(self) -> list[Tensor]:
        """Make flat tensors that hold the weights."""
        flats = self.empty()
        self.read(flats)
        return flats

    def views(self, flats: Sequence[Tensor]) -> list[list[Tensor]]:
        """Cut flat tensors into views of the parameters' shapes."""
        return [
            [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in group]), group, strict=True)]
            for flat, group in zip(flats, self._groups, strict=True)
        ]

    @torch.no_grad()
    def read(self, into: Sequence[Tensor]) -> None:
        """Copy the parameters into flat tensors."""
        for views, group in zip(self.views(into), self._groups, strict=True):
            torch._foreach_copy_(views, group)

    @torch.no_grad()
    def write(self, source: Sequence[Tensor]) -> None:
        """Copy flat tensors into the parameters, in place."""
        for views, group in zip(self.views(source), self._groups, strict=True):
            torch._foreach_copy_(group, views)

    @torch.no_grad()
    def subtract_from(self, flats: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Write flat tensors minus the parameters, in the dtype of the copies, into others."""
        for views, outs, group in zip(self.views(flats), self.views(out), self._groups, strict=True):
            for view, result, parameter in zip(views, outs, group, strict=True):
                torch.sub(view, parameter, out=result)

    @torch.no_grad()
    def mix(self, source: Sequence[Tensor], kept: float) -> None:
        """Make each parameter ``kept`` of itself and the rest of flat tensors, rounded to its dtype once."""
        for views, group in zip(self.views(source), self._groups, strict=True):
            if all(view.dtype == parameter.dtype for view, parameter in zip(views, group, strict=True)):
                torch._foreach_mul_(group, kept)
                torch._foreach_add_(group, views, alpha=1 - kept)
            else:
                for v, p in zip(views, group, strict=True):  # one wide copy at a time
                    p.copy_(p.to(v.dtype).mul_(kept).add_(v, alpha=1 - kept))

    @torch.no_grad()
    def add(self, source: Sequence[Tensor]) -> None:
        """Add flat tensors to the parameters, rounded to their dtype once."""
        for views, group in zip(self.views(source), self._groups, strict=True):
            for v, p in zip(views, group, strict=True):
                if v.dtype == p.dtype:
                    p.add_(v)
                else:
                    p.copy_(p.to(v.dtype).add_(v))
