"""Copies each parameter's gradient into its view of the bucket's flat tensor, and makes that view the parameter's ``.grad``.

Autograd either adds to an existing ``.grad`` or, after ``zero_grad`` has set it to None, makes the tensor that it has just
computed the ``.grad``. In the first case ``.grad`` already is the view and nothing is copied. In the second case one copy,
which also scales, fills the view, and ``.grad`` becomes the view; this moves fewer bytes than adding to a zeroed view would.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .buckets import Placement, same_place


class _WithValue(torch.autograd.Function):
    """Returns a tensor with the value of one tensor and the autograd graph of another."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class HandedOut:
    """The tensors that programs get as ``p.grad``, each over the memory of a view that only this package holds.

    [Note: gradients with other memory] A program may give a gradient other memory and keep the tensor: ``p.grad.data = x``.
    Then the object in ``p.grad`` is still the one that was handed out, but its memory is not the bucket's. So the views
    themselves are never handed out, and a gradient counts as being in its place only while the object in ``p.grad`` is the
    one handed out *and* still has storage, offset, strides and dtype of the view. Any other tensor is copied to its place like
    a gradient that autograd made.

    Args:
        views: the view of each parameter; None for a sparse parameter, which has none.

    Attributes:
        tensors: for each parameter, the tensor that was last handed out as its ``.grad``.
    """

    def __init__(self, views: Sequence[Tensor | None]) -> None:
        self._views = list(views)
        self.tensors = [None if view is None else same_place(view) for view in views]

    def place(self, index: int, view: Tensor) -> None:
        """Replace the view in which the gradient of a parameter lies."""
        self._views[index], self.tensors[index] = view, same_place(view)

    def holds(self, index: int, gradient: Tensor | None) -> bool:
        """Return whether a gradient is the tensor that was handed out and still has the memory of the view."""
        view = self._views[index]
        if gradient is None or view is None or gradient is not self.tensors[index]:
            return False
        return gradient.is_set_to(view) and gradient.dtype == view.dtype

    def hand(self, index: int) -> Tensor | None:
        """Return the tensor to set as ``p.grad``; a new one if the program has given other memory to the last one."""
        view, tensor = self._views[index], self.tensors[index]
        if view is not None and tensor is not None and not tensor.is_set_to(view):
            tensor = self.tensors[index] = same_place(view)
        return tensor

    def accumulating(self, parameters: Sequence[Tensor], indices: Iterable[int]) -> bool:
        """Return whether the ``.grad`` of any of these parameters lies in its view now, so that autograd would add to it.

        Handed-out tensors to which the program has given other memory are replaced by new ones. This may leave out tensors that
        are still in ``p.grad``: :meth:`holds` checks those.
        """
        found = False
        views, tensors = self._views, self.tensors
        for i in indices:
            view, tensor = views[i], tensors[i]
            if view is None or tensor is None:
                continue
            in_grad = parameters[i].grad is tensor
            if found and in_grad:
                continue
            if tensor.is_set_to(view):
                found |= in_grad
            else:
                tensors[i] = same_place(view)
        return found

    def version(self, index: int) -> int:
        """Return autograd's version counter of the handed-out tensor, which counts changes in place."""
        handed = self.hand(index)
        return 0 if handed is None else handed._version

    def num_references(self, indices: Iterable[int]) -> int:
        """Return the largest reference count among these parameters' handed-out tensors."""
        return max((sys.getrefcount(self.tensors[i]) for i in indices), default=0)


