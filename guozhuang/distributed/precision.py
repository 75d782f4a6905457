"""Forward and backward in a narrower dtype, while parameters, optimizer and checkpoints stay in full precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class MixedPrecision(Protocol):
    """The dtypes that PyTorch's ``_MixedPrecision`` holds; None leaves tensors of that kind as they are."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None


@dataclass(frozen=True)
class Precision:
    """The dtypes in which a module computes.

    The cast lasts for one call of the module. Activation checkpointing calls parts of it again in backward, then in full
    precision, so the two are not supported together.

    Args:
        param_dtype: dtype of parameters and floating-point inputs during forward and backward.
        reduce_dtype: dtype in which gradients are sent; ``param_dtype`` if None.
        buffer_dtype: dtype of floating-point buffers.
        ignored: names of parameters and buffers that are not cast.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    ignored: frozenset[str]

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are sent; None to send each gradient in its own dtype."""
        return self.reduce_dtype or self.param_dtype

    def cast_buffers(self, module: nn.Module) -> None:
        """Cast the module's floating-point buffers to ``buffer_dtype``, permanently."""
        if self.buffer_dtype is None:
            return
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and name not in self.ignored:
                buffer.data = buffer.to(self.buffer_dtype)

    def run(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the module with its parameters and inputs cast; gradients arrive in the parameters' own dtype."""
        if self.param_dtype is None:
            return module(*inputs, **kwargs)
        inputs, kwargs = tree_map(self._cast, (inputs, dict(kwargs)))
        parameters = {name: self._cast(p) for name, p in module.named_parameters() if name not in self.ignored}
        return torch.func.functional_call(module, parameters, inputs, dict(kwargs))

    def _cast(self, value: Any) -> Any:
        return value.to(self.param_dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
