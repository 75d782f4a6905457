"""What a ``DistributedOptimizer`` sends: gradients, each copied once into memory that the group reduces in place.

[Note: scales] A mean over n ranks is a sum of gradients that were multiplied with 1/n in the copy that brings them there
anyway: no further pass over memory, and float16 does not overflow as long as the mean fits. With ``gradient_predivide_factor``
f the copy multiplies with 1/f, and the engine the sum with f/n.

[Note: sparse gradients] A sparse gradient travels by its rows, unlike a dense one, so ranks must agree on which it is; but a
rank that did not use the parameter cannot know. So a rank whose gradient is sparse for the first time does not send it, but
says so: it asks for a barrier under the name under which others may send dense numbers. Either all say so, or the engine tells
all of them that they asked for different collectives. In both cases all know from then on, and send rows, which may be none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from guozhuang.compat.horovod.common.process_sets import ProcessSet
from guozhuang.errors import explain
from guozhuang.exchange.sparse import no_rows
from guozhuang.gradients.named import Channel, Handle, Kind, NegotiationError, Reduction, Submission

from .backward_passes import BackwardPasses, Travelling, Unit
from .compression import Compression
from .gradient_layout import GradientLayout, Place, gradient_dtype
from .mpi_ops import sparse_allreduce_async

_DIFFERENT_KINDS: Final = "Mismatched collective operations"


@dataclass(frozen=True)
class Exchange:
    """How gradients are exchanged.

    Attributes:
        compression: a class with ``compress`` and ``decompress``.
        op: one of the constants of ``mpi_ops``.
        predivide_factor: see [Note: scales].
        sparse_as_dense: sparse gradients travel as dense ones.
    """

    compression: Any
    op: int
    predivide_factor: float
    sparse_as_dense: bool


@dataclass(frozen=True)
class _Scales:
    """See [Note: scales]. ``copy`` multiplies in the copy, ``postscale`` in the engine."""

    copy: float
    reduction: Reduction
    postscale: float


@dataclass(slots=True)
class _Dense:
    """What is under way of gradients in their places."""

    handle: Handle


@dataclass(slots=True)
class _Said:
    """What is under way of the word that a gradient is sparse. See [Note: sparse gradients]."""

    handle: Handle


@dataclass(slots=True)
class _Coded:
    """What is under way of gradients that a compressor of the user's has made."""

    handle: Handle
    contexts: Sequence[Any]


@dataclass(slots=True)
class _Rows:
    """What is under way of a sparse gradient: a call that waits and returns it."""

    receive: Callable[[], Tensor]