class GradientViews:
    """The views of all parameters, and the data that one pass keeps from :meth:`fill` to :meth:`settle`.

    [Note: kept gradients] After ``zero_grad`` has set ``.grad`` to None a program may still hold the gradient of an earlier
    step, or a tensor that shares its memory, and its numbers must not change. Reference counts show this: there are more
    references to a view or to the flat tensor's memory than our own. Such a bucket takes new memory before it is filled.
    Where a ``.grad`` still is its view, gradients are being accumulated, and a program that holds it expects to see that.

    Args:
        parameters: the parameters, by index.
        placement: their buckets.
        frees: whether a bucket has memory only while a gradient lies in it.

    Attributes:
        handed: makes the tensors over the views that programs get as ``p.grad``.
    """

    def __init__(self, parameters: Sequence[Tensor], placement: Placement, frees: bool = False) -> None:
        self._parameters, self._placement, self._frees = parameters, placement, frees
        self._views: list[Tensor | None] = [None] * len(parameters)
        self.handed = HandedOut(self._views)
        for b in range(len(placement.buckets)):
            self._take_views(b)
        self._own_references = [self._count_references(b) for b in range(len(placement.buckets))]
        self.begin(1.0)

    def begin(self, scale: float) -> None:
        """Start a pass.

        Args:
            scale: factor by which gradients are multiplied as they are copied into their views.
        """
        self.scale = scale
        self.filled = [False] * len(self._parameters)
        self.leave()
        self._kept: dict[int, Tensor] = {}  # by parameter unused here: its gradient from before the pass
        self._graphs: dict[int, Tensor] = {}  # gradients with a graph, of backward(create_graph=True)

    def end(self) -> None:
        """End a pass: release the gradients that were kept for :meth:`settle`."""
        self._kept, self._graphs = {}, {}

    def _take_views(self, b: int) -> None:
        bucket, members = self._placement.buckets[b], self._placement.layout[b]
        for i, view in zip(members, bucket.views, strict=False):  # a sparse bucket has no views
            self._views[i] = view
            self.handed.place(i, view)

    def _count_references(self, b: int) -> tuple[int, int]:
        """Return the numbers of references to a bucket's memory, and to the most referenced of its gradients."""
        memory = torch._C._storage_Use_Count(self._placement.buckets[b].flat.untyped_storage()._cdata)
        return memory, self.handed.num_references(self._placement.layout[b])

    def leave(self) -> None:
        """Give buckets without gradients new memory if the program still holds theirs, see [Note: kept gradients]; free it."""
        for b, (bucket, members) in enumerate(zip(self._placement.buckets, self._placement.layout, strict=True)):
            if self.handed.accumulating(self._parameters, members):
                continue
            memory, views = self._count_references(b)
            own_memory, own_views = self._own_references[b]
            is_kept = memory > own_memory or views > own_views
            if is_kept or (self._frees and not bucket.can_be_freed):
                bucket.renew()
                self._take_views(b)
            if self._frees:
                bucket.free()

    def fill(self, index: int, keep: bool = False) -> None:
        """Copy a parameter's gradient, scaled, into its view in the bucket; zeros if it has no gradient.

        Args:
            index: index of the parameter.
            keep: keep a copy of the unscaled gradient, so that :meth:`settle` can put it back.
        """
        self.filled[index] = True
        view = self._views[index]
        if view is None:
            return
        if self._frees:
            self._placement.buckets[self._placement.bucket_of[index]].hold()
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
            return
        if keep:
            self._kept[index] = gradient.detach().clone()
        handed = self.handed.tensors[index]
        if gradient is handed and self.handed.holds(index, gradient):
            if self.scale != 1.0:
                view.mul_(self.scale)
        elif gradient.requires_grad or gradient.is_sparse:
            self._fill_other(index, gradient, view)
        else:
            torch.mul(gradient, self.scale, out=view)
            parameter.grad = self.handed.hand(index) if gradient is handed else handed

    def _fill_other(self, index: int, gradient: Tensor, view: Tensor) -> None:
        with torch.no_grad():  # with create_graph=True autograd would record these operations
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            view.mul_(self.scale)
        if gradient.requires_grad:
            self._graphs[index] = gradient
        else:
            self._parameters[index].grad = self.handed.hand(index)

    def fill_together(self, indices: Sequence[int]) -> None:
        """Fill the views of several parameters with one copying call, which is faster for many small ones."""
        sources, targets = [], []
        for b in {self._placement.bucket_of[i] for i in indices} if self._frees else ():
            self._placement.buckets[b].hold()
        for i in indices:
            view, gradient = self._views[i], self._parameters[i].grad
            if (
                view is None
                or gradient is None
                or gradient.requires_grad
                or gradient.is_sparse
                or self.handed.holds(i, gradient)
            ):
                self.fill(i)
                continue
            self.filled[i] = True
            sources.append(gradient)
            targets.append(view)
            self._parameters[i].grad = self.handed.hand(i)
        if targets:
            torch._foreach_copy_(targets, sources)
            torch._foreach_mul_(targets, self.scale)

    def settle(self, index: int, used: bool) -> None:
        """Make the result of the exchange the parameter's ``.grad``, when the exchange has ended.

        Args:
            index: index of the parameter.
            used: whether any rank had a gradient for it in this pass. If none had, ``.grad`` is set to its value from before.
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
            # A second backward, through this graph, differentiates this rank's own gradient; its pass averages over the ranks.
            with torch.enable_grad():
                parameter.grad = _WithValue.apply(local, view)  # type: ignore[no-untyped-call]
        elif parameter.grad is None:
            parameter.grad = self.handed.hand(index)

    def show(self, index: int) -> None:
        """Make the exchange's result the ``.grad`` on a rank that has run out of data: a sharded optimizer steps there too."""
        if self._views[index] is not None:
            self._parameters[index].grad = self.handed.hand(index)
