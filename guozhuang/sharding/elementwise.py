"""Tells which optimizers act element by element, so that a rank can step its part of the weights without the others."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import UsageError, explain

#: Classes whose step of an element depends only on its weight, gradient and state, and on numbers of the parameter group.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
# A subclass that overrides none of these methods steps as its parent does.
_STEPS_BY = ("step", "_init_group")
WHY_NOT = {
    "LBFGS": "it searches along a line through all weights at once",
    "Muon": "it orthogonalizes each weight matrix as a whole",
    "Adafactor": "it keeps a sum per row and column of each weight matrix",
    "SparseAdam": "it steps only the rows that a sparse gradient names",
}


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise if an optimizer would not give the same result when it steps parts of the weights.

    A class or an instance declares itself by an attribute ``elementwise`` (True or False), which is trusted.

    Raises:
        UsageError: the optimizer is not known to act element by element, or a group has ``differentiable=True``.
    """
    name = type(optimizer).__name__
    declared: Any = getattr(optimizer, "elementwise", None)
    if declared is None and not steps_as_torch(type(optimizer)):
        why = WHY_NOT.get(name, "it is not known to")
        fix = "use one of " + ", ".join(known.__name__ for known in ELEMENTWISE) + "; or train with the strategy ddp"
        if name not in WHY_NOT:
            alone = "if each element's step depends on its own weight, gradient and state alone"
            fix += f"; or, {alone}, declare it: {name}.elementwise = True"
        raise UsageError(
            explain(f"{name} cannot step parts of the weights: {why} act element by element", fix=fix)
            if name not in WHY_NOT
            else explain(f"{name} cannot step parts of the weights: {why}", fix=fix)
        )
    if declared is not None and not declared:
        raise UsageError(
            explain(f"{name} declares that it does not act element by element", fix="train with the strategy ddp")
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        what = f"{name}(differentiable=True): a graph through the step would end at the parts of the weights"
        raise UsageError(explain(what, fix="leave differentiable out, or train with the strategy ddp"))


def steps_as_torch(kind: type[Optimizer]) -> bool:
    """Tell whether a class has the step of one of PyTorch's elementwise optimizers, all of whose state belongs to weights."""
    return any(
        issubclass(kind, known) and all(_function(kind, name) is _function(known, name) for name in _STEPS_BY)
        for known in ELEMENTWISE
    )


def _function(kind: type[Optimizer], name: str) -> Any:
    """Return the method as its class defines it, without the wrapper that PyTorch puts around a class's step."""
    found = getattr(kind, name, None)
    return None if found is None else inspect.unwrap(found)
