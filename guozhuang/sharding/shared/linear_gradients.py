"""Weight gradients of linear layers, computed directly in the shared buffer instead of copied there.

[Note: a gradient that is born in its place]
PyTorch computes the gradient of a linear layer's weight into new memory, and from there it would be copied to the buffer that
other ranks read: a write, a read and a second write of all large weights in each step. Here the product is written to the
buffer itself, by the same multiplication, so with the same bits; autograd gets a tensor over that memory as the gradient.
The buffer holds only this step's gradient of the weight, so it is written to only
 - while ``p.grad`` is None: the old content is no longer needed. A second backward gets memory from PyTorch, and adds it up.
 - while no tensor but the buffer's own holds the memory (the storage counts its holders). A second use of the weight in
   one forward, whose gradient is added to the first one's inside autograd's engine, gets memory from PyTorch.
 - if the gradient goes to ``p.grad``, where the carrier's hook finds it. ``autograd.grad`` returns it to the program, to keep.
 - if the program has no hook of its own on the weight, which would see it earlier.
With ``create_graph=True``, autocast, under compilation, tracing and functorch PyTorch's own backward runs instead.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from ...gradients.output_hooks import OutputHook, has_plain_weight, holders_of, is_traced
from ...gradients.products import ProductOperands, replace_backward

#: Weights smaller than this are left to PyTorch: a Python function in backward takes longer than the copy.
SMALLEST_BYTES: Final = 1 << 21


class GradientPlace:
    """The part of the shared buffer for one linear layer's weight gradient. See [Note: a gradient that is born in its place].

    Args:
        parameter: the weight, num_outputs x num_inputs, row-major.
        view: part of the buffer, with the weight's shape and strides; only this object and its creator may hold its storage.
    """

    def __init__(self, parameter: nn.Parameter, view: Tensor) -> None:
        self.parameter, self.view = parameter, view
        self.is_used = False  # whether gradients are computed in this buffer at all; decided in the first step
        self._num_holders = holders_of(view)

    def parameter_gradients(
        self, operands: ProductOperands, wanted: tuple[bool, bool], accumulate: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the weight's gradient in this part of the buffer if it is free, else in memory from PyTorch."""
        of_weight = None
        if wanted[0] and not torch.is_grad_enabled() and self.is_free(accumulate):
            # A new tensor over the same memory: autograd stores a gradient without a copy only if nobody else refers to that
            # tensor.
            of_weight = self.view.detach()
            torch.mm(*operands.factors, out=of_weight)
        elif wanted[0]:
            left, right = operands.factors
            of_weight = left.mm(right)
        return of_weight, operands.rows.sum(0) if wanted[1] else None

    def is_free(self, accumulate: Any) -> bool:
        """Tell whether a gradient for this AccumulateGrad node of autograd may be computed in this part of the buffer."""
        if not self.is_used or self.parameter.grad is not None or self.parameter._backward_hooks:
            return False
        return holders_of(self.view) == self._num_holders and _goes_to_grad(accumulate)


def _goes_to_grad(accumulate: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:  # PyTorch raises if autograd.grad() runs this backward
        return False


class PlacingHook(OutputHook):
    """A forward hook of a linear layer that replaces its backward: the weight's gradient is computed in the buffer."""

    def __init__(self, place: GradientPlace) -> None:
        self._place = place

    def __call__(self, module: nn.Linear, args: tuple[Any, ...], output: Any) -> Tensor | None:
        """Return the output with the replaced backward, or None to keep PyTorch's own."""
        place = self._place
        if is_traced() or not torch.is_grad_enabled() or not isinstance(output, Tensor) or len(args) != 1:
            return None
        if not place.is_used or module.weight is not place.parameter:
            return None
        return replace_backward(output, args[0], module.weight, module.bias, place)


def linear_layers_of(model: nn.Module) -> list[nn.Linear]:
    """Return the model's linear layers whose weight gradient can be computed in the buffer."""
    return [
        part
        for part in model.modules()
        if isinstance(part, nn.Linear) and has_plain_weight(part, nn.Linear, SMALLEST_BYTES)
    ]
