"""What forward hooks have in common that give a layer's output another backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class OutputHook:
    """A forward hook that stays with the model it was made for: copies and pickles of it get one that does nothing."""

    def __reduce__(self) -> Any:
        return NoHook, ()


class NoHook:
    """What a copy of the model has in the place of a hook that belongs to the original."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Do nothing."""


def is_traced() -> bool:
    """Tell whether somebody records or transforms what runs: then PyTorch's own functions are to be seen."""
    return bool(
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def without_history(output: Tensor) -> Tensor:
    """Return a tensor over the same memory that autograd knows nothing of.

    It is no view of anything, so that programs may go on in place.
    """
    plain = torch.empty(0, dtype=output.dtype)
    return plain.set_(output.untyped_storage(), output.storage_offset(), output.shape, output.stride())


def holders_of(tensor: Tensor) -> int:
    """Return how many tensors and other objects hold a tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def has_plain_weight(part: nn.Module, kind: type[nn.Module], smallest_bytes: int) -> bool:
    """Tell whether a layer computes as PyTorch's class does, with a row-major weight of at least so many bytes."""
    weight = getattr(part, "weight", None)
    return (
        type(part).forward is kind.forward
        and isinstance(weight, nn.Parameter)
        and weight.is_contiguous()
        and weight.numel() * weight.itemsize >= smallest_bytes
    )
