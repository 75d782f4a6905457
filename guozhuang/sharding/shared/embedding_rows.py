"""Gradients of embeddings without their zeros: the rows of a batch are written into a gradient that is zeros already.

[Note: a gradient that is lent]
PyTorch makes the gradient of an embedding anew in each backward: memory for all rows, zeros in it, then the few rows
of the batch. For a vocabulary of 30,000 and a width of 768 that is 94 MB, and several percent of a step of BERT-base.
Here each embedding has a gradient that lives on; backward clears the rows of last time, adds those of this time, and
hands it to autograd as the gradient it is: dense, of the weight's shape. To autograd and the program nothing is
different, as long as nobody else holds this memory. So it is lent only
 - while ``p.grad`` is None. A second backward, a second use of the embedding in one forward and the like get what
   PyTorch makes, which autograd adds up.
 - while no tensor but the lender's own holds the memory (the storage counts its holders). What the program kept of an
   earlier step, or got from ``autograd.grad``, stays the program's own, and the lender makes itself other memory.
Which rows hold something is remembered, so that only they need to go to the other ranks; it is forgotten where the gradient
was changed after it arrived. Autograd's version counter tells; writes through ``.data``, which pass it by, are looked for in a
sample of the rows, since whoever changes rows that no batch named (weight decay by hand, noise) changes them all.
With ``create_graph=True``, under compilation, tracing and functorch, or if the embedding has ``max_norm``,
``scale_grad_by_freq`` or ``sparse``, nothing is done at all.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from .output_hooks import OutputHook, has_plain_weight, holders_of, is_traced, without_history

#: Below this size of the weight there is nothing to gain.
SMALLEST_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 4096
_SAMPLES: Final = 64


class LentGradient:
    """The gradient of one embedding, and which of its rows hold something. See [Note: a gradient that is lent].

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
        """Tell whether the weight has no gradient yet, so that one may be lent."""
        return self.parameter.grad is None

    def lend(self, rows: Tensor, values: Tensor) -> Tensor:
        """Return the gradient whose rows are sums of ``values``.

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
        # A tensor of its own over the memory: autograd keeps a gradient that nobody else refers to, and would copy another.
        # It shares the version counter.
        alias = self._view.detach()
        self._version = alias._version
        return alias

    def rows_of(self, gradient: Tensor) -> Tensor | None:
        """Return the rows of ``p.grad`` that may hold something; None if that may be any."""
        if (
            gradient.data_ptr() != self._view.data_ptr()
            or gradient.shape != self._view.shape
            or gradient._version != self._version
            or self._view._version != self._version
        ):
            return None
        held = self._view[self._sample, 0] != 0
        if held.any() and not torch.isin(self._sample[held], self._rows).all():
            self._version = -1  # so that all of it is cleared
            return None
        return self._rows


class RowPlace:
    """The place of such a gradient in memory that other ranks read, with marks of its pages (groups/shared_memory/sparse.py).

    Args:
        view: num_rows x width, zeros, row-major.
        marks: uint8, zeros; of the pages from the one that ``view`` begins in to the one that it ends in.
    """

    def __init__(self, view: Tensor, marks: Tensor) -> None:
        self._view, self._marks = view, marks
        self._row_bytes = view.shape[1] * view.itemsize
        self._start = view.data_ptr() % _PAGE_BYTES
        self._rows: Tensor | None = None

    def put(self, gradient: Tensor, rows: Tensor) -> None:
        """Make the place equal to a gradient that holds something in these rows only."""
        with torch.no_grad():
            if self._rows is None:
                self._view.zero_()
                self._marks.zero_()
            else:
                self._view.index_fill_(0, self._rows, 0.0)
                self._mark(self._rows, 0)
            self._view.index_copy_(0, rows, gradient.index_select(0, rows))
            self._mark(rows, 1)
        self._marks[0] = self._marks[-1] = 1  # neighbours lie in these pages too
        self._rows = rows

    def forget(self) -> None:
        """Take note that somebody else writes to the place."""
        self._rows = None

    def _mark(self, rows: Tensor, value: int) -> None:
        begin = rows * self._row_bytes + self._start
        first, last = begin // _PAGE_BYTES, (begin + self._row_bytes - 1) // _PAGE_BYTES
        for k in range((self._row_bytes - 1) // _PAGE_BYTES + 2):
            self._marks[torch.minimum(first + k, last)] = value


class LendingHook(OutputHook):
    """A forward hook of an embedding: lets its backward write into the gradient that is lent."""

    def __init__(self, lent: LentGradient) -> None:
        self._lent = lent

    def __call__(self, module: nn.Embedding, args: tuple[Any, ...], output: Any) -> Tensor | None:
        """Return the output with another backward, or None where PyTorch's own is to run."""
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
    """What autograd is to carry along without looking at it."""

    def __init__(self, output: Tensor, lent: LentGradient, padding_idx: int | None) -> None:
        self.output, self.lent, self.padding_idx = output, lent, padding_idx


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, holder: _Unseen) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.lent, ctx.padding_idx = holder.lent, holder.padding_idx
        ctx.num_rows = weight.shape[0]
        return without_history(holder.output)

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
    """Return the embeddings whose gradient can be lent."""
    return [
        part
        for part in model.modules()
        if isinstance(part, nn.Embedding) and has_plain_weight(part, nn.Embedding, SMALLEST_BYTES)
    ]
