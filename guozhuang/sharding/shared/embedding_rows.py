"""Gradients of embeddings without writing zeros: the rows of a batch are added to a gradient that is zero already.

[Note: a gradient that is lent]
PyTorch allocates the gradient of an embedding in each backward: memory for all rows, zeros in it, then the few rows
of the batch. For a vocabulary of 30,000 and a width of 768 that is 94 MB, and several percent of a step of BERT-base.
Here each embedding has one persistent gradient; backward clears the rows of the last step, adds those of this step, and
passes it to autograd as an ordinary gradient: dense, of the weight's shape. Autograd and the program see no
difference, as long as nobody else holds this memory. So it is lent only
 - while ``p.grad`` is None. A second backward or a second use of the embedding in one forward gets a gradient made by
   PyTorch, which autograd adds up.
 - while no tensor but the lender's own holds the memory (the storage counts its holders). If the program kept the gradient
   of an earlier step, or got it from ``autograd.grad``, it keeps that memory, and the lender allocates another.
The rows that may be nonzero are remembered, so that only they need to be sent to the other ranks; they are forgotten if the
gradient was changed after it arrived. Autograd's version counter shows such a change. Writes through ``.data`` bypass it, so a
sample of the rows is tested too: code that changes rows outside the batch (weight decay by hand, noise) changes them all.
With ``create_graph=True``, under compilation, tracing and functorch, or if the embedding has ``max_norm``,
``scale_grad_by_freq`` or ``sparse``, PyTorch's own backward runs instead.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from ...gradients.buckets import same_place
from ...gradients.output_hooks import OutputHook, has_plain_weight, holders_of, is_traced

#: Weights smaller than this are left to PyTorch: there is nothing to gain.
SMALLEST_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 4096
_SAMPLES: Final = 64


class LentGradient:
    """One embedding's persistent gradient, and the rows of it that may be nonzero. See [Note: a gradient that is lent].

    Args:
        parameter: the weight, num_rows x width, row-major.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        generator = torch.Generator().manual_seed(parameter.shape[0])
        self._sample = torch.randint(parameter.shape[0], (_SAMPLES,), generator=generator)
        self._make()

    def _make(self) -> None:
        self._view = torch.zeros(self.parameter.shape, dtype=self.parameter.dtype)
        self._rows: Tensor = self._sample[:0]
        self._version = self._view._version
        self._num_holders = holders_of(self._view)

    def is_free(self) -> bool:
        """Tell whether ``parameter.grad`` is None, so that the gradient may be lent."""
        return self.parameter.grad is None

    def lend(self, rows: Tensor, values: Tensor) -> Tensor:
        """Return a gradient whose row ``rows[k]`` has ``values[k]`` added to it, for every k; all other rows are zero.

        Args:
            rows: 1-d indices of rows of the weight.
            values: len(rows) x width, of the weight's dtype.
        """
        if holders_of(self._view) != self._num_holders:
            self._make()
        elif self._view._version != self._version:
            self._view.zero_()
        else:
            self._view.index_fill_(0, self._rows, 0.0)
        self._view.index_add_(0, rows, values)
        self._rows = rows
        # A new tensor over the same memory: autograd stores a gradient without a copy only if nobody else refers to it. The
        # alias shares the version counter.
        alias = self._view.detach()
        self._version = alias._version
        return alias

    def rows_of(self, gradient: Tensor) -> Tensor | None:
        """Return the rows of a ``p.grad`` that may be nonzero; None if all may be, because it was changed or is not lent."""
        if (
            gradient.data_ptr() != self._view.data_ptr()
            or gradient.shape != self._view.shape
            or gradient._version != self._version
            or self._view._version != self._version
        ):
            return None
        held = self._view[self._sample, 0] != 0
        if held.any() and not torch.isin(self._sample[held], self._rows).all():
            self._version = -1  # a version that never matches, so that the next ``lend`` clears the whole gradient
            return None
        return self._rows


