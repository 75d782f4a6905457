"""Which part of a whole draw is this rank's: spans of dims, declared around the code that works on divided activations."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import spans
from ..spans import Span


@dataclass(frozen=True)
class DividedDim:
    """How a rank's part of a tensor lies in the whole one, in one dim.

    Attributes:
        dim: the dim; a negative one counts from the end.
        spans: the ranges ``(start, stop)`` of the whole dim that this rank has, in the order in which they lie in its part.
        whole: the size of the whole dim.
        merged: whether the dim may also be a multiple of that size, because a dim that is not divided was merged into it as
            the outer one: (samples * heads, tokens, tokens) with heads divided.
    """

    dim: int
    spans: tuple[Span, ...]
    whole: int
    merged: bool = False

    @property
    def length(self) -> int:
        """The size of this rank's part of the dim."""
        return sum(stop - start for start, stop in self.spans)


# A declaration finds the parts that a tensor of the given shape has.
Declaration = Callable[[torch.Size], Iterable[DividedDim]]


class _Declared(threading.local):
    """The declarations that hold for this thread, outermost first."""

    def __init__(self) -> None:
        self.here: tuple[Declaration, ...] = ()


_declared = _Declared()


def declared() -> tuple[Declaration, ...]:
    """Return the declarations that hold for this thread, outermost first."""
    return _declared.here


@contextlib.contextmanager
def declaring(declarations: tuple[Declaration, ...]) -> Iterator[None]:
    """Let these declarations hold for this thread, and no others."""
    before, _declared.here = _declared.here, declarations
    try:
        yield
    finally:
        _declared.here = before


@dataclass(frozen=True)
class _Always:
    """The declaration of one part, for tensors that have the right size."""

    part: DividedDim

    def __call__(self, shape: torch.Size) -> Iterable[DividedDim]:
        return (self.part,)


def divided(
    dim: int, spans: Iterable[Span], whole: int, *, merged: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Declare that activations in this block are divided in a dim: random operations take this rank's part of a whole draw.

    A draw whose size in ``dim`` is not the sum of the spans is not divided. Blocks nest, for several dims.

    Args:
        dim: the dim; a negative one counts from the end, so attention probabilities (samples, heads, tokens, tokens) divided
            by heads have -3.
        spans: the ranges ``(start, stop)`` of the whole dim that this rank has, in the order in which they lie in its part.
        whole: the size of the whole dim.
        merged: a dim that is not divided may have been merged into ``dim`` as the outer one.
    """
    part = DividedDim(dim, tuple((int(start), int(stop)) for start, stop in spans), whole, merged)
    return declaring((*_declared.here, _Always(part)))


def divided_by(
    find: Callable[[torch.Size], Iterable[tuple[int, Sequence[Span], int]]],
) -> contextlib.AbstractContextManager[None]:
    """Declare parts that depend on a draw's shape: ``find`` returns ``(dim, spans, whole)`` for each dim that is divided."""

    def parts(shape: torch.Size) -> Iterable[DividedDim]:
        return (DividedDim(dim, tuple(spans), whole) for dim, spans, whole in find(shape))

    return declaring((*_declared.here, parts))


def undivided() -> contextlib.AbstractContextManager[None]:
    """Declare that activations in this block are whole on every rank, inside of a block of :func:`divided`."""
    return declaring(())


def parts_of(shape: torch.Size, declarations: Sequence[Declaration]) -> tuple[list[DividedDim], torch.Size]:
    """Return the parts that a draw of this shape has, outermost first, and the shape of the whole draw.

    Dims of the parts are counted from the front. Where two declarations divide one dim, the inner one divides the outer's part.
    """
    found: list[DividedDim] = []
    for declaration in reversed(declarations):
        for part in declaration(shape):
            dim, length = part.dim + len(shape) if part.dim < 0 else part.dim, part.length
            if not 0 <= dim < len(shape) or length == part.whole:
                continue
            size = shape[dim]
            if size == length or (part.merged and length and size % length == 0):
                found.append(DividedDim(dim, part.spans, part.whole, part.merged))
                size = part.whole * (size // length if length else 1)
                shape = torch.Size([*shape[:dim], size, *shape[dim + 1 :]])
    return found[::-1], shape


def take(whole: Tensor, parts: Iterable[DividedDim]) -> Tensor:
    """Return this rank's part of a whole tensor; a view where each dim has one span."""
    for part in parts:
        is_merged = whole.shape[part.dim] != part.whole
        tensor = whole.unflatten(part.dim, (-1, part.whole)) if is_merged else whole
        dim = part.dim + is_merged
        tensor = spans.take(tensor, dim, part.spans)
        whole = tensor.flatten(part.dim, dim) if is_merged else tensor
    return whole
