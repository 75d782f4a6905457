"""The backward of a layer that multiplies its input with its weight, taken apart: who computes the weight's gradient, and when.

Used where that gradient is to be computed in a certain place (``sharding``) or at a later time (``parallel/pipeline``): it
needs nothing but the layer's input and the gradient of its output.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .buckets import same_place


class ProductOperands(NamedTuple):
    """What the gradients of a layer's parameters are computed from.

    Attributes:
        inputs: the layer's input, rows x inputs.
        rows: the gradient of its output, rows x outputs.
        is_turned: whether the weight is outputs x inputs, as of ``nn.Linear``; else it is inputs x outputs.
    """

    inputs: Tensor
    rows: Tensor
    is_turned: bool

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The two matrices whose product is the gradient of the weight."""
        return (self.rows.t(), self.inputs) if self.is_turned else (self.inputs.t(), self.rows)


class TakesProduct(Protocol):
    """What computes the gradients of a layer's parameters."""

    def parameter_gradients(
        self, operands: ProductOperands, wanted: tuple[bool, bool], accumulate: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias for autograd, None for what is not wanted or not computed now.

        Args:
            operands: what they are computed from.
            wanted: which of them autograd asks for.
            accumulate: the node of autograd's graph to which the weight's gradient goes.
        """
        ...


def replace_backward(
    output: Tensor, input: Tensor, weight: nn.Parameter, bias: Tensor | None, taker: TakesProduct
) -> Tensor | None:
    """Return a layer's output with another backward, in which ``taker`` computes the gradients of the parameters.

    Returns:
        A tensor over the memory of ``output``; None if autograd did not record one product with the weight itself (but, for
        example, with a cast copy of it), so that PyTorch's own backward has to stay.
    """
    is_turned = _is_turned(output, weight)
    if is_turned is None:
        return None
    apply: Any = _Product.apply
    result: Tensor = apply(input, weight, bias, (output, is_turned, taker))  # autograd ignores a tuple
    return result


def _is_turned(output: Tensor, weight: Tensor) -> bool | None:
    """Return whether autograd recorded a product with the transposed weight, or with the weight as it is; None for neither."""
    node: Any = output.grad_fn
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0"):
        node = node.next_functions[0][0]
    if node is None or node.name() not in ("AddmmBackward0", "MmBackward0") or not output.is_contiguous():
        return None
    factor = node.next_functions[-1][0]
    is_turned = factor is not None and factor.name() == "TBackward0"
    if is_turned:
        factor = factor.next_functions[0][0]
    return is_turned if getattr(factor, "variable", None) is weight else None


class _Product(torch.autograd.Function):
    """A layer's product with another backward; ``told[0]`` is its output, computed by PyTorch's forward."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, told: tuple[Tensor, bool, TakesProduct]
    ) -> Tensor:
        output, ctx.is_turned, ctx.taker = told
        ctx.save_for_backward(input, weight)
        return same_place(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (input, weight), gradient = ctx.saved_tensors, gradients[0]
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            operands = ProductOperands(input.reshape(-1, input.shape[-1]), rows, ctx.is_turned)
            wanted = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
            of_weight, of_bias = ctx.taker.parameter_gradients(operands, wanted, ctx.next_functions[1][0])
        if ctx.needs_input_grad[0]:
            of_input = rows.mm(weight if ctx.is_turned else weight.t()).view(input.shape)
        return of_input, of_weight, of_bias, None