class GradientExchange(BackwardPasses):
    """The exchange of all gradients of one optimizer.

    Args:
        names, process_set, num_passes: see :class:`BackwardPasses`.
        exchange: how.
    """

    def __init__(
        self, names: Mapping[Tensor, str], process_set: ProcessSet, num_passes: int, exchange: Exchange
    ) -> None:
        super().__init__(names, process_set, num_passes)
        self._how = exchange
        self._is_coded = exchange.compression not in (Compression.none, Compression.fp16)
        self._is_half = exchange.compression is Compression.fp16
        self._scales = _Scales(1.0, Reduction.SUM, 1.0)
        self._layouts: dict[Travelling, tuple[GradientLayout, int]] = {}
        self._places: dict[Travelling, Place] = {}
        self._submissions: dict[Unit, Submission] = {}

    # ---- the layout ---------------------------------------------------------------------------------------------------

    def _begin(self, channel: Channel) -> None:
        self._scales = self._find_scales(channel)
        self._layouts, self._places, self._submissions = {}, {}, {}

    def _lay_out(self, some: Sequence[Travelling], channel: Channel) -> None:
        layout = GradientLayout([one.parameter for one in some], channel.allocate, self._wire_dtype)
        self._layouts.update({one: (layout, i) for i, one in enumerate(some)})

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16 if self._is_half and dtype.is_floating_point else dtype

    def _find_scales(self, channel: Channel) -> _Scales:
        op, factor = Reduction(self._how.op), self._how.predivide_factor
        if op != Reduction.AVERAGE:
            return _Scales(1.0, op, 1.0)
        if factor != 1.0:
            return _Scales(1.0 / factor, Reduction.SUM, factor / channel.size)
        return _Scales(1.0 / channel.size, Reduction.SUM, 1.0)

    def _place(self, one: Travelling) -> Place:
        found = self._places.get(one)
        if found is None:
            layout, index = self._layouts[one]
            found = self._places[one] = layout.place(index)
        return found

    # ---- on their way ---------------------------------------------------------------------------------------------------

    def _send(self, unit: Unit) -> None:
        channel = self._channel
        assert channel is not None
        by_rows = [one for one in unit.members if self._goes_by_rows(one)]
        if by_rows:
            self._send_sparse(unit, channel)
        elif self._is_coded:
            self._send_coded(unit, channel)
        else:
            for one in unit.members:
                self._fill(one)
            submission = self._submissions.get(unit)
            if submission is None:
                submission = self._submissions[unit] = self._submission(unit)
            unit.pending = _Dense(channel.submit(submission))

    def _goes_by_rows(self, one: Travelling) -> bool:
        gradient = one.parameter.grad
        if gradient is not None:
            one.sparse_dims = gradient.sparse_dim() if gradient.is_sparse else 0
        return one.by_rows or (one.sparse_dims > 0 and not self._how.sparse_as_dense)

    def _fill(self, one: Travelling) -> None:
        """Copy the gradient, scaled, to its place; zeros where there is none."""
        parameter, scale = one.parameter, self._scales.copy
        gradient = parameter.grad
        if one.sparse_dims and gradient is not None:
            gradient = gradient.to_dense()
        place = self._place(one)
        if gradient is not None and place.is_taken_by(gradient):
            if scale != 1.0:
                gradient.mul_(scale)
            one.version = gradient._version
            return
        if place.leave_kept():  # counts references, so before there is one here
            self._submissions.pop(one.unit, None)
        target = place.gradient
        if gradient is None:
            target.zero_()
            return
        torch.mul(gradient, scale, out=target)
        if not one.sparse_dims:
            if target.dtype == gradient.dtype:
                parameter.grad = gradient = target
            one.version = gradient._version

    def _submission(self, unit: Unit) -> Submission:
        tensors = tuple(self._place(one).wire for one in unit.members)
        scales = self._scales
        return Submission(Kind.ALLREDUCE, _full_name(unit), tensors, tensors, scales.reduction, 1.0, scales.postscale)

    def _hurry(self, unit: Unit) -> None:
        if not isinstance(unit.pending, _Rows):
            unit.pending.handle.done()

    def _receive(self, unit: Unit) -> bool:
        pending = unit.pending
        if isinstance(pending, _Rows):
            self._show(unit.members[0], pending.receive())
            return True
        try:
            outputs = pending.handle.wait()
        except NegotiationError as error:
            if len(unit.members) > 1 or _DIFFERENT_KINDS not in str(error):
                raise
            self._send_rows_instead(unit)
            return False
        if isinstance(pending, _Dense):
            for one in unit.members:
                target = self._places[one].gradient
                self.warn_of_changes(one)
                if one.parameter.grad is not target:
                    self._settle(one, target)
            return True
        if isinstance(pending, _Said):
            self._send_rows_instead(unit)
            return False
        for one, output, context in zip(unit.members, outputs, pending.contexts, strict=True):
            whole = self._how.compression.decompress(output, context)
            self._show(one, whole.to_sparse(one.sparse_dims) if one.sparse_dims else _formed(whole, one.parameter))
        return True

    def _settle(self, one: Travelling, target: Tensor) -> None:
        """Make what came back the gradient, where the place itself is not."""
        parameter, dtype = one.parameter, gradient_dtype(one.parameter)
        if one.sparse_dims:
            self._show(one, target.to_sparse(one.sparse_dims))
        elif target.dtype != dtype:
            own = parameter.grad
            self._show(one, target.to(dtype) if own is None else own.copy_(target))
        else:
            self._show(one, target)

    def _show(self, one: Travelling, gradient: Tensor) -> None:
        parameter = one.parameter
        # Frozen since: other optimizers than those of the program itself have nothing to do there.
        if parameter.requires_grad or parameter.grad is not None:
            parameter.grad = gradient

    def _drop(self, unit: Unit) -> None:
        if isinstance(unit.pending, _Rows):
            unit.pending.receive()
        else:
            unit.pending.handle.wait()

    # ---- what does not lie in flat tensors ------------------------------------------------------------------------------

    def _send_sparse(self, unit: Unit, channel: Channel) -> None:
        if len(unit.members) > 1:
            name = next(one.name for one in unit.members if one.sparse_dims)
            what = f"parameter {name!r} has a sparse gradient, and a group travels as dense tensors"
            fix = "pass sparse_as_dense=True, or leave the parameter out of groups"
            raise ValueError(explain(what, fix=fix))
        if unit.members[0].by_rows:
            self._send_rows(unit)
        else:
            unit.pending = _Said(channel.submit(Submission(Kind.BARRIER, _full_name(unit), ())))

    def _send_rows(self, unit: Unit) -> None:
        (one,) = unit.members
        gradient = one.parameter.grad
        if gradient is None:
            gradient = no_rows(one.parameter)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        unit.pending = _Rows(sparse_allreduce_async(gradient, one.name, self._how.op, self.process_set))

    def _send_rows_instead(self, unit: Unit) -> None:
        """Now that all ranks know. See [Note: sparse gradients]."""
        (one,) = unit.members
        place, scale = self._places.get(one), self._scales.copy
        gradient = one.parameter.grad
        if gradient is not None and place is not None and place.is_taken_by(gradient) and scale != 1.0:
            gradient.div_(scale)
        one.by_rows = True
        self._send_rows(unit)

    def _send_coded(self, unit: Unit, channel: Channel) -> None:
        coded, contexts = [], []
        for one in unit.members:
            gradient = one.parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(one.parameter, dtype=gradient_dtype(one.parameter))
            elif one.sparse_dims:
                gradient = gradient.to_dense()
            wire, context = self._how.compression.compress(gradient)
            coded.append(wire.contiguous())
            contexts.append(context)
        # A compressor may have made integers of them, whose mean is the engine's business.
        factor, op = self._how.predivide_factor, Reduction(self._how.op)
        tensors = tuple(coded)
        submission = Submission(Kind.ALLREDUCE, _full_name(unit), tensors, tensors, op, 1.0 / factor, factor)
        unit.pending = _Coded(channel.submit(submission), contexts)


def _formed(gradient: Tensor, parameter: Tensor) -> Tensor:
    """In the memory format of the parameter: optimizers that work on many tensors at once take that for granted."""
    if gradient.shape != parameter.shape or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _full_name(unit: Unit) -> str:
    return f"{'grouped_' if len(unit.members) > 1 else ''}allreduce.{unit.members[0].name}"
