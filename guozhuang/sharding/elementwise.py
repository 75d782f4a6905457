"""Tells how an optimizer can be divided among ranks: element by element, or by whole tensors, each with one owner."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import UsageError, explain
from ..parallel.division import division_of, keep_whole

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
#: Classes whose step of a tensor depends only on that tensor, its gradient and state, and on numbers of the parameter group.
WHOLE_TENSORS: tuple[type[Optimizer], ...] = (torch.optim.Muon, torch.optim.Adafactor)
# A subclass that overrides none of these methods steps as its parent does.
_STEPS_BY = ("step", "_init_group")
WHY_NOT = {
    "LBFGS": "it searches along a line through all weights at once",
    "SparseAdam": "it steps only the rows that a sparse gradient names",
}
# Estimates, in floating-point operations of a matrix product: what the calls for a tensor cost whatever its size, and what
# the passes over memory cost for each element. They only divide work, so a factor of two does no harm.
_TENSOR_COST: Final = 3e7
_ELEMENT_COST: Final = 1500.0


def needs_whole_tensors(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer must see parameters whole, each on one rank; False if it acts element by element.

    A class or an instance declares itself by an attribute ``elementwise`` or ``whole_tensors``, a bool, which is trusted.

    Raises:
        UsageError: neither is known of the optimizer, it declares both, or a group has ``differentiable=True``.
    """
    name = type(optimizer).__name__
    elementwise: Any = getattr(optimizer, "elementwise", None)
    whole_tensors: Any = getattr(optimizer, "whole_tensors", None)
    if elementwise and whole_tensors:
        what = f"{name} declares elementwise = True and whole_tensors = True"
        raise UsageError(explain(what, fix="declare the one by which it can be divided among ranks"))
    if elementwise is None and not whole_tensors:
        elementwise = _steps_as(type(optimizer), ELEMENTWISE)
    if whole_tensors is None and not elementwise:
        whole_tensors = _steps_as(type(optimizer), WHOLE_TENSORS)
    if not elementwise and not whole_tensors:
        raise UsageError(_refusal(optimizer))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        what = f"{name}(differentiable=True): a graph through the step would end at the parts of the weights"
        raise UsageError(explain(what, fix="leave differentiable out, or train with the strategy ddp"))
    return bool(whole_tensors)


def _refusal(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    if name in WHY_NOT:
        known = ", ".join(kind.__name__ for kind in (*ELEMENTWISE, *WHOLE_TENSORS))
        what = f"{name} cannot step parts of the weights: {WHY_NOT[name]}"
        return explain(what, fix=f"use one of {known}; or train with the strategy ddp")
    if getattr(optimizer, "elementwise", None) is not None or getattr(optimizer, "whole_tensors", None) is not None:
        what = f"{name} declares that it acts neither element by element nor tensor by tensor"
        return explain(what, fix="train with the strategy ddp")
    what = f"{name} cannot step parts of the weights: it is not known to act element by element or tensor by tensor"
    fix = (
        "declare it, if each element's step depends on its own weight, gradient and state alone: "
        f"{name}.elementwise = True; or, if each parameter's step does: {name}.whole_tensors = True; or train with the "
        "strategy ddp"
    )
    return explain(what, fix=fix)


def steps_as_torch(kind: type[Optimizer]) -> bool:
    """Tell whether a class has the step of one of PyTorch's optimizers above, all of whose state belongs to weights."""
    return _steps_as(kind, (*ELEMENTWISE, *WHOLE_TENSORS))


def step_cost(optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> float:
    """Return what a step of a whole parameter costs, in any unit, the same for all parameters of the optimizer.

    A class or an instance may say so itself by a method ``step_cost(parameter, group)``. Otherwise Muon's Newton-Schulz
    iterations are counted, and for other classes a product of the parameter with a square matrix along each of its dims, as
    preconditioners of Shampoo's and SOAP's kind need; Adafactor passes over memory alone.

    Args:
        optimizer: the user's optimizer.
        parameter: a parameter of it.
        group: the parameter's group.

    Raises:
        UsageError: the class's own cost is not a finite number of at least 0.
    """
    own: Any = getattr(optimizer, "step_cost", None)
    if own is not None:
        cost = float(own(_whole_shape(parameter), group))
        if not (math.isfinite(cost) and cost >= 0):
            what = f"{type(optimizer).__name__}.step_cost must return a finite number of at least 0"
            raise UsageError(explain(what, value=cost, fix="return the number of operations, or of elements"))
        return cost
    parameter = _whole_shape(parameter)
    cost = _TENSOR_COST + _ELEMENT_COST * parameter.numel()
    if isinstance(optimizer, torch.optim.Muon) and parameter.dim() == 2:
        short, long = sorted(parameter.shape)
        return cost + float(group["ns_steps"]) * (4.0 * short * short * long + 2.0 * short**3)
    if isinstance(optimizer, torch.optim.Adafactor) or parameter.dim() < 2:
        return cost
    return cost + 4.0 * parameter.numel() * sum(parameter.shape)


def _whole_shape(parameter: Tensor) -> Tensor:
    """Return the parameter; where a layout has cut it, a tensor without memory of the whole shape."""
    division = division_of(parameter)
    if division is None or division.dim is None:
        return parameter
    return torch.empty(division.shape, dtype=parameter.dtype, device="meta")


def choose_keepers(optimizer: Optimizer, num_owners: int) -> None:
    """Choose which rank of a tensor group steps each cut matrix of an optimizer that needs whole ones: the costliest first.

    Args:
        optimizer: the user's.
        num_owners: among how many ranks ``sharded`` divides the matrices too; 1 otherwise.
    """
    held = [(p, step_cost(optimizer, p, group)) for group in optimizer.param_groups for p in group["params"]]
    of_owner, of_rank = [0.0] * num_owners, dict[tuple[int, int], float]()
    for i in sorted(range(len(held)), key=lambda i: (-held[i][1], i)):
        parameter, cost = held[i]
        owner = of_owner.index(min(of_owner))
        of_owner[owner] += cost
        division = division_of(parameter)
        if division is not None and division.group is not None:
            keeper = min(range(division.group.size()), key=lambda rank: of_rank.get((owner, rank), 0.0))
            of_rank[owner, keeper] = of_rank.get((owner, keeper), 0.0) + cost
            keep_whole(parameter, keeper)


def _steps_as(kind: type[Optimizer], known: tuple[type[Optimizer], ...]) -> bool:
    return any(
        issubclass(kind, each) and all(_function(kind, name) is _function(each, name) for name in _STEPS_BY)
        for each in known
    )


def _function(kind: type[Optimizer], name: str) -> Any:
    """Return the method as its class defines it, without the wrapper that PyTorch puts around a class's step."""
    found = getattr(kind, name, None)
    return None if found is None else inspect.unwrap(found)
