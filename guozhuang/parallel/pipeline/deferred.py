"""Gradients of weights that are computed after the gradients of inputs, at a time of the schedule's choice.

[Note: divided backwards] The gradient of a weight that was multiplied with the layer's input needs only that input and the
gradient of the layer's output; nothing else waits for it. So the backward of ``nn.Linear``, and of the transposed one of GPT-2,
is replaced by one that computes the gradient of the input and keeps the two matrices; no graph is walked twice. That of
``nn.Embedding`` keeps the indices and the gradient of the output, and adds its rows to ``p.grad`` later, where a backward would
make a gradient of the whole table for each microbatch; this is done of backwards that are not divided, too. Everything else
(norms, convolutions, products under autocast) is computed in the first half, as usual. A hook on a parameter is to see the sum
over all uses of the parameter in a backward, so parameters with hooks are left to the first half. A later product is added to
``p.grad`` as it is computed, without a matrix and a call of autograd's engine for it. Where a hook of autograd's accumulation
node is to see the gradient, it is handed to the engine, which runs the hook.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from typing_extensions import override

from guozhuang.gradients.buckets import same_place
from guozhuang.gradients.output_hooks import OutputHook, is_traced
from guozhuang.gradients.products import ProductOperands, replace_backward

from ..activations.tensor import DividedTensor, local_of


class _LookedUp(NamedTuple):
    """What the gradient of a table of embeddings is computed from: its rows that were looked up, and their gradients."""

    indices: Tensor
    rows: Tensor


class _Deferred:
    """What the gradients of weights are to be computed from later, of one microbatch in one stage.

    Args:
        is_divided: products are kept, too; else only what was looked up in tables of embeddings.
    """

    def __init__(self, is_divided: bool) -> None:
        self.is_divided = is_divided
        self.kept: list[tuple[nn.Parameter, nn.Parameter | None, ProductOperands | _LookedUp]] = []


class _AccumulationHooks:
    """Tells whether autograd's accumulation node of a parameter has hooks now, which a node itself does not show."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._node = get_gradient_edge(parameter).node  # while it is alive, autograd makes no other
        handles = self._node.register_hook(_ignore), self._node.register_prehook(_ignore)
        self._hooks = [handle.hooks_dict_ref() for handle in handles]
        for handle in handles:
            handle.remove()

    def __bool__(self) -> bool:
        return any(self._hooks)


def _ignore(*_: Any) -> None:
    """Do nothing with a gradient."""


