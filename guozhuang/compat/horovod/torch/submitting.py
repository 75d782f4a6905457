"""Turns calls of Horovod's interface into submissions and integer handles, and defines the gradients of collectives.

[Note: gradients of collectives] They are defined as Horovod does. All-reduce: the all-reduce of the outputs' gradients with the
same operation and factors. All-gather: this rank's part of their *mean*. Broadcast: their mean on root, zero elsewhere.
All-to-all: each row's gradient is sent back to the rank from which the row came. Reduce-scatter: their all-gather, times the
factors and, for Sum, the number of ranks. All of these can be differentiated again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from guozhuang.errors import explain
from guozhuang.gradients.named import Handle, Kind, NegotiationError, Reduction, Submission

from ..common.exceptions import HorovodInternalError
from ..common.process_sets import ProcessSet, member_of
from ..common.state import required
from .handles import synchronize, table

Average: Final = int(Reduction.AVERAGE)
Sum: Final = int(Reduction.SUM)
Adasum: Final = int(Reduction.ADASUM)
Min: Final = int(Reduction.MIN)
Max: Final = int(Reduction.MAX)
Product: Final = int(Reduction.PRODUCT)
Splits: TypeAlias = Sequence[int] | Tensor


@dataclass(frozen=True)
class Call:
    """One call of a collective: its kind, process set, name and options, without the tensors.

    Attributes:
        kind: the kind of collective.
        process_set: the process set whose members take part.
        name: the name by which ranks match, without the operation; None: a number that counts unnamed calls.
        is_group: whether the tensors are one unit, and the result is a list.
        in_place: whether the results are written into the inputs.
        fields: further fields of the ``Submission``.
        splits_device: of an all-to-all, the device of the result tensor with the number of rows from each rank.
        divisor: a number by which each result is divided, in its own dtype; that of integers is cut towards zero.
    """

    kind: Kind
    process_set: ProcessSet
    name: str | None = None
    is_group: bool = False
    in_place: bool = False
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    splits_device: torch.device | None = None
    divisor: int = 1

    def begin(self, tensors: Sequence[Tensor]) -> int:
        """Submit the collective and return its handle, without waiting for it.

        Raises:
            ValueError: not initialised; this process is no member; an input is no tensor, is sparse or not contiguous, or has a
                dtype that cannot be sent; another field is invalid; an operation of that name has not ended.
            HorovodInternalError: the engine has failed.
        """
        operation, member = ("grouped_" if self.is_group else "") + self.kind.value, member_of(self.process_set)
        if self.is_group:
            check_group(tensors)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                what = f"{operation} takes tensors"
                raise ValueError(explain(what, value=type(tensor).__name__, fix="use torch.tensor"))
        # Detach: the engine cannot write in place into tensors that require a gradient.
        sent = tuple([tensor.detach() if tensor.requires_grad else tensor for tensor in tensors])
        full_name = member.full_name(operation, self.name)
        submission = Submission(self.kind, full_name, sent, sent if self.in_place else None, **self.fields)
        try:
            handle = member.channel.submit(submission)
        except ValueError:
            if self.name is None:
                member.take_back(operation, full_name)
            raise
        except NegotiationError as error:
            raise HorovodInternalError(str(error)) from error

        def finish(outputs: list[Tensor], handle: Handle) -> Any:
            results = list(tensors) if self.in_place else outputs
            for each in results if self.divisor != 1 else ():
                each.detach().div_(self.divisor, rounding_mode=None if each.is_floating_point() else "trunc")
            if handle.received_splits is not None:
                return results[0], torch.tensor(handle.received_splits, dtype=torch.int32, device=self.splits_device)
            return results if self.is_group or not results else results[0]

        return table.add(handle, finish)

    def wait(self, tensors: Sequence[Tensor]) -> Any:
        """Submit the collective, wait until it is completed, and return its result."""
        return synchronize(self.begin(tensors))

    def differentiable(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Carry out the collective and return its results, connected to autograd; see [Note: gradients of collectives]."""
        results: tuple[Tensor, ...] = _Collective.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return results


def reducing(kind: Kind, op: int, prescale: float, postscale: float, process_set: ProcessSet, **more: Any) -> Call:
    """Return the ``Call`` of an all-reduce or a reduce-scatter; ValueError or NotImplementedError if it is invalid."""
    try:
        reduction = Reduction(op)
    except ValueError:
        what, fix = "op is none of Average, Sum, Adasum, Min, Max and Product", "use hvd.Average and the like"
        raise ValueError(explain(what, value=op, fix=fix)) from None
    if kind == Kind.REDUCESCATTER and op not in (Average, Sum):
        what, fix = "reducescatter combines by Average or Sum", "use allreduce, and take this rank's rows of its result"
        raise NotImplementedError(explain(what, value=reduction.name.capitalize(), fix=fix))
    if op == Adasum and process_set.process_set_id != 0:
        raise NotImplementedError("Adasum works among all ranks only, not in other process sets than the global one")
    for which, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        if isinstance(factor, str) or not hasattr(factor, "__float__"):
            raise ValueError(explain(f"{which} is a number", value=factor, fix="leave it out, or give a float"))
    fields = {"reduction": reduction, "prescale": float(prescale), "postscale": float(postscale)}
    return Call(kind, process_set, fields=fields, **more)


