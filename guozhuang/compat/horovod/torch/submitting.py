"""From a call to a submission, which the engine checks before anything is sent, and the number that stands for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from guozhuang.errors import explain
from guozhuang.gradients.named import Kind, NegotiationError, Reduction, Submission

from ..common.exceptions import HorovodInternalError
from ..common.process_sets import ProcessSet, member_of
from .handles import Finish, table

Average: Final = int(Reduction.AVERAGE)
Sum: Final = int(Reduction.SUM)
Adasum: Final = int(Reduction.ADASUM)
Min: Final = int(Reduction.MIN)
Max: Final = int(Reduction.MAX)
Product: Final = int(Reduction.PRODUCT)


def enqueue(
    kind: Kind,
    operation: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    finish: Finish,
    *,
    in_place: bool = False,
    **fields: Any,
) -> int:
    """Submit a collective and return its handle. Not waited for.

    Args:
        kind: of collective.
        operation: the first part of its full name, "allreduce" and the like.
        tensors: the inputs.
        name: the second part; None for the next number.
        process_set: whose members take part.
        finish: see ``HandleTable.add``.
        in_place: the results are written into the inputs.
        **fields: further fields of the ``Submission``.

    Raises:
        ValueError: not initialised; this process is no member; what is no tensor, or one that is sparse or not contiguous, or
            of a dtype that nobody sums; other fields that cannot be; a name that is under way.
        HorovodInternalError: the engine stands still after a failure.
    """
    member = member_of(process_set)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(explain(f"{operation} takes tensors", value=type(tensor).__name__, fix="use torch.tensor"))
    # What requires a gradient refuses to be written to, also from the engine's thread.
    sent = tuple([tensor.detach() if tensor.requires_grad else tensor for tensor in tensors])
    fields["outputs"] = sent if in_place else None
    submission = Submission(kind, member.full_name(operation, name), sent, **fields)
    try:
        handle = member.channel.submit(submission)
    except ValueError:
        if name is None:
            member.take_back(operation, submission.name)
        raise
    except NegotiationError as error:
        raise HorovodInternalError(str(error)) from error
    return table.add(handle, finish)


def scales(prescale: float, postscale: float) -> dict[str, Any]:
    """Return the factors of a reduction as fields for ``enqueue``; ValueError if one is no number."""
    for which, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        if isinstance(factor, str) or not hasattr(factor, "__float__"):
            raise ValueError(explain(f"{which} is a number", value=factor, fix="leave it out, or give a float"))
    return {"prescale": float(prescale), "postscale": float(postscale)}


def check_group(tensors: Sequence[Tensor]) -> None:
    """Raise ValueError if these cannot be the tensors of a grouped operation."""
    if isinstance(tensors, Tensor) or not tensors or not all(isinstance(each, Tensor) for each in tensors):
        raise ValueError(
            explain("a grouped operation takes a list of tensors, one at least", value=type(tensors).__name__)
        )
