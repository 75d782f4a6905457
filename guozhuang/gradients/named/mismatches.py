"""What ranks must agree on when they ask for something under one name, and the words for it when they do not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch

from .submission import Kind, Reduction
from .table import Request

_Aspect = tuple[str, Callable[[Request], object], Callable[[Request], str]]

_NEEDS_ROWS: Final = (Kind.ALLGATHER, Kind.REDUCESCATTER, Kind.ALLTOALL)


def difference(name: str, requests: Mapping[int, Request], ranks: Sequence[int]) -> str | None:
    """Say in what the requests differ, or why they cannot be done; None if nothing stands against them.

    Args:
        name: under which they came.
        requests: by rank in the channel, one at least.
        ranks: what each rank of the channel is called.
    """
    asked = sorted(requests.items())
    (first, one), rest = asked[0], asked[1:]
    for rank, other in rest:
        if other[:9] == one[:9]:
            continue
        for what, aspect, words in _aspects(one.kind, ranks):
            if aspect(one) != aspect(other):
                there = f"rank {ranks[first]} has {words(one)}, rank {ranks[rank]} has {words(other)}"
                return f"Mismatched {what}: {there} (for {name!r})"
    if one.kind in _NEEDS_ROWS and any(len(shape) == 0 for request in requests.values() for shape in request.shapes):
        return f"{one.kind.value} of rank-zero tensors is not supported (for {name!r}): give the tensor a dimension"
    return None


def joined_difference(kind: Kind, name: str, joined: Collection[int], ranks: Sequence[int]) -> str | None:
    """Say that something cannot be done as long as ranks have joined; None if it can."""
    if not joined or kind in (Kind.ALLREDUCE, Kind.JOIN):
        return None
    who = ", ".join(f"rank {ranks[rank]}" for rank in sorted(joined))
    return f"{kind.value.capitalize()} is not supported with Join at this time. {who} joined before {name!r}"


def _aspects(kind: Kind, ranks: Sequence[int]) -> list[_Aspect]:
    """What must be equal, the most telling first; name, value and words for the value of each."""
    aspects: list[_Aspect] = [
        ("collective operations", lambda request: request.kind, lambda request: request.kind.value),
        ("group sizes", lambda request: len(request.shapes), lambda request: f"{len(request.shapes)} tensors"),
        ("data types", lambda request: request.dtypes, lambda request: _dtypes(request.dtypes)),
        ("devices (CPU/GPU)", lambda request: request.device, lambda request: f"a tensor on {request.device}"),
    ]
    if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        aspects.append(
            ("reduce operations", lambda request: request.reduction, lambda request: _word(request.reduction))
        )
    if kind in (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCESCATTER):
        aspects.append((f"{kind.value} tensor shapes", lambda request: request.shapes, _shapes))
    if kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        # Equal but for the number of rows.
        aspects += [
            (f"{kind.value} tensor shapes", lambda request: tuple(len(shape) for shape in request.shapes), _shapes),
            (f"{kind.value} tensor shapes", lambda request: tuple(shape[1:] for shape in request.shapes), _shapes),
        ]
    if kind == Kind.BROADCAST:
        aspects.append(("broadcast root ranks", lambda request: request.root, lambda request: _root(request, ranks)))
    if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        aspects += [
            ("prescale factors", lambda request: request.prescale, lambda request: f"{request.prescale}"),
            ("postscale factors", lambda request: request.postscale, lambda request: f"{request.postscale}"),
        ]
    return aspects


def _root(request: Request, ranks: Sequence[int]) -> str:
    return f"root {None if request.root is None else ranks[request.root]}"


def _word(reduction: Reduction) -> str:
    return reduction.name.lower()


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "no tensor"


def _shapes(request: Request) -> str:
    shapes = [list(shape) for shape in request.shapes]
    return f"shape {shapes[0]}" if len(shapes) == 1 else f"shapes {shapes}"
