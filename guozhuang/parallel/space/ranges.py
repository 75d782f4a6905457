"""The arithmetic of rows: which rows of a divided dimension a rank has, which it needs, and which travel between whom.

A dimension of ``size`` rows is divided over ``num`` ranks into equal parts (to one row), whatever the operation that made it:
two tensors of one size are always divided alike. Every rank computes what all ranks need, so that nothing is asked for.

The rule for a convolution or pooling: outputs [a, b) need the inputs [a * stride - before, (b - 1) * stride - before +
dilation * (kernel - 1) + 1). Where parts are small, these come from ranks beyond the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..spans import Span, parts


@dataclass(frozen=True)
class RowPiece:
    """Rows ``rows`` of the source, in this order, which become the rows from ``at`` on of the target."""

    at: int
    rows: range


@dataclass(frozen=True)
class Want:
    """What a rank's target of ``length`` rows is made of. Rows that no piece covers are filled with a constant."""

    length: int
    pieces: tuple[RowPiece, ...]


@dataclass(frozen=True)
class RowPlan:
    """What one rank does so that every rank gets what it wants.

    Attributes:
        length: the number of rows of this rank's target.
        own: pieces that come from this rank's own rows, counted from its first row.
        sends: for each rank that gets rows of this one, its number and the rows, counted from this rank's first row.
        receives: for each rank that sends rows to this one, its number and where they go; the rows of these pieces count
            from 0 in the message.
        is_identity: every rank's target equals its part of the source, so that nothing has to be done.
        num_rows: how many rows this rank has.
    """

    length: int
    own: tuple[RowPiece, ...]
    sends: tuple[tuple[int, tuple[range, ...]], ...]
    receives: tuple[tuple[int, tuple[RowPiece, ...]], ...]
    is_identity: bool
    num_rows: int


