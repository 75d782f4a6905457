"""Functions that return the whole weights of a model whose parameters may be divided among processes, as DTensors or parts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from ..parallel.division import Division


def is_dtensor(tensor: object) -> bool:
    """Tell whether an object is a DTensor, without importing the module that defines DTensors if it is not loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_divided(model: nn.Module) -> bool:
    """Tell whether the model has DTensors as parameters, so that its forward is a collective that all ranks must call."""
    return any(is_dtensor(p) for p in model.parameters())


def division_if_any(tensor: Tensor) -> Division | None:
    """Return how a layout has divided a tensor; the module that divides is not imported for the question."""
    module = sys.modules.get("guozhuang.parallel.division")
    return None if module is None else module.division_of(tensor)


def full(tensor: Any) -> Tensor:
    """Return a tensor without its graph; what is divided is gathered, so that every rank must call it."""
    if (division := division_if_any(tensor)) is not None:
        return sys.modules["guozhuang.parallel.division"].whole(tensor, division)  # type: ignore[no-any-return]
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach()  # type: ignore[no-any-return]


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters by name, detached; divided ones are gathered. Every rank must call it if there are such.

    Other parameters are returned without a copy.
    """
    return {name: full(p) for name, p in model.named_parameters()}
