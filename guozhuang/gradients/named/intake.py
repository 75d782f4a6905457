"""What one rank may submit: checked before anybody hears of it, and turned into a request."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Final, NoReturn

import torch
from torch import Tensor

from ...errors import explain
from .submission import DTYPES, JOIN_NAME, Kind, Reduction, Submission
from .table import Place, Request

_TAKES_OUTPUTS: Final = (Kind.ALLREDUCE, Kind.BROADCAST)
_NO_TENSORS: Final = (Kind.BARRIER, Kind.JOIN)
# Looked up for every gradient; a member of an enumeration takes longer.
_ALLREDUCE, _BROADCAST, _ALLTOALL, _SUM, _AVERAGE = (
    *(Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLTOALL),
    *(Reduction.SUM, Reduction.AVERAGE),
)
_NOTHING: Final = Request(Kind.BARRIER, (), (), "cpu", Reduction.SUM, 1.0, 1.0, None, None, None)


def request_of(
    submission: Submission, size: int, places_of: Callable[[tuple[Tensor, ...]], tuple[Place, ...] | None]
) -> Request:
    """Return what other ranks must know of a submission.

    Args:
        submission: of this rank.
        size: how many ranks the channel has.
        places_of: tells where tensors lie in flat memory of the channel.

    Raises:
        ValueError: it cannot work, whatever other ranks ask for.
    """
    kind, tensors, outputs = submission.kind, submission.tensors, submission.outputs
    if kind in _NO_TENSORS:
        if tensors:
            _refuse(submission, f"a {kind.value} takes no tensors", len(tensors))
        if (kind is Kind.JOIN) != (submission.name == JOIN_NAME):
            _refuse(submission, f"a join, and no barrier, is called {JOIN_NAME!r}", submission.name)
        return _NOTHING._replace(kind=kind)
    if not tensors:
        _refuse(submission, f"{kind.value} needs a tensor", 0)
    device = tensors[0].device
    for tensor in tensors:
        _check(submission, tensor, device)
    splits = places = root = None
    if outputs is not None:
        if len(outputs) != len(tensors):
            what = f"there must be an output for each of {len(tensors)} inputs"
            _refuse(submission, what, len(outputs))
        if outputs is not tensors and any(map(operator.is_not, tensors, outputs)):
            _check_outputs(submission, outputs, device)
        elif kind is _ALLREDUCE:
            places = places_of(tensors)
        if kind not in _TAKES_OUTPUTS:
            _refuse(submission, f"{kind.value} allocates its outputs", len(outputs), "leave outputs out")
    if kind is _BROADCAST:
        if submission.root is None or not 0 <= submission.root < size:
            _refuse(submission, f"a broadcast needs a root, a rank of 0 to {size - 1}", submission.root)
        root = operator.index(submission.root)
    elif kind is _ALLTOALL:
        splits = _splits(submission, size)
    elif submission.reduction is not _SUM and submission.reduction is not _AVERAGE:
        _check_reduction(submission)
    return Request(
        kind,
        tuple([tensor.shape for tensor in tensors]),
        tuple([tensor.dtype for tensor in tensors]),
        device.type,
        submission.reduction,
        float(submission.prescale),  # these travel as JSON, which knows no numbers of numpy
        float(submission.postscale),
        root,
        splits,
        places,
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
    num_rows = tensor.shape[0] if tensor.ndim else 0  # all ranks are told of a tensor without rows
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
