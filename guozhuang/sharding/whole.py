"""Whole weights of a model whose parameters may be DTensors, of which each process holds a part."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_dtensor(tensor: object) -> bool:
    """Tell whether it is a DTensor, without importing what defines these where nobody did."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_divided(model: nn.Module) -> bool:
    """Tell whether parameters of the model are DTensors: then only all ranks together can call it."""
    return any(is_dtensor(p) for p in model.parameters())


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter as a whole, detached, by name; divided ones are gathered. Every rank must call it if any is.

    A parameter that is not divided is returned as it is, without a copy.
    """
    return {name: _full(p) for name, p in model.named_parameters()}


def load_whole(into: nn.Module, weights: dict[str, Tensor], model: nn.Module) -> nn.Module:
    """Copy whole weights, and the buffers of ``model``, into another model of its kind, and return that. Not collective."""
    with torch.no_grad():
        for name, p in into.named_parameters():
            p.copy_(weights[name])
        buffers = dict(model.named_buffers())
        for name, buffer in into.named_buffers():
            buffer.copy_(buffers[name])
    return into.train(model.training)


def _full(parameter: Tensor) -> Tensor:
    whole: Any = parameter
    if is_dtensor(parameter):
        whole = whole.full_tensor()
    return whole.detach()  # type: ignore[no-any-return]
