"""Functions that return the whole weights of a model whose parameters may be DTensors, divided among processes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_dtensor(tensor: object) -> bool:
    """Tell whether an object is a DTensor, without importing the module that defines DTensors if it is not loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_divided(model: nn.Module) -> bool:
    """Tell whether the model has DTensors as parameters, so that its forward is a collective that all ranks must call."""
    return any(is_dtensor(p) for p in model.parameters())


def full(tensor: Any) -> Tensor:
    """Return a tensor without its graph; a DTensor is gathered, so that every rank must call it for one."""
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach()  # type: ignore[no-any-return]


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters by name, detached; DTensors are gathered. Every rank must call it if there are DTensors.

    Other parameters are returned without a copy.
    """
    return {name: full(p) for name, p in model.named_parameters()}


def load_whole(into: nn.Module, weights: dict[str, Tensor], model: nn.Module) -> nn.Module:
    """Copy whole weights, and the buffers of ``model``, into ``into``, a model of the same class. Not collective."""
    with torch.no_grad():
        for name, p in into.named_parameters():
            p.copy_(weights[name])
        buffers = dict(model.named_buffers())
        for name, buffer in into.named_buffers():
            buffer.copy_(buffers[name])
    return into.train(model.training)
