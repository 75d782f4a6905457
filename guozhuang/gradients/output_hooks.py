"""Base class and helpers of forward hooks that replace the backward of a layer's output."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn


class OfOneModel:
    """A hook for one model only: copies of the model get a :class:`NoHook` in its place, and pickles what does nothing too.

    [Note: pickles without this package] A model that was saved with ``torch.save(model)`` is loaded where this package may not
    be. So what stands in a pickle in the place of its objects is of Python's library: for a hook a method that takes any
    arguments and does nothing.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> NoHook:
        return NoHook()

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class OutputHook(OfOneModel):
    """A forward hook for one model only."""


class NoHook(OfOneModel):
    """The hook that a copy of a model has instead of an :class:`OfOneModel`; does nothing."""

    def __call__(self, *_: Any) -> None:
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
