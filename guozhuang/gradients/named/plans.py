"""What was worked out for responses, kept for when the very same ones come again: training does the same in every step.

Responses that the cache answers are the same objects each time, so they are compared as objects, not by what they say. What is
kept holds them, so that no other object gets their identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .fusion import batches
from .table import Request, Response

_MOST_KEPT = 64  # the sets that become ready together differ with timing, but not without end

What = TypeVar("What")


@dataclass(frozen=True)
class _Kept(Generic[What]):
    about: Sequence[object]
    what: What


class Remembered(Generic[What]):
    """Something for each of some sequences of objects; all is forgotten when they become too many."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], _Kept[What]] = {}

    def get(self, about: Sequence[object]) -> What | None:
        """Return what was put for these very objects."""
        found = self._kept.get(tuple(map(id, about)))
        return None if found is None else found.what

    def put(self, about: Sequence[object], what: What) -> None:
        """Keep something for these objects."""
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[tuple(map(id, about))] = _Kept(tuple(about), what)


@dataclass(eq=False)
class Known:
    """What a submission that comes again need not be asked again. It lies on the submission, and goes when that goes.

    Attributes:
        channel: the one that it was submitted to.
        request: what other ranks know of it.
        num_bytes: of its tensors.
        addresses: of its tensors, and of its outputs where those are others.
        token: stands for the submission where that must not be held: batches lie on submissions, which would hold each other.
        together: of the executor: what batches come to of which it is the first.
    """

    channel: object
    request: Request
    num_bytes: int
    addresses: list[int]
    token: object = field(default_factory=object)
    together: Remembered[Any] = field(default_factory=Remembered)


class Plans:
    """Batches, see ``fusion.batches``: the same objects for the same responses.

    Args:
        fuse_groups: whether a response of several tensors goes with others.
    """

    def __init__(self, fuse_groups: bool) -> None:
        self._fuse_groups = fuse_groups
        self._threshold_bytes = -1
        self._batches: Remembered[list[list[Response]]] = Remembered()

    def batches(self, responses: Sequence[Response], threshold_bytes: int) -> list[list[Response]]:
        """Divide responses into what is done at once, in order."""
        if threshold_bytes != self._threshold_bytes:
            self._threshold_bytes, self._batches = threshold_bytes, Remembered()
        found = self._batches.get(responses)
        if found is None:
            found = batches(responses, threshold_bytes, self._fuse_groups)
            self._batches.put(responses, found)
        return found