class _Taker:
    """Keeps what the gradients of one layer's parameters are computed from."""

    def __init__(self, deferred: _Deferred, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self._deferred, self._weight, self._bias = deferred, weight, bias

    def parameter_gradients(
        self, operands: ProductOperands, wanted: tuple[bool, bool], accumulate: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Keep the operands; return no gradients."""
        self._deferred.kept.append((self._weight, self._bias if wanted[1] else None, operands))
        return None, None


class DeferredWeights:
    """Leaves the gradients of a model's weights for later. See [Note: divided backwards].

    Args:
        model: its layers get a forward hook each, before those of the script, which may hook the tensor that they are given;
            copies and pickles of the model do not have them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._now: _Deferred | None = None
        self._hooks: dict[int, _AccumulationHooks] = {}  # by identity of a parameter, which they keep alive
        for part in model.modules():
            if _multiplies(part):
                part.register_forward_hook(_ProductHook(self), prepend=True)
            elif _looks_up(part):
                part.register_forward_hook(_LookupHook(self), prepend=True)

    def begin(self, *, is_divided: bool = True) -> _Deferred:
        """Return what keeps the products of one microbatch in one stage until :meth:`compute`.

        Args:
            is_divided: whether the backward is divided. If not, only rows of embeddings are added by :meth:`compute`.
        """
        return _Deferred(is_divided)

    @contextlib.contextmanager
    def of(self, products: _Deferred) -> Iterator[None]:
        """Within this context products leave their weights' gradients for later, in what :meth:`begin` returned."""
        before, self._now = self._now, products
        try:
            yield
        finally:
            self._now = before

    def compute(self, products: _Deferred) -> None:
        """Compute the gradients that were left for later there, and add them to ``p.grad``."""
        kept = products.kept
        kept.reverse()
        with torch.no_grad():
            while kept:
                weight, bias, operands = kept.pop()
                if isinstance(operands, _LookedUp):
                    self._add_rows(weight, operands)
                    continue
                left, right = operands.factors
                if self._adds_directly(weight, left):
                    if weight.grad is None:
                        weight.grad = left.mm(right)
                    else:
                        weight.grad.addmm_(left, right)
                else:
                    torch.autograd.backward(weight, left.mm(right))
                if bias is None:
                    continue
                of_bias = operands.rows.sum(0)
                if not self._adds_directly(bias, of_bias):
                    torch.autograd.backward(bias, of_bias)
                elif bias.grad is None:
                    bias.grad = of_bias
                else:
                    bias.grad.add_(of_bias)

    def _add_rows(self, table: nn.Parameter, found: _LookedUp) -> None:
        if not self._adds_directly(table, found.rows):
            torch.autograd.backward(table, torch.zeros_like(table).index_add_(0, found.indices, found.rows))
            return
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        table.grad.index_add_(0, found.indices, found.rows)

    def _adds_directly(self, parameter: nn.Parameter, addend: Tensor) -> bool:
        """Return whether nobody but ``p.grad`` is to get what is added, and it can be added in place."""
        hooks = self._hooks.get(id(parameter))
        if hooks is None:
            hooks = self._hooks[id(parameter)] = _AccumulationHooks(parameter)
        if hooks or not _is_free(parameter) or parameter.dtype != addend.dtype:
            return False
        grad = parameter.grad
        return grad is None or (grad.dtype == addend.dtype and type(grad) is Tensor and grad.layout == torch.strided)

    def deferred(self) -> _Deferred | None:
        """Return where products are kept now; None outside of :meth:`of`."""
        return self._now


class _LaterHook(OutputHook):
    """A forward hook of a layer that replaces its backward; of divided samples, that of this rank's part."""

    def __init__(self, weights: DeferredWeights) -> None:
        self._weights = weights

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> Tensor | None:
        """Return the output with the replaced backward, or None to keep PyTorch's own."""
        deferred = self._weights.deferred()
        if deferred is None or is_traced() or not torch.is_grad_enabled() or len(args) != 1:
            return None
        # A parametrization computes the weight where it is read, and may change its own state by that.
        if not isinstance(output, Tensor) or not _is_free(module._parameters.get("weight")):
            return None
        found = self.replaced(module, local_of(args[0]), local_of(output), deferred)
        return output.like(found) if isinstance(output, DividedTensor) and found is not None else found

    @abc.abstractmethod
    def replaced(self, module: Any, given: Tensor, output: Tensor, deferred: _Deferred) -> Tensor | None:
        """Return an output with a backward that leaves the weight's gradient for later; None if that cannot be."""


class _ProductHook(_LaterHook):
    @override
    def replaced(self, module: Any, given: Tensor, output: Tensor, deferred: _Deferred) -> Tensor | None:
        weight, bias = module.weight, module._parameters.get("bias")
        is_computed = bias is None and getattr(module, "bias", None) is not None
        if not deferred.is_divided or is_computed or (bias is not None and bias.requires_grad and not _is_free(bias)):
            return None
        return replace_backward(output, given, weight, bias, _Taker(deferred, weight, bias))


class _LookupHook(_LaterHook):
    @override
    def replaced(self, module: Any, given: Tensor, output: Tensor, deferred: _Deferred) -> Tensor | None:
        table = module.weight
        if table.device.type != "cpu" or not output.is_contiguous():
            return None  # elsewhere the order in which rows are added would differ from time to time
        node: Any = output.grad_fn
        if node is None or node.name() != "EmbeddingBackward0":
            return None
        if getattr(node.next_functions[0][0], "variable", None) is not table:
            return None
        apply: Any = _Lookup.apply
        found: Tensor = apply(table, (output, given, module.padding_idx, deferred))  # autograd ignores a tuple
        return found


class _Lookup(torch.autograd.Function):
    """A lookup with another backward; ``told[0]`` is its output, computed by PyTorch's forward."""

    @staticmethod
    def forward(ctx: Any, table: nn.Parameter, told: tuple[Tensor, Tensor, int | None, _Deferred]) -> Tensor:
        output, indices, ctx.padding, ctx.deferred = told
        ctx.table = table  # its values do not count, and those of a table with max_norm change in each forward
        ctx.save_for_backward(indices)
        return same_place(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (indices,), rows = ctx.saved_tensors, gradients[0].reshape(-1, gradients[0].shape[-1])
        indices = indices.reshape(-1)
        if ctx.padding is not None:
            is_read = indices != ctx.padding
            indices, rows = indices[is_read], rows[is_read]
        ctx.deferred.kept.append((ctx.table, None, _LookedUp(indices, rows)))
        return None, None


def _looks_up(part: nn.Module) -> bool:
    """Return whether a layer's forward returns rows of its weight, and its gradient is dense."""
    is_plain = isinstance(part, nn.Embedding) and type(part).forward is nn.Embedding.forward
    return is_plain and not part.sparse and not part.scale_grad_by_freq


def _is_free(parameter: Any) -> bool:
    """Return whether nobody sees the gradient of a parameter before ``p.grad``."""
    if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad or parameter._backward_hooks:
        return False
    return all(getattr(each, "is_idle", False) for each in (parameter._post_accumulate_grad_hooks or {}).values())


def _multiplies(part: nn.Module) -> bool:
    """Return whether a layer's forward is one product of its input with its weight, and a sum with its bias."""
    kind = type(part)
    is_transposed = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return is_transposed or (isinstance(part, nn.Linear) and kind.forward is nn.Linear.forward)
