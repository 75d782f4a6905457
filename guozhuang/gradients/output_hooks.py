"""Base class and helpers of forward hooks that replace the backward of a layer's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class OutputHook:
    """A forward hook for one model only: copies and pickles of the model get a :class:`NoHook` in its place."""

    def __reduce__(self) -> Any:
        return NoHook, ()


class NoHook:
    """The hook that a copy of the model has instead of an :class:`OutputHook`; does nothing."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Do nothing; the layer's output stays as it is."""


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
