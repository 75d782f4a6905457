"""The base class of optimizers whose step of a parameter has a length that depends on norms of the whole parameter.

[Note: norms of whole parameters] A rank may hold a part of a parameter only: a slice of a matrix, or some elements of a flat
tensor. Its step needs the norm over all parts all the same. So the optimizer asks an object, :class:`Wholes`: its own one knows
parameters that are divided by a layout, and ``sharded`` puts another in its place, which knows flat parts. Norms of all
parameters are asked for at once, in every step on every rank, also on one that holds none: that is one small all-reduce.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import UsageError, explain
from ..parallel.division import division_of, norms_of


class Wholes:
    """Answers questions about the whole parameters of which an optimizer may hold parts."""

    def num_dims(self, parameter: Tensor) -> int:
        """Return the number of dimensions of the whole parameter."""
        division = division_of(parameter)
        return parameter.dim() if division is None else len(division.shape)

    def norms(self, parameters: Sequence[Tensor], values: Sequence[Sequence[Tensor | None]]) -> list[list[Tensor]]:
        """Return 2-norms of whole tensors. Every rank must call it, with the same number of lists.

        Args:
            parameters: all parameters of the optimizer.
            values: lists with a tensor for each parameter, of the parameter's own shape, or None.

        Returns:
            For each list 0-dimensional tensors, of which those that belong to None mean nothing.
        """
        if any(division_of(p) is not None for p in parameters):
            return [norms_of(parameters, some) for some in values]
        return [_norms(some) for some in values]


def _norms(values: Sequence[Tensor | None]) -> list[Tensor]:
    given = [value for value in values if value is not None]
    found = iter(torch._foreach_norm(given) if given else ())
    return [torch.zeros(()) if value is None else whole_of(next(found)) for value in values]


def whole_of(value: Any) -> Tensor:
    """Return a tensor; of a DTensor the whole, which every rank must ask for."""
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


class LayerwiseOptimizer(Optimizer):
    """Steps each parameter by its own trust ratio: a length that is in proportion to the norm of its weights.

    A subclass computes directions from gradients and state, element by element. Parameters with fewer than two dims (biases,
    weights of normalization layers) get neither a trust ratio nor weight decay; a group with ``"layerwise": True`` or ``False``
    says so for all its parameters, whatever their dims.

    Attributes:
        wholes: knows norms of whole parameters. See [Note: norms of whole parameters].
    """

    elementwise = True  # but for the norms, which ``wholes`` knows
    wholes: Wholes

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.wholes = Wholes()
        super().__init__(params, {**defaults, "layerwise": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step; ``closure`` computes the loss and the gradients. Every rank must call it where parameters are divided.

        Raises:
            UsageError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters: list[Tensor] = []
        directions: list[Tensor | None] = []
        for group in self.param_groups:
            held = group["params"]
            used = [p for p in held if p.grad is not None]
            for p in used:
                if p.grad.is_sparse or p.is_complex():
                    what = f"{type(self).__name__} takes dense gradients of real parameters"
                    raise UsageError(explain(what, value=f"{p.grad.layout}, {p.dtype}", fix="use another optimizer"))
            is_layerwise = {id(p): self._is_layerwise(p, group) for p in used}
            found = self._directions(group, used, [is_layerwise[id(p)] for p in used]) if used else []
            of_used = {id(p): direction for p, direction in zip(used, found, strict=True)}
            parameters += held
            directions += [of_used.get(id(p)) for p in held]
        gradients = [None if d is None else p.grad for p, d in zip(parameters, directions, strict=True)]
        norms = self.wholes.norms(parameters, [[p.detach() for p in parameters], self._measured(gradients, directions)])
        number = 0
        for group in self.param_groups:
            chosen = [i for i in range(number, number + len(group["params"])) if directions[i] is not None]
            number += len(group["params"])
            if not chosen:
                continue
            weights = [parameters[i] for i in chosen]
            lengths = [
                self._ratio(group, norms[0][i].to(parameters[i].device), norms[1][i].to(parameters[i].device))
                if self._is_layerwise(parameters[i], group)
                else torch.ones((), device=parameters[i].device)
                for i in chosen
            ]
            self._move(group, weights, [directions[i] for i in chosen], lengths)  # type: ignore[misc]
        return loss

    def _is_layerwise(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        told: bool | None = group["layerwise"]
        return self.wholes.num_dims(parameter) >= 2 if told is None else told

    # ---- methods that a subclass defines --------------------------------------------------------------------------------

    @abstractmethod
    def _directions(self, group: dict[str, Any], used: list[Tensor], layerwise: list[bool]) -> list[Tensor]:
        """Update the state from the gradients of the parameters of a group that have one, and return where they are to go."""

    @abstractmethod
    def _measured(self, gradients: list[Tensor | None], directions: list[Tensor | None]) -> list[Tensor | None]:
        """Return the tensors whose norms the trust ratio needs besides those of the weights."""

    @abstractmethod
    def _ratio(self, group: dict[str, Any], weight: Tensor, measured: Tensor) -> Tensor:
        """Return the trust ratio of a parameter from the two norms; 1 where one of them is 0."""

    @abstractmethod
    def _move(
        self, group: dict[str, Any], weights: list[Tensor], directions: list[Tensor], ratios: list[Tensor]
    ) -> None:
        """Change the weights of a group by the directions, each in proportion to its ratio; directions may be overwritten."""


def checked(name: str, value: float, low: float, below: float = float("inf")) -> float:
    """Return a hyper-parameter; raise if it is not at least ``low`` and less than ``below``.

    Raises:
        UsageError: it is not; the text names it.
    """
    if not low <= value < below:
        bounds = f"at least {low:g}" + (f" and less than {below:g}" if below != float("inf") else "")
        raise UsageError(explain(f"{name} must be {bounds}", value=value, fix="see the class's documentation"))
    return value