def _held(rows: range, span: Span) -> tuple[int, int]:
    """Return (first, behind the last) position in ``rows`` of those rows that lie in the span."""
    ordered = rows if rows.step > 0 else rows[::-1]
    first = max(0, -(-(span[0] - ordered.start) // ordered.step))
    stop = min(len(ordered), -(-(span[1] - ordered.start) // ordered.step))
    first, stop = min(first, len(ordered)), max(stop, 0)
    if first >= stop:
        return 0, 0
    return (first, stop) if rows.step > 0 else (len(rows) - stop, len(rows) - first)


def _moves(want: Want, span: Span) -> Iterator[RowPiece]:
    """Yield the pieces of what is wanted that come from the rank which has the span, counted from the span's start."""
    for piece in want.pieces:
        first, stop = _held(piece.rows, span)
        if first < stop:
            rows = piece.rows[first:stop]
            end = rows[-1] + (1 if rows.step > 0 else -1) - span[0]
            yield RowPiece(piece.at + first, range(rows.start - span[0], end, rows.step))


def plan(have: Sequence[Span], wants: Sequence[Want], rank: int) -> RowPlan:
    """Return what ``rank`` does, where each rank has the rows of ``have`` and wants those of ``wants``."""
    sends, receives = [], []
    for peer in range(len(have)):
        if peer != rank:
            if away := tuple(piece.rows for piece in _moves(wants[peer], have[rank])):
                sends.append((peer, away))
            if coming := tuple(_in_message(_moves(wants[rank], have[peer]))):
                receives.append((peer, coming))
    start, stop = have[rank]
    same = [
        want.length == stop - start and want.pieces == (RowPiece(0, range(start, stop)),)
        for want, (start, stop) in zip(wants, have, strict=True)
    ]
    own = tuple(_moves(wants[rank], have[rank]))
    return RowPlan(wants[rank].length, own, tuple(sends), tuple(receives), all(same), stop - start)


def _in_message(pieces: Iterator[RowPiece]) -> Iterator[RowPiece]:
    start = 0
    for piece in pieces:
        yield RowPiece(piece.at, range(start, start + len(piece.rows)))
        start += len(piece.rows)


def cover(start: int, stop: int, size: int) -> Want:
    """Want rows [start, stop); those outside of [0, size) are filled."""
    first, behind = max(start, 0), min(stop, size)
    return Want(stop - start, (RowPiece(first - start, range(first, behind)),) if first < behind else ())


@dataclass(frozen=True)
class SlidingWindow:
    """The window of a convolution or pooling along the divided dimension.

    Attributes:
        before, after: rows of padding.
        ceil: count a last window that is not full, as pooling with ``ceil_mode`` does.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    ceil: bool = False

    def num_outputs(self, size: int) -> int:
        """Return the number of outputs for ``size`` inputs; 0 or less if the window does not fit."""
        room = size + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        if not self.ceil:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
        return count - 1 if (count - 1) * self.stride >= size + self.before else count

    def needs(self, outputs: Span) -> Span:
        """Return the inputs that the outputs need; they may lie outside of what there is."""
        a, b = outputs
        return a * self.stride - self.before, (b - 1) * self.stride - self.before + self.dilation * (
            self.kernel - 1
        ) + 1

    def num_inside(self, output: int, size: int, count_padding: bool) -> int:
        """Return how many rows average pooling divides by for one output: those inside, or those of the padded image."""
        start = output * self.stride - self.before
        stop = min(start + self.kernel, size + self.after)
        return stop - start if count_padding else min(stop, size) - max(start, 0)


@dataclass(frozen=True)
class TransposedWindow:
    """The window of a transposed convolution along the divided dimension; ``extra`` is its output padding."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    extra: int = 0

    def num_outputs(self, size: int) -> int:
        """Return the number of outputs for ``size`` inputs."""
        return (size - 1) * self.stride - 2 * self.padding + self.dilation * (self.kernel - 1) + self.extra + 1

    def needs(self, outputs: Span) -> Span:
        """Return inputs whose transposed windows contain all the outputs and all that contributes to them."""
        a, b = outputs
        reach = self.dilation * (self.kernel - 1)
        start = (a + self.padding - reach) // self.stride
        last = max((b - 1 + self.padding) // self.stride, -(-(b - 1 + self.padding - reach) // self.stride))
        return start, last + 1

    def first_made(self, outputs: Span) -> int:
        """Return the first output row that the inputs of ``needs`` make without padding; it is at most ``outputs[0]``."""
        return self.needs(outputs)[0] * self.stride - self.padding


Window = SlidingWindow | TransposedWindow


@lru_cache(maxsize=4096)
def window_plan(window: Window, size: int, num: int, rank: int) -> RowPlan:
    """Return how every rank gets the inputs of its part of a window's outputs."""
    wants = [cover(*window.needs(span), size) for span in parts(window.num_outputs(size), num)]
    return plan(parts(size, num), wants, rank)


def _portion(pieces: Sequence[RowPiece], span: Span) -> Want:
    start, stop = span
    found = []
    for piece in pieces:
        first, behind = max(start, piece.at), min(stop, piece.at + len(piece.rows))
        if first < behind:
            found.append(RowPiece(first - start, piece.rows[first - piece.at : behind - piece.at]))
    return Want(stop - start, tuple(found))


@lru_cache(maxsize=1024)
def rows_plan(pieces: tuple[RowPiece, ...], length: int, size: int, num: int, rank: int) -> RowPlan:
    """Return how every rank gets its part of ``length`` rows that are made of pieces of ``size`` rows."""
    return plan(parts(size, num), [_portion(pieces, span) for span in parts(length, num)], rank)


def padded_rows(size: int, before: int, after: int, mode: str) -> tuple[RowPiece, ...]:
    """Return of which rows a padded dimension is made, for the modes of ``torch.nn.functional.pad``; negative pads cut off."""
    first, behind = max(0, -before), size - max(0, -after)
    middle = [RowPiece(max(before, 0), range(first, behind))] if first < behind else []
    if mode == "constant":
        return tuple(middle)
    top, end = max(before, 0), max(before, 0) + behind - first
    if mode == "replicate":
        above = [RowPiece(i, range(first, first + 1)) for i in range(top)]
        below = [RowPiece(end + i, range(behind - 1, behind)) for i in range(max(after, 0))]
    elif mode == "reflect":
        above = [RowPiece(0, range(first + top, first, -1))] if top else []
        below = [RowPiece(end, range(behind - 2, behind - 2 - after, -1))] if after > 0 else []
    else:
        assert mode == "circular", mode
        above = [RowPiece(0, range(behind - top, behind))] if top else []
        below = [RowPiece(end, range(first, first + after))] if after > 0 else []
    return (*above, *middle, *below)


@lru_cache(maxsize=1024)
def ranges_plan(size: int, needed: tuple[Span, ...], rank: int, have: tuple[Span, ...] | None = None) -> RowPlan:
    """Return how each rank gets the range of rows that it needs, all of them inside the ``size`` rows that there are."""
    wants = [cover(start, stop, size) for start, stop in needed]
    return plan(have or parts(size, len(needed)), wants, rank)
