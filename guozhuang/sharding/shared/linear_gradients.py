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

from ...gradients.buckets import same_place
from .output_hooks import OutputHook, has_plain_weight, holders_of, is_traced

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
        if not place.is_used or module.weight is not place.parameter or not _is_product(output, module.weight):
            return None
        apply: Any = _Product.apply
        result: Tensor = apply(args[0], module.weight, module.bias, (output, place))  # autograd ignores a tuple
        return result


def _is_product(output: Tensor, weight: Tensor) -> bool:
    """Tell whether autograd recorded one product with the weight itself (not with a cast copy of it)."""
    node: Any = output.grad_fn
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0"):
        node = node.next_functions[0][0]
    if node is None or node.name() not in ("AddmmBackward0", "MmBackward0") or not output.is_contiguous():
        return False
    transpose = node.next_functions[-1][0]
    if transpose is None or transpose.name() != "TBackward0":
        return False
    return getattr(transpose.next_functions[0][0], "variable", None) is weight


class _Product(torch.autograd.Function):
    """A linear layer's product with another backward; ``told[0]`` is its output, computed by PyTorch's forward."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, told: tuple[Tensor, GradientPlace]
    ) -> Tensor:
        output, ctx.place = told
        ctx.save_for_backward(input, weight)
        return same_place(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (input, weight), gradient = ctx.saved_tensors, gradients[0]
        of_input = of_weight = of_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            place: GradientPlace = ctx.place
            columns, inputs = rows.t(), input.reshape(-1, input.shape[-1])
            if torch.is_grad_enabled() or not place.is_free(ctx.next_functions[1][0]):
                of_weight = columns.mm(inputs)
            else:
                # A new tensor over the same memory: autograd stores a gradient without a copy only if nobody else refers to
                # that tensor.
                of_weight = place.view.detach()
                torch.mm(columns, inputs, out=of_weight)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        if ctx.needs_input_grad[0]:
            of_input = rows.mm(weight).view(input.shape)
        return of_input, of_weight, of_bias, None


def linear_layers_of(model: nn.Module) -> list[nn.Linear]:
    """Return the model's linear layers whose weight gradient can be computed in the buffer."""
    return [
        part
        for part in model.modules()
        if isinstance(part, nn.Linear) and has_plain_weight(part, nn.Linear, SMALLEST_BYTES)
    ]
