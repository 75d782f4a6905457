"""What ranks have asked for and not all of them yet, by name; the same on every rank of a channel.

Requests travel as JSON: what peers send is data and is never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from .submission import DTYPES, Kind, Reduction

_DTYPE_OF: Final = MappingProxyType({str(dtype).removeprefix("torch."): dtype for dtype in DTYPES})
# (number of the flat memory, first element in it)
Place = tuple[int, int]


class Request(NamedTuple):
    """What one rank asks for under a name. Two are equal if nothing about them could change what is done.

    Attributes:
        shapes: of the tensors.
        dtypes: of the tensors.
        device: the kind of device they are on.
        places: of each tensor that is reduced in place in flat memory of the channel; None unless all of them are.

    The others are those of ``Submission``.
    """

    kind: Kind
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    device: str
    reduction: Reduction
    prescale: float
    postscale: float
    root: int | None
    splits: tuple[int, ...] | None
    places: tuple[Place, ...] | None

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


class Response(NamedTuple):
    """What all ranks that have not joined asked for, and what comes of it.

    Attributes:
        name: under which they asked.
        requests: by rank in the channel.
        error: why it fails on all of them; None if it is done.
        places: where on every rank the tensors lie in flat memory; None unless all ranks say the same.
    """

    name: str
    requests: Mapping[int, Request]
    error: str | None
    places: tuple[Place, ...] | None

    @property
    def request(self) -> Request:
        """Of some rank: what must be equal is read from it."""
        return next(iter(self.requests.values()))


class Table:
    """Names that not all ranks have asked for.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._asked: dict[str, dict[int, Request]] = {}

    def add(self, rank: int, name: str, request: Request) -> None:
        """Take down what a rank asks for; must come in the same order on all ranks."""
        self._asked.setdefault(name, {})[rank] = request

    def take_complete(self, joined: AbstractSet[int]) -> list[tuple[str, dict[int, Request]]]:
        """Take out what nobody has to ask for any more, in the order in which each was first asked for."""
        names = [
            name
            for name, by_rank in self._asked.items()
            if len(by_rank) == self._size or len(by_rank.keys() | joined) == self._size
        ]
        return [(name, self._asked.pop(name)) for name in names]


def common_places(requests: Mapping[int, Request]) -> tuple[Place, ...] | None:
    """The places that all requests name."""
    different = {request.places for request in requests.values()}
    return different.pop() if len(different) == 1 else None


@dataclass(frozen=True)
class Message:
    """What a rank tells all others in a full round.

    Attributes:
        requests: that are new, by name.
        leaves: whether the rank takes part for the last time.
        knobs: new settings (threshold in bytes, cycle in ms, cache), from rank 0.
    """

    requests: Sequence[tuple[str, Request]] = ()
    leaves: bool = False
    knobs: tuple[int, float | None, bool] | None = None

    def encoded(self) -> bytes:
        """As bytes."""
        requests = [[name, *_plain(request)] for name, request in self.requests]
        return json.dumps([requests, self.leaves, self.knobs], separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Message:
        """From bytes."""
        requests, leaves, knobs = json.loads(data)
        return cls([(name, _request(rest)) for name, *rest in requests], leaves, tuple(knobs) if knobs else None)


def _plain(request: Request) -> list[Any]:
    names = [str(dtype).removeprefix("torch.") for dtype in request.dtypes]
    return [request.kind.value, request.shapes, names, request.device, int(request.reduction), *request[5:]]


def _request(plain: list[Any]) -> Request:
    kind, shapes, dtypes, device, reduction, prescale, postscale, root, splits, places = plain
    return Request(
        Kind(kind),
        tuple(tuple(shape) for shape in shapes),
        tuple(_DTYPE_OF[name] for name in dtypes),
        device,
        Reduction(reduction),
        prescale,
        postscale,
        root,
        None if splits is None else tuple(splits),
        None if places is None else tuple((number, first) for number, first in places),
    )
