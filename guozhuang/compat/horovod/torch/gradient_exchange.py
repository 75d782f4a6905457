"""What a ``DistributedOptimizer`` sends: gradients, each copied once into memory that the group reduces in place.

[Note: scales] A mean over n ranks is a sum of gradients that were multiplied with 1/n in the copy that brings them there
anyway: no further pass over memory, and float16 does not overflow as long as the mean fits. With ``gradient_predivide_factor``
f the copy multiplies with 1/f, and the engine the sum with f/n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from guozhuang.compat.horovod.common.process_sets import ProcessSet
from guozhuang.errors import explain
from guozhuang.exchange.sparse import no_rows
from guozhuang.negotiated import Channel, Handle, Kind, Reduction, Submission

from .backward_passes import BackwardPasses, Travelling, Unit
from .compression import Compression
from .gradient_layout import GradientLayout, Place
from .mpi_ops import sparse_allreduce_async


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


class _Sparse:
    """What is under way of a sparse gradient: a call that waits and returns it."""

    def __init__(self, receive: Callable[[], Tensor]) -> None:
        self.receive = receive


class _Coded:
    """What is under way of gradients that a compressor of the user's has made."""

    def __init__(self, handle: Handle, contexts: Sequence[Any]) -> None:
        self.handle, self.contexts = handle, contexts


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
        self._channel: Channel | None = None
        self._signature: list[tuple[torch.dtype, torch.device]] = []
        self._scales = _Scales(1.0, Reduction.SUM, 1.0)
        self._layouts: dict[Travelling, tuple[GradientLayout, int]] = {}
        self._places: dict[Travelling, Place] = {}
        self._submissions: dict[Unit, Submission] = {}

    # ---- the layout ---------------------------------------------------------------------------------------------------

    def _added(self, added: Sequence[Travelling]) -> None:
        if self._channel is not None:
            self._lay_out(added, self._channel)

    def _begin(self, channel: Channel) -> None:
        signature = [(one.parameter.dtype, one.parameter.device) for one in self.travelling]
        if channel is self._channel and signature == self._signature:
            return
        self._channel, self._signature = channel, signature
        self._scales = self._find_scales(channel)
        self._layouts, self._places, self._submissions = {}, {}, {}
        self._lay_out(self.travelling, channel)

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
        if self._is_coded:
            self._send_coded(unit, channel)
            return
        for one in unit.members:
            if not self._fill(one):
                self._send_sparse(unit)
                return
        submission = self._submissions.get(unit)
        if submission is None:
            submission = self._submissions[unit] = self._submission(unit)
        unit.pending = channel.submit(submission)

    def _fill(self, one: Travelling) -> bool:
        """Copy the gradient, scaled, to its place; zeros where there is none. False: it is sparse, and travels by its rows."""
        parameter, scale = one.parameter, self._scales.copy
        gradient = parameter.grad
        if self._is_sparse(one, gradient):
            if not self._how.sparse_as_dense:
                return False
            gradient = None if gradient is None else gradient.to_dense()
        place = self._place(one)
        if gradient is place.gradient:
            if scale != 1.0:
                gradient.mul_(scale)
            one.version = gradient._version
            return True
        place.leave_kept()  # counts references, so before there is one here
        target = place.gradient
        if gradient is None:
            target.zero_()
            return True
        torch.mul(gradient, scale, out=target)
        if not one.sparse_dims:
            if target.dtype == gradient.dtype:
                parameter.grad = gradient = target
            one.version = gradient._version
        return True

    def _submission(self, unit: Unit) -> Submission:
        tensors = tuple(self._place(one).wire for one in unit.members)
        scales = self._scales
        return Submission(Kind.ALLREDUCE, _full_name(unit), tensors, tensors, scales.reduction, 1.0, scales.postscale)

    def _hurry(self, unit: Unit) -> None:
        pending = unit.pending
        if not isinstance(pending, _Sparse):
            (pending.handle if isinstance(pending, _Coded) else pending).done()

    def _receive(self, unit: Unit) -> None:
        pending = unit.pending
        if isinstance(pending, _Sparse):
            unit.members[0].parameter.grad = pending.receive()
        elif isinstance(pending, _Coded):
            for one, output, context in zip(unit.members, pending.handle.wait(), pending.contexts, strict=True):
                whole = self._how.compression.decompress(output, context)
                self._show(one, whole.to_sparse(one.sparse_dims) if one.sparse_dims else whole)
        else:
            pending.wait()
            for one in unit.members:
                target = self._places[one].gradient
                if one.parameter.grad is target:
                    self.warn_of_changes(one)
                else:
                    self._settle(one, target)

    def _settle(self, one: Travelling, target: Tensor) -> None:
        """Make what came back the gradient, where the place itself is not."""
        parameter = one.parameter
        self.warn_of_changes(one)
        if one.sparse_dims:
            self._show(one, target.to_sparse(one.sparse_dims))
        elif target.dtype != parameter.dtype:
            own = parameter.grad
            self._show(one, target.to(parameter.dtype) if own is None else own.copy_(target))
        else:
            self._show(one, target)

    def _show(self, one: Travelling, gradient: Tensor) -> None:
        parameter = one.parameter
        # Frozen since: other optimizers than those of the program itself have nothing to do there.
        if parameter.requires_grad or parameter.grad is not None:
            parameter.grad = gradient

    def _drop(self, unit: Unit) -> None:
        pending = unit.pending
        if isinstance(pending, _Sparse):
            pending.receive()
        else:
            (pending.handle if isinstance(pending, _Coded) else pending).wait()

    # ---- what does not lie in flat tensors ------------------------------------------------------------------------------

    def _is_sparse(self, one: Travelling, gradient: Tensor | None) -> bool:
        """Tell whether the gradient is sparse, or was last time where there is none now."""
        if gradient is not None:
            one.sparse_dims = gradient.sparse_dim() if gradient.is_sparse else 0
        return one.sparse_dims > 0

    def _send_sparse(self, unit: Unit) -> None:
        if len(unit.members) > 1:
            name = next(one.name for one in unit.members if one.sparse_dims)
            what = f"parameter {name!r} has a sparse gradient, and a group travels as dense tensors"
            fix = "pass sparse_as_dense=True, or leave the parameter out of groups"
            raise ValueError(explain(what, fix=fix))
        one = unit.members[0]
        gradient = one.parameter.grad
        gradient = no_rows(one.parameter) if gradient is None else gradient
        unit.pending = _Sparse(sparse_allreduce_async(gradient, one.name, self._how.op, self.process_set))

    def _send_coded(self, unit: Unit, channel: Channel) -> None:
        coded, contexts = [], []
        for one in unit.members:
            gradient = one.parameter.grad
            if self._is_sparse(one, gradient):
                if not self._how.sparse_as_dense:
                    self._send_sparse(unit)
                    return
                gradient = None if gradient is None else gradient.to_dense()
            gradient = torch.zeros_like(one.parameter) if gradient is None else gradient
            wire, context = self._how.compression.compress(gradient)
            coded.append(wire.contiguous())
            contexts.append(context)
        # A compressor may have made integers of them, whose mean is the engine's business.
        factor, op = self._how.predivide_factor, Reduction(self._how.op)
        tensors = tuple(coded)
        submission = Submission(Kind.ALLREDUCE, _full_name(unit), tensors, tensors, op, 1.0 / factor, factor)
        unit.pending = _Coded(channel.submit(submission), contexts)


def _full_name(unit: Unit) -> str:
    return f"{'grouped_' if len(unit.members) > 1 else ''}allreduce.{unit.members[0].name}"
