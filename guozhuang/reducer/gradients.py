"""One parameter's gradient on its way into the flat tensor of its bucket, and what ``.grad`` is afterwards.

Autograd either adds to an existing ``.grad`` or, after ``zero_grad`` has set it to None, hands over the tensor it has just
computed. In the first case ``.grad`` already is the view and nothing moves; in the second one copy, which also scales, puts it
there, and ``.grad`` becomes the view. That copy moves fewer bytes than adding to a zeroed view would.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _WithValue(torch.autograd.Function):
    """The value of one tensor with the graph of another."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class GradientViews:
    """The views of all parameters, and what is remembered between filling and settling them in one pass.

    Args:
        parameters: the parameters, by index.
        views: their views into the buckets; None for a sparse one.
    """

    def __init__(self, parameters: Sequence[Tensor], views: Sequence[Tensor | None]) -> None:
        assert len(parameters) == len(views)
        self._parameters = parameters
        self._views = [None if view is None else _alias(view) for view in views]  # held by nobody but this list
        self._num_own_references: int | None = None  # to a view, as counted in `_own`; it depends on the interpreter
        self.scale = 1.0  # what gradients are multiplied with on their way in
        self.filled = [False] * len(parameters)
        self._kept: dict[int, Tensor] = {}  # gradients from before the pass, of parameters that it did not use here
        self._graphs: dict[int, Tensor] = {}  # gradients of backward(create_graph=True)

    def begin(self, scale: float) -> None:
        """Start a pass."""
        self.scale = scale
        self.filled = [False] * len(self._parameters)
        self._kept.clear()
        self._graphs.clear()

    def fill(self, index: int, keep: bool = False) -> None:
        """Put the gradient, scaled, into its view; zeros where there is none.

        Args:
            index: the parameter.
            keep: remember the gradient as it was, for :meth:`settle` to put back.
        """
        self.filled[index] = True
        view = self._views[index]
        if view is None:
            return
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is not view:
            view = self._own(index, view)
        if gradient is None:
            view.zero_()
            return
        if keep:
            self._kept[index] = gradient.detach().clone()
        if gradient is view:
            if self.scale != 1.0:
                view.mul_(self.scale)
        elif gradient.requires_grad or gradient.is_sparse:
            self._fill_other(index, gradient, view)
        else:
            torch.mul(gradient, self.scale, out=view)
            parameter.grad = view

    def _own(self, index: int, view: Tensor) -> Tensor:
        """Return the view to write to. Where the user has kept the gradient of an earlier step, that one becomes a copy."""
        num_references = sys.getrefcount(view)
        if self._num_own_references is None:
            self._num_own_references = num_references  # the first call comes before the user was given any
        if num_references <= self._num_own_references:
            return view
        fresh = self._views[index] = _alias(view)
        view.set_(view.clone())  # type: ignore[call-overload]
        return fresh

    def _fill_other(self, index: int, gradient: Tensor, view: Tensor) -> None:
        with torch.no_grad():  # under create_graph, autograd records during backward
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            view.mul_(self.scale)
        if gradient.requires_grad:
            self._graphs[index] = gradient
        else:
            self._parameters[index].grad = view

    def fill_together(self, indices: Sequence[int]) -> None:
        """Fill several with one copying call; for many small parameters."""
        sources, targets = [], []
        for i in indices:
            view, gradient = self._views[i], self._parameters[i].grad
            plain = (
                gradient is not None and gradient is not view and not gradient.requires_grad and not gradient.is_sparse
            )
            if view is None or gradient is None or not plain:
                self.fill(i)
                continue
            self.filled[i] = True
            view = self._own(i, view)
            sources.append(gradient)
            targets.append(view)
            self._parameters[i].grad = view
        if targets:
            torch._foreach_copy_(targets, sources)
            torch._foreach_mul_(targets, self.scale)

    def settle(self, index: int, used: bool) -> None:
        """Give the parameter its result, when the exchange has ended.

        Args:
            index: the parameter.
            used: whether any rank had a gradient for it in this pass. Where none had, ``.grad`` is what it was before.
        """
        view = self._views[index]
        if view is None:
            return
        parameter = self._parameters[index]
        kept = self._kept.get(index)
        if not used:
            if kept is not None:
                view.copy_(kept)
        elif (local := self._graphs.get(index)) is not None:
            # Every rank differentiates its own part of the mean; the pass of that second backward averages the parts.
            with torch.enable_grad():
                parameter.grad = _WithValue.apply(local, view)  # type: ignore[no-untyped-call]
        elif parameter.grad is None:
            parameter.grad = view

    def show(self, index: int) -> None:
        """Make the result the gradient on a rank without data: a sharded optimizer steps there too."""
        view = self._views[index]
        if view is not None:
            self._parameters[index].grad = view


def _alias(view: Tensor) -> Tensor:
    """Return another tensor object with the same memory."""
    empty = torch.empty(0, dtype=view.dtype, device=view.device)
    return empty.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