def broadcasting(root_rank: int, process_set: ProcessSet, **more: Any) -> Call:
    """Return the ``Call`` of a broadcast; ValueError if root is no member."""
    members = member_of(process_set).ranks
    if root_rank not in members:
        what = f"root_rank is no member of the process set, which has the ranks {list(members)}"
        fix = "give root's rank among all ranks, hvd.rank() there, also inside a process set"
        raise ValueError(explain(what, value=root_rank, rank=required().rank, fix=fix))
    return Call(Kind.BROADCAST, process_set, fields={"root": members.index(root_rank)}, **more)


def exchanging(splits: Splits | None, process_set: ProcessSet, name: str | None) -> Call:
    """Return the ``Call`` of an all-to-all; ValueError if the splits are not integers."""
    member_of(process_set)  # raises ValueError for a process that is no member, before any error about splits
    device, chosen = splits.device if isinstance(splits, Tensor) else None, None
    if splits is not None:
        given = splits.tolist() if isinstance(splits, Tensor) else list(splits)
        # Integers of numpy, which have ``__index__``, are allowed as splits, too.
        if not isinstance(given, list) or not all(
            hasattr(each, "__index__") and not isinstance(each, bool | float) for each in given
        ):
            what, fix = "splits are whole numbers, one for each rank", "give a list of int, or a tensor of dtype int32"
            raise ValueError(explain(what, value=given, rank=required().rank, fix=fix))
        chosen = tuple(int(each) for each in given)
    return Call(Kind.ALLTOALL, process_set, name, fields={"splits": chosen}, splits_device=device)


def check_group(tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless ``tensors`` is a list of one or more tensors, as grouped operations need."""
    if isinstance(tensors, Tensor) or not tensors or not all(isinstance(each, Tensor) for each in tensors):
        what = "a grouped operation takes a list of tensors, one at least"
        raise ValueError(explain(what, value=type(tensors).__name__))


class _Collective(torch.autograd.Function):
    """A collective of one tensor or several as a function of autograd. See [Note: gradients of collectives]."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = call.wait(tensors)  # first, as it raises ValueError for invalid tensors
        ctx.call, ctx.shapes = call, [tensor.shape for tensor in tensors]
        if call.kind == Kind.ALLTOALL:
            ctx.received = result[1].tolist()
            ctx.mark_non_differentiable(result[1])
            return tuple(result)
        return tuple(result) if call.is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = replace(ctx.call, name=None)
        if call.kind == Kind.REDUCESCATTER:
            is_sum = call.fields["reduction"] == Reduction.SUM
            factor = (
                call.fields["prescale"] * call.fields["postscale"] * (call.process_set.size() or 1 if is_sum else 1)
            )
            gradients = tuple(gradient * factor if factor != 1 else gradient for gradient in gradients)
            call = Call(Kind.ALLGATHER, call.process_set, is_group=call.is_group)
        elif call.kind == Kind.ALLTOALL:
            (back, _) = exchanging(ctx.received, call.process_set, None).differentiable(gradients[0].contiguous())
            unsent = ctx.shapes[0][0] - back.shape[0]
            return None, torch.cat([back, back.new_zeros(unsent, *ctx.shapes[0][1:])]) if unsent else back
        sent = [gradient.contiguous() for gradient in gradients]
        if ctx.call.kind == Kind.ALLGATHER:
            return None, *_own_rows(sent, ctx.shapes, call.process_set)
        if call.kind == Kind.BROADCAST:
            (mean,) = reducing(Kind.ALLREDUCE, Average, 1.0, 1.0, call.process_set).differentiable(*sent)
            if member_of(call.process_set).channel.rank != call.fields["root"]:
                # Make zeros that stay in the graph. Not by ``* 0``, which would turn infinite gradients into NaN.
                mean = mean.masked_fill(torch.ones((), dtype=torch.bool, device=mean.device), 0)
            return None, mean
        return None, *call.differentiable(*sent)


def _own_rows(gradients: Sequence[Tensor], shapes: Sequence[torch.Size], process_set: ProcessSet) -> list[Tensor]:
    """Return this rank's rows of the mean of the gradients of an all-gather."""
    counts = [shape[0] if shape else 0 for shape in shapes]
    # Gather how many rows each rank has of each tensor; submitted before the gradients, to share a round of negotiation.
    rows = Call(Kind.ALLGATHER, process_set).begin([torch.tensor([counts])])
    try:
        mean = reducing(Kind.ALLREDUCE, Average, 1.0, 1.0, process_set, is_group=True).differentiable(*gradients)
    except HorovodInternalError:
        with contextlib.suppress(HorovodInternalError):
            synchronize(rows)  # so that no operation is left running
        raise
    starts = synchronize(rows)[: process_set.rank()].sum(0).tolist()
    return [each.narrow(0, start, count) for each, start, count in zip(mean, starts, counts, strict=True)]
