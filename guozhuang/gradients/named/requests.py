"""Requests: descriptions of submissions, which ranks send each other as JSON and compare.

Data from peers is parsed as JSON and never executed.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...errors import explain
from .settings import Knobs
from .submission import DTYPES, JOIN_NAME, Kind, Reduction, Submission

_DTYPE_OF: Final = MappingProxyType({str(dtype).removeprefix("torch."): dtype for dtype in DTYPES})
_TAKES_OUTPUTS: Final = (Kind.ALLREDUCE, Kind.BROADCAST)
_NO_TENSORS: Final = (Kind.BARRIER, Kind.JOIN)
_NEEDS_ROWS: Final = (Kind.ALLGATHER, Kind.REDUCESCATTER, Kind.ALLTOALL)


class NamedRequest(NamedTuple):
    """One rank's submission under a name, without its data. Two requests are equal if they lead to the same collective.

    Attributes:
        shapes: shapes of the tensors.
        dtypes: dtypes of the tensors.
        device: the type of the tensors' device, as "cpu".

    The other fields have the meaning of those of ``Submission``.
    """

    kind: Kind
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    device: str = "cpu"
    reduction: Reduction = Reduction.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int | None = None
    splits: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all tensors together, in bytes."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


class Response(NamedTuple):
    """The requests of all ranks for one name, except of ranks that have joined, and the error if they do not fit together.

    Attributes:
        name: name of the submissions.
        requests: the request of each rank, by rank in the channel.
        error: why the collective fails on all of them; None if it is carried out.
    """

    name: str
    requests: Mapping[int, NamedRequest]
    error: str | None = None

    @property
    def request(self) -> NamedRequest:
        """The request of one of the ranks; only properties that are equal on all ranks may be read from it."""
        return next(iter(self.requests.values()))


class Message(NamedTuple):
    """The message of one rank to all others in a round.

    Attributes:
        requests: new requests with their names; a number stands for an earlier request, see [Note: numbers] in rounds.py.
        leaves: whether the rank takes part in a round for the last time.
        knobs: new settings; only rank 0 sends them.
    """

    requests: Sequence[int | tuple[str, NamedRequest]] = ()
    leaves: bool = False
    knobs: Knobs | None = None

    def encoded(self) -> bytes:
        """Return the message as bytes."""
        return _ENCODER.encode(self).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Message:
        """Return the message that was encoded as these bytes."""
        requests, leaves, knobs = json.loads(data)
        found = [each if isinstance(each, int) else (each[0], _request(*each[1])) for each in requests]
        return cls(found, leaves, None if knobs is None else Knobs(*knobs))


def _plain(value: Kind | torch.dtype) -> str:
    """Return the text that a message has in place of a ``Kind`` or a dtype, which JSON cannot encode."""
    return value.value if isinstance(value, Kind) else str(value).removeprefix("torch.")


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), default=_plain)


def _request(*fields: Any) -> NamedRequest:
    found = NamedRequest(*fields)
    return found._replace(
        kind=Kind(found.kind),
        shapes=tuple(map(tuple, found.shapes)),
        dtypes=tuple([_DTYPE_OF[str(name)] for name in found.dtypes]),
        reduction=Reduction(found.reduction),
        splits=None if found.splits is None else tuple(found.splits),
    )


# ---- From a submission to a request.


def request_of(submission: Submission, size: int) -> NamedRequest:
    """Check a submission and return the request that describes it to other ranks.

    Args:
        submission: the submission of this rank.
        size: number of ranks of the channel.

    Raises:
        ValueError: the submission is invalid, whatever other ranks ask for.
    """
    kind, tensors, outputs = submission.kind, submission.tensors, submission.outputs
    if kind in _NO_TENSORS:
        if tensors:
            _refuse(submission, f"a {kind.value} takes no tensors", len(tensors))
        if (kind is Kind.JOIN) != (submission.name == JOIN_NAME):
            _refuse(submission, f"a join, and no barrier, is called {JOIN_NAME!r}", submission.name)
        return NamedRequest(kind)
    if not tensors:
        _refuse(submission, f"{kind.value} needs a tensor", 0)
    device = tensors[0].device
    for tensor in tensors:
        _check(submission, tensor, device)
    if outputs is not None:
        if kind not in _TAKES_OUTPUTS:
            _refuse(submission, f"{kind.value} allocates its outputs", len(outputs), "leave outputs out")
        _check_outputs(submission, outputs, device)
    root = splits = None
    if kind is Kind.BROADCAST:
        if submission.root is None or not 0 <= submission.root < size:
            _refuse(submission, f"a broadcast needs a root, a rank of 0 to {size - 1}", submission.root)
        root = operator.index(submission.root)
    elif kind is Kind.ALLTOALL:
        splits = _splits(submission, size)
    elif submission.reduction not in (Reduction.SUM, Reduction.AVERAGE):
        _check_reduction(submission)
    return NamedRequest(
        kind,
        tuple([tuple(tensor.shape) for tensor in tensors]),
        tuple([tensor.dtype for tensor in tensors]),
        device.type,
        submission.reduction,
        float(submission.prescale),  # requests are sent as JSON, which cannot encode numpy's numbers
        float(submission.postscale),
        root,
        splits,
    )


def _check(submission: Submission, tensor: Tensor, device: torch.device) -> None:
    if tensor.layout is not torch.strided:
        _refuse(submission, "tensors must be dense", str(tensor.layout), "use .to_dense(), or send its parts")
    if not tensor.is_contiguous():
        _refuse(submission, "tensors must be contiguous", tuple(tensor.stride()), "use .contiguous()")
    if tensor.dtype not in DTYPES:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in DTYPES))
        _refuse(submission, f"no tensors of this dtype can be sent, only {names}", str(tensor.dtype))
    if tensor.device != device:
        _refuse(submission, "tensors of a group must be on one device", f"{device}, {tensor.device}")


def _check_outputs(submission: Submission, outputs: tuple[Tensor, ...], device: torch.device) -> None:
    if len(outputs) != len(submission.tensors):
        _refuse(submission, f"there must be an output for each of {len(submission.tensors)} inputs", len(outputs))
    for tensor, output in zip(submission.tensors, outputs, strict=True):
        if output is tensor:
            continue
        _check(submission, output, device)
        if (output.shape, output.dtype) != (tensor.shape, tensor.dtype):
            what = f"an output must be like its input, {list(tensor.shape)} {tensor.dtype}"
            _refuse(submission, what, f"{list(output.shape)} {output.dtype}")


def _check_reduction(submission: Submission) -> None:
    if submission.kind == Kind.REDUCESCATTER:
        _refuse(submission, "reducescatter sums or averages", submission.reduction.name, "use SUM or AVERAGE")
    if submission.reduction == Reduction.ADASUM and not all(each.is_floating_point() for each in submission.tensors):
        _refuse(submission, "ADASUM takes floating-point tensors", str(submission.tensors[0].dtype))


def _splits(submission: Submission, size: int) -> tuple[int, ...]:
    if len(submission.tensors) != 1:
        _refuse(submission, "alltoall takes one tensor", len(submission.tensors))
    tensor, splits = submission.tensors[0], submission.splits
    num_rows = tensor.shape[0] if tensor.ndim else 0  # no dims: refused later, on all ranks, by difference()
    if splits is None:
        if num_rows % size:
            _refuse(submission, f"the first dim does not divide by {size} ranks", num_rows, "give splits")
        return (num_rows // size,) * size
    if len(splits) != size:
        _refuse(submission, f"splits must have an entry for each of {size} ranks", list(splits))
    if min(splits) < 0 or sum(splits) > num_rows:
        _refuse(submission, f"splits must not be negative, nor sum to more than the {num_rows} rows", list(splits))
    return tuple(map(operator.index, splits))


def _refuse(submission: Submission, what: str, value: object, fix: str = "") -> NoReturn:
    raise ValueError(explain(f"{submission.name}: {what}", value=value, fix=fix))


# ---- Comparing requests of several ranks.


def difference(name: str, requests: Mapping[int, NamedRequest], ranks: Sequence[int]) -> str | None:
    """Return a text on how requests differ, or why they cannot be carried out; None if they can.

    Args:
        name: name of the submissions.
        requests: requests by rank in the channel, at least one.
        ranks: for each rank of the channel, its number in error texts.
    """
    (first, one), *rest = sorted(requests.items())
    for rank, other in rest:
        if other == one:
            continue
        for what, aspect, words in _aspects(one.kind, ranks):
            if aspect(one) != aspect(other):
                there = f"rank {ranks[first]} has {words(one)}, rank {ranks[rank]} has {words(other)}"
                return f"Mismatched {what}: {there} (for {name!r})"
    if one.kind in _NEEDS_ROWS and any(len(shape) == 0 for request in requests.values() for shape in request.shapes):
        return f"{one.kind.value} of rank-zero tensors is not supported (for {name!r}): give the tensor a dimension"
    return None


def joined_difference(kind: Kind, name: str, joined: Collection[int], ranks: Sequence[int]) -> str | None:
    """Return the error for a collective that does not work while ranks have joined; None if it works."""
    if not joined or kind in (Kind.ALLREDUCE, Kind.JOIN):
        return None
    who = ", ".join(f"rank {ranks[rank]}" for rank in sorted(joined))
    return f"{kind.value.capitalize()} is not supported with Join at this time. {who} joined before {name!r}"


_Aspect = tuple[str, Callable[[NamedRequest], object], Callable[[NamedRequest], str]]


def _aspects(kind: Kind, ranks: Sequence[int]) -> list[_Aspect]:
    """Return the properties that must be equal, most informative first: a name, and functions for its value and its text."""
    reduces, by_rows = kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER), kind in (Kind.ALLGATHER, Kind.ALLTOALL)
    aspects: list[_Aspect] = [
        ("collective operations", lambda r: r.kind, lambda r: r.kind.value),
        ("group sizes", lambda r: len(r.shapes), lambda r: f"{len(r.shapes)} tensors"),
        ("data types", lambda r: r.dtypes, lambda r: _dtypes(r.dtypes)),
        ("devices (CPU/GPU)", lambda r: r.device, lambda r: f"a tensor on {r.device}"),
    ]
    if reduces:
        aspects.append(("reduce operations", lambda r: r.reduction, lambda r: r.reduction.name.lower()))
    # In an all-gather and an all-to-all ranks may have different numbers of rows.
    same = (lambda r: [(len(shape), shape[1:]) for shape in r.shapes]) if by_rows else (lambda r: r.shapes)
    aspects.append((f"{kind.value} tensor shapes", same, _shapes))
    if kind == Kind.BROADCAST:
        root = ("broadcast root ranks", lambda r: r.root, lambda r: f"root {None if r.root is None else ranks[r.root]}")
        aspects.append(root)
    if reduces:
        aspects += [
            ("prescale factors", lambda r: r.prescale, lambda r: f"{r.prescale}"),
            ("postscale factors", lambda r: r.postscale, lambda r: f"{r.postscale}"),
        ]
    return aspects


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "no tensor"


def _shapes(request: NamedRequest) -> str:
    shapes = [list(shape) for shape in request.shapes]
    return f"shape {shapes[0]}" if len(shapes) == 1 else f"shapes {shapes}"
