"""Base class and helpers of forward hooks that replace the backward of a layer's output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..registry import OfOneModel


class OutputHook(OfOneModel):
    """A forward hook for one model only."""


def is_traced() -> bool:
    """Tell whether a compiler, tracer or functorch transform is active, which must see PyTorch's own functions."""
    return bool(
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def holders_of(tensor: Tensor) -> int:
    """Return how many tensors and other objects share a tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def has_plain_weight(part: nn.Module, kind: type[nn.Module], smallest_bytes: int) -> bool:
    """Tell whether a layer has the forward of PyTorch's class ``kind``, and a row-major weight of at least so many bytes."""
    weight = part._parameters.get("weight")  # read as an attribute, a parametrized one would be computed
    return (
        type(part).forward is kind.forward
        and isinstance(weight, nn.Parameter)
        and weight.is_contiguous()
        and weight.numel() * weight.itemsize >= smallest_bytes
    )
