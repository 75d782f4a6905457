"""The gradients of a node: one shared-memory buffer per rank, and sums over all buffers of the part that a rank owns.

[Note: which way a gradient goes]
Autograd leaves each gradient in its own memory, except those of large linear layers, which are computed in the
shared buffer (linear_gradients.py). The others are copied to the buffer in one of three ways:
 - *eagerly*: a hook copies the gradient when it is complete, while it is in the cache, and ``p.grad`` becomes the
   buffer's view of it. The old memory is free at once, and the next gradient reuses it warm. Later backwards accumulate
   into the view.
 - *by rows*: for a large embedding only the rows that a batch named are copied, at the step (embedding_rows.py).
 - *late*: the gradient is copied at the step, without pages of zeros (groups/shared_memory/sparse.py). This way is for
   gradients that are mostly zeros, for small ones, for which a hook takes longer than the copy, and for all in the first step,
   which shows which are mostly zeros. Ranks may choose differently. Nothing is assumed of the gradient before the step, so it
   does not matter how or when it was changed.
Other ranks may read a gradient from the first barrier of a step to the second ([Note: one copy of the weights] in
weights.py); nothing writes to the buffer then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from ...gradients.buckets import view_in
from ...gradients.step_reducer import check_gradient
from ...gradients.views import HandedOut
from ...groups.fake import FakeSegments
from ...groups.shared_memory.program import DTYPE_OF
from ...groups.shared_memory.segments import Segment, SharedSegments
from ...groups.shared_memory.sparse import PAGE_BYTES, Piece, add, num_pages, take
from ..parts import Block, BucketLayout
from .embedding_rows import LentGradient, RowPlace
from .linear_gradients import GradientPlace
from .weights import ALIGN_BYTES, SegmentPlaces

EAGER_BYTES: Final = 1 << 16  # smaller gradients are copied at the step: a hook for them would cost more than it saves
_MOSTLY: Final = 0.5  # a gradient with a larger share of nonzero pages is copied by a hook during backward


class Stretch(NamedTuple):
    """A range of a bucket whose gradients are summed over the ranks at once.

    Attributes:
        start: offset in the segment, in bytes.
        num_bytes: length.
        dtype: dtype of the elements.
        blocks: indices of the blocks in this range.
    """

    start: int
    num_bytes: int
    dtype: torch.dtype
    blocks: tuple[int, ...]


class SharedGradients:
    """The gradient buffers of a node. Every rank must make one, with an equal layout. See [Note: which way a gradient goes].

    Attributes:
        views: each parameter's part of this rank's buffer, in the parameter's shape.
        handed: makes the tensors over ``views`` that programs get as ``p.grad``.
    """

    def __init__(
        self,
        segments: SharedSegments | FakeSegments,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: BucketLayout,
        where: SegmentPlaces,
    ) -> None:
        self._names, self._parameters, self._layout, self._where = names, parameters, layout, where
        self._rank, self._scale = segments.rank, 1.0 / segments.size
        # Behind the gradients, a buffer holds a mark for each page, and a flag for each parameter that has a gradient.
        self._marks_start = where.num_bytes
        self._used_start = self._marks_start + where.num_bytes // PAGE_BYTES
        made = segments.make(self._used_start + max(len(parameters), 1), "gradients")
        self._segments: list[Segment] = [segment for segment in made if segment is not None]
        for segment in self._segments:
            segment.close_descriptor()
        own = self._segments[self._rank]
        self.address = own.address
        # Each view has a storage of its own, so that saving one tensor does not save the whole buffer.
        self.views: list[Tensor] = [
            view_in(own.tensor(start, p.numel(), p.dtype), 0, p)
            for start, p in zip(where.starts, parameters, strict=True)
        ]
        self.handed = HandedOut(self.views)
        self._marks = own.tensor(self._marks_start, where.num_bytes // PAGE_BYTES, torch.uint8)
        self._used = [segment.tensor(self._used_start, len(parameters), torch.uint8) for segment in self._segments]
        self._is_eager = [False] * len(parameters)
        self._lent: dict[int, tuple[LentGradient, RowPlace]] = {}
        self._computed: dict[int, GradientPlace] = {}
        self._filled = [False] * len(parameters)  # whether the parameter's part of the buffer may be nonzero
        self._has_chosen = False
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def lend(self, index: int) -> LentGradient:
        """Return the object that lends the embedding weight ``index`` a persistent gradient."""
        if index not in self._lent:
            place = RowPlace(self.views[index], self._marks_of(index))
            self._lent[index] = LentGradient(self._parameters[index]), place
        return self._lent[index][0]

    def compute(self, index: int) -> GradientPlace:
        """Return the part of the buffer in which a linear layer's backward may compute its weight's gradient."""
        if index not in self._computed:
            self._computed[index] = GradientPlace(self._parameters[index], self.views[index])
        return self._computed[index]

    # ---- methods that copy this rank's gradients to its buffer ----------------------------

    def on_gradient(self, index: int) -> None:
        """Copy a gradient to the buffer as soon as autograd has accumulated it, if the parameter is copied eagerly."""
        if not self._is_eager[index]:
            return
        view, gradient = self.views[index], self._parameters[index].grad
        if gradient is None or self.handed.holds(index, gradient):
            return
        if gradient.requires_grad:  # made with create_graph=True, so the user must keep this very tensor
            return
        check_gradient(gradient, view, self._names[index], self._rank)
        if gradient.stride() == view.stride():
            if gradient.data_ptr() != view.data_ptr():  # not if backward has computed the gradient in the buffer
                take([(view.data_ptr(), gradient.data_ptr(), self._where.sizes[index], 0)])
        else:
            with torch.no_grad():
                view.copy_(gradient.clone() if gradient.data_ptr() == view.data_ptr() else gradient)
        self._filled[index] = True
        self._parameters[index].grad = self.handed.hand(index)

    def take(self) -> bool:
        """Copy all gradients that are not in the buffer yet. Not collective; called before the first barrier of a step.

        Returns:
            Whether every parameter has a gradient.

        Raises:
            UsageError: a gradient is sparse or of another dtype.
        """
        pieces: list[Piece] = []
        unused: list[int] = []
        for i, (parameter, view) in enumerate(zip(self._parameters, self.views, strict=True)):
            gradient = parameter.grad
            if self.handed.holds(i, gradient):
                self._filled[i] = True
            elif gradient is None:
                unused.append(i)
                if self._filled[i]:
                    view.zero_()
                    self._filled[i] = False
            elif i in self._lent and (rows := self._lent[i][0].rows_of(gradient)) is not None:
                self._lent[i][1].put(gradient, rows)
                self._filled[i] = True
            else:
                check_gradient(gradient, view, self._names[i], self._rank)
                self._filled[i] = True
                start, size = self._where.starts[i], self._where.sizes[i]
                marks = 0 if self._is_eager[i] else self._mark_of(start)
                if i in self._lent:
                    self._lent[i][1].forget()
                if gradient.stride() == view.stride():
                    pieces.append((self.address + start, gradient.data_ptr(), size, marks))
                else:
                    with torch.no_grad():
                        view.copy_(gradient)
                    self._mark_all(i)
        if pieces:
            take(pieces)
        used = self._used[self._rank]
        used.fill_(1)
        for i in unused:
            used[i] = 0
        if not self._has_chosen:
            self._choose(unused)
        return not unused

    def _choose(self, unused: Sequence[int]) -> None:
        self._has_chosen = True
        for i, size in enumerate(self._where.sizes):
            if size < EAGER_BYTES or i in unused or i in self._lent:
                continue
            marks = self._marks_of(i)
            if float(marks.count_nonzero()) > _MOSTLY * marks.numel():
                self._mark_all(i)
                self._is_eager[i] = True
                if i in self._computed:
                    self._computed[i].is_used = True

    def _mark_of(self, start: int) -> int:
        return self.address + self._marks_start + start // PAGE_BYTES

    def _mark_all(self, index: int) -> None:
        self._marks_of(index).fill_(1)

    def _marks_of(self, index: int) -> Tensor:
        start, size = self._where.starts[index], self._where.sizes[index]
        first = start // PAGE_BYTES
        return self._marks[first : first + num_pages(start, size)]

    # ---- methods that read all ranks' gradients, between the two barriers of a step ------------------------------------------

    def used(self) -> list[bool]:
        """Return for each parameter whether any rank has a gradient."""
        return [bool(flag) for flag in torch.stack(self._used).amax(0).tolist()] if self._used[0].numel() else []

    def runs(self, blocks: Sequence[Block], cap_bytes: int) -> list[Stretch]:
        """Join neighbouring blocks to stretches so small that a sum is still in the cache when the optimizer steps it.

        The last blocks of the buffer come first: their gradients arrived last, and are in the cache.
        """
        found: list[Stretch] = []
        for i, block in enumerate(blocks):
            itemsize = self._layout.buckets[block.bucket].dtype.itemsize
            start = self._where.bucket_starts[block.bucket] + block.start * itemsize
            num_bytes = block.num_elements * itemsize
            last = found[-1] if found else None
            if (
                last is not None
                and last.start + last.num_bytes == start
                and last.num_bytes + num_bytes <= cap_bytes
                and blocks[last.blocks[-1]].bucket == block.bucket
            ):
                found[-1] = Stretch(last.start, last.num_bytes + num_bytes, last.dtype, (*last.blocks, i))
            else:
                found.append(Stretch(start, num_bytes, self._layout.buckets[block.bucket].dtype, (i,)))
        return found[::-1]

    def sum_into(self, run: Stretch, into: Tensor, weights: Sequence[float] | None = None) -> None:
        """Write the mean over ranks of a stretch's gradients, each times its rank's weight, to a 1-d tensor of its size."""
        if weights is not None:
            total = into if run.dtype.itemsize >= 4 else torch.empty_like(into, dtype=torch.float32)  # rounded once
            for i, (segment, weight) in enumerate(zip(self._segments, weights, strict=True)):
                own, factor = segment.tensor(run.start, into.numel(), run.dtype), weight * self._scale
                torch.mul(own, factor, out=total) if i == 0 else total.add_(own, alpha=factor)
            if total is not into:
                into.copy_(total)
            return
        srcs = tuple(segment.address + run.start for segment in self._segments)
        page = self._marks_start + run.start // PAGE_BYTES
        marks = tuple(segment.address + page for segment in self._segments)
        add(into.data_ptr(), srcs, marks, run.num_bytes, DTYPE_OF[run.dtype], self._scale)


assert ALIGN_BYTES % PAGE_BYTES == 0