class RowPlace:
    """A copy of an embedding's gradient in memory that other ranks read, with a mark for each page that may be nonzero.

    Args:
        view: num_rows x width, zeros, row-major; the memory for the copy.
        marks: uint8, zeros; one for each page that ``view`` overlaps, 1 where the page may be nonzero.
    """

    def __init__(self, view: Tensor, marks: Tensor) -> None:
        self._view, self._marks = view, marks
        self._row_bytes = view.shape[1] * view.itemsize
        self._start = view.data_ptr() % _PAGE_BYTES
        self._rows: Tensor | None = None

    def put(self, gradient: Tensor, rows: Tensor) -> None:
        """Make the copy equal to ``gradient``, which is nonzero only in ``rows``."""
        with torch.no_grad():
            if self._rows is None:
                self._view.zero_()
                self._marks.zero_()
            else:
                self._view.index_fill_(0, self._rows, 0.0)
                self._mark(self._rows, 0)
            self._view.index_copy_(0, rows, gradient.index_select(0, rows))
            self._mark(rows, 1)
        self._marks[0] = self._marks[-1] = 1  # always marked: other parameters may share the first and the last page
        self._rows = rows

    def forget(self) -> None:
        """Forget which rows are nonzero, because other code writes to the memory; the next ``put`` clears all of it."""
        self._rows = None

    def _mark(self, rows: Tensor, value: int) -> None:
        begin = rows * self._row_bytes + self._start
        first, last = begin // _PAGE_BYTES, (begin + self._row_bytes - 1) // _PAGE_BYTES
        for k in range((self._row_bytes - 1) // _PAGE_BYTES + 2):
            self._marks[torch.minimum(first + k, last)] = value


class LendingHook(OutputHook):
    """A forward hook of an embedding that replaces its backward by one that writes into the lent gradient."""

    def __init__(self, lent: LentGradient) -> None:
        self._lent = lent

    def __call__(self, module: nn.Embedding, args: tuple[Any, ...], output: Any) -> Tensor | None:
        """Return the output with the replaced backward, or None to keep PyTorch's own."""
        if is_traced():
            return None
        if not (torch.is_grad_enabled() and isinstance(output, Tensor) and module.weight is self._lent.parameter):
            return None
        if type(output.grad_fn).__name__ != "EmbeddingBackward0" or len(args) != 1 or not _is_plain(module):
            return None
        apply: Any = _Rows.apply
        result: Tensor = apply(module.weight, args[0], _Unseen(output, self._lent, module.padding_idx))
        return result


class _Unseen:
    """Arguments hidden in one object, so that autograd does not treat the tensors among them as inputs."""

    def __init__(self, output: Tensor, lent: LentGradient, padding_idx: int | None) -> None:
        self.output, self.lent, self.padding_idx = output, lent, padding_idx


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, holder: _Unseen) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.lent, ctx.padding_idx = holder.lent, holder.padding_idx
        ctx.num_rows = weight.shape[0]
        return same_place(holder.output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (indices,), gradient = ctx.saved_tensors, gradients[0]
        lent: LentGradient = ctx.lent
        if torch.is_grad_enabled() or gradient.dtype != lent.parameter.dtype or not lent.is_free():
            padding = -1 if ctx.padding_idx is None else ctx.padding_idx
            return torch.ops.aten.embedding_dense_backward(gradient, indices, ctx.num_rows, padding, False), None, None
        rows, values = indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding_idx is not None:
            kept = rows != ctx.padding_idx
            rows, values = rows[kept], values[kept]
        return lent.lend(rows, values), None, None


def _is_plain(module: nn.Embedding) -> bool:
    return not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)


def embeddings_of(model: nn.Module) -> list[nn.Embedding]:
    """Return the model's embeddings whose gradients can be lent."""
    return [
        part
        for part in model.modules()
        if isinstance(part, nn.Embedding) and has_plain_weight(part, nn.Embedding, SMALLEST_BYTES)
    ]
