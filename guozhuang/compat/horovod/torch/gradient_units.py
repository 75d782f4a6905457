"""Sends a ``DistributedOptimizer``'s gradients, in flat tensors that are reduced in place, or its steps for Adasum.

[Note: scales] A mean over n ranks is a sum of gradients that were multiplied by 1/n as they were copied into the flat tensor:
this needs no further pass over memory, and float16 does not overflow as long as the mean fits. With
``gradient_predivide_factor`` f the copy multiplies by 1/f, and the engine multiplies the sum by f/n.

[Note: buckets by agreement] Ranks may have parameters in different orders, or different parameters. So at first each gradient
is sent under its own name, and besides the ranks compare a digest of their parameters: names, shapes, dtypes and strides, in
order. If all digests are equal, whole buckets are sent from the next step on, each under one name. Otherwise gradients keep
their own names, by which the engine matches them in any order and reports which one differs; the digest is compared again in
each step. A rank that has joined supplies zeros, which equal no digest, so ranks always agree in the same step.

[Note: why not the reducer] ``guozhuang.gradients.reducer`` starts buckets in one order on all ranks, in a group of its own. A
Horovod script may run the backwards of several optimizers in different orders on different ranks, may join, expects that a
mismatch is an error of one name on all ranks after which the job goes on, that a missing rank is named, and that timeline and
tuner see gradients. All of this follows from matching by name, so gradients are submitted as other collectives are; buckets,
views and the rules for gradients that a program keeps are the reducer's.

[Note: sparse gradients] A sparse gradient is sent as rows, unlike a dense one, so ranks must agree on which it is; but a rank
that did not use the parameter cannot know. So a rank whose gradient is sparse for the first time does not send the unit, but
submits a barrier under the unit's name, under which other ranks may submit an all-reduce. Either all ranks submit the barrier,
or all get the error that they submitted different kinds of collectives. In both cases a bucket is sent again parameter by
parameter, and a single parameter as rows, which may be none. From then on all ranks know that the gradient is sparse.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack
from typing_extensions import override

from guozhuang.compat.horovod.common.exceptions import HorovodInternalError
from guozhuang.compat.horovod.common.process_sets import ProcessSet
from guozhuang.errors import explain
from guozhuang.exchange.sparse import no_rows
from guozhuang.gradients.buckets import (
    DEFAULT_CAP_BYTES,
    Allocate,
    Bucket,
    Caps,
    Placement,
    Slot,
    assign,
    gradient_dtype,
)
from guozhuang.gradients.named import Handle, Kind, NamedChannel, NegotiationError, Reduction, Submission
from guozhuang.gradients.views import GradientViews

from .backward_passes import BackwardPasses, HookedParameter, Pending, Unit, form_of
from .compression import Compression
from .mpi_ops import sparse_allreduce_async

_FIRST_CAP_BYTES: Final = 4 << 20


class _FlatGradients:
    """The flat tensor of some parameters' gradients, allocated when the first of them is filled."""

    def __init__(self, members: Sequence[HookedParameter], allocate: Allocate) -> None:
        self.members = members
        self._allocate = allocate
        self._views: GradientViews | None = None
        self._has_begun = False
        self._aliased: Tensor | None = None

    def begin(self, scale: float) -> GradientViews:
        """Return the views of gradients; a step's first call prepares them for gradients that are multiplied by ``scale``."""
        if self._views is None:
            parameters = [one.parameter for one in self.members]
            names = [one.name for one in self.members]
            self.bucket = Bucket(0, True, names, parameters, allocate=self._allocate)
            count = len(parameters)
            self._views = GradientViews(parameters, Placement([tuple(range(count))], [self.bucket], [0] * count))
        if not self._has_begun:
            self._views.begin(scale)
        self._has_begun = True
        return self._views

    def was_filled(self, index: int) -> bool:
        """Return whether a gradient was copied into the flat tensor, scaled, in this step."""
        return self._views is not None and self._has_begun and self._views.filled[index]

    def end(self) -> None:
        """End the step; the next :meth:`begin` prepares the views again."""
        self._has_begun = False

    def wire(self, index: int) -> Tensor:
        """Return the elements of one gradient as a contiguous tensor, in the order in which they lie in memory.

        The tensor has a storage object of its own, so that references held by the engine do not count as the program's.
        """
        if self._aliased is not self.bucket.flat:
            self._aliased, self._alias = self.bucket.flat, from_dlpack(to_dlpack(self.bucket.flat))
        view = self.bucket.views[index]
        dims = [d for d in range(view.dim()) if view.shape[d] > 1]
        outermost_first = sorted(dims, key=lambda d: -view.stride()[d])
        shape = list(view.shape)
        if outermost_first != dims:
            # An extra dim, so that ranks with different memory formats differ in shape and get an error, not a wrong sum.
            shape = [view.shape[d] for d in outermost_first] + [1] * (view.dim() + 1 - len(dims))
        begin = view.storage_offset() - self.bucket.flat.storage_offset()
        return self._alias[begin : begin + view.numel()].view(shape)


class GradientUnits(BackwardPasses):
    """Exchanges all gradients of one optimizer.

    Args:
        names, process_set, num_passes: see :class:`BackwardPasses`.
        compression: a class with ``compress`` and ``decompress``.
        op: one of the constants of ``mpi_ops``.
        predivide_factor: see [Note: scales].
        sparse_as_dense: whether sparse gradients are sent as dense ones.
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        process_set: ProcessSet,
        num_passes: int,
        compression: Any,
        op: int,
        predivide_factor: float,
        sparse_as_dense: bool,
    ) -> None:
        super().__init__(names, process_set, num_passes)
        self._compression, self._op = compression, op
        self._predivide_factor, self._sparse_as_dense = predivide_factor, sparse_as_dense
        # ``none`` and ``fp16`` work element by element, so they can be applied to flat tensors of scaled gradients.
        self._is_elementwise = compression in (Compression.none, Compression.fp16)
        self._is_grouped = self._is_agreed = self._is_split = False
        self._scale, self._reduction, self._prescale, self._postscale = 1.0, Reduction(op), 1.0, 1.0
        self._flats: dict[tuple[HookedParameter, ...], _FlatGradients] = {}
        self._places: dict[HookedParameter, tuple[_FlatGradients, int]] = {}
        self._vote: tuple[Handle, Tensor] | None = None

    @override
    def group(self, members: Sequence[Sequence[int]]) -> None:
        super().group(members)
        self._is_grouped = True

    # ---- the layout of gradients in flat tensors ----------------------------------------------------------------------

    @override
    def _begin(self, channel: NamedChannel) -> None:
        factor = self._predivide_factor
        if not self._is_elementwise:  # a compressor may return integers: let the engine compute the mean
            self._prescale, self._postscale = 1.0 / factor, factor
        elif self._op == Reduction.AVERAGE:  # add up scaled gradients, see [Note: scales]
            self._reduction = Reduction.SUM
            self._scale = 1.0 / (channel.size if factor == 1.0 else factor)
            self._postscale = 1.0 if factor == 1.0 else factor / channel.size
        self._flats, self._places, self._is_agreed, self._is_split = {}, {}, False, False
        if not self._is_grouped:
            self.units = [Unit([one]) for one in self.hooked]
            self._num_left = len(self.units)

    @override
    def _lay_out(self, some: Sequence[HookedParameter], channel: NamedChannel) -> None:
        self._is_agreed = False
        limit = channel.settings.fusion_threshold_bytes or DEFAULT_CAP_BYTES
        parts, caps = [list(reversed(some))], Caps((min(_FIRST_CAP_BYTES, limit), min(DEFAULT_CAP_BYTES, limit)))
        if self._is_grouped:
            parts, caps = [list(unit.members) for unit in dict.fromkeys(one.unit for one in some)], Caps((sys.maxsize,))
        for part in parts:
            dense = [one for one in part if not one.by_rows]
            slots = [Slot(p.numel(), gradient_dtype(p), p.device) for p in (one.parameter for one in dense)]
            for bucket in assign(slots, range(len(slots)), caps):
                members = tuple(dense[i] for i in bucket)
                flat = self._flats.setdefault(members, _FlatGradients(members, channel.allocate))
                self._places.update({one: (flat, i) for i, one in enumerate(members)})

    @override
    def _opened(self, channel: NamedChannel) -> None:
        # Autotuning needs the name of each gradient, which buckets lack.
        fuses = channel.settings.fusion_threshold_bytes > 0 and channel.settings.autotune is None
        if self._is_agreed or self._is_grouped or not (self._is_elementwise and self.hooked and fuses):
            return
        description = [
            (one.name, str(one.parameter.dtype), one.parameter.device.type, *form_of(one)[2:]) for one in self.hooked
        ]
        digest = int.from_bytes(hashlib.sha256(repr(description).encode()).digest()[:7], "big") + 1
        vote = torch.tensor([digest, -digest])
        name = f"allreduce.guozhuang.layout.{min(one.name for one in self.hooked)}"
        submission = Submission(Kind.ALLREDUCE, name, (vote,), (vote,), Reduction.MIN)
        try:
            self._vote = channel.submit(submission), vote
        except NegotiationError as error:  # the engine has failed
            raise HorovodInternalError(str(error)) from error

    @override
    def _closed(self) -> None:
        for flat in self._flats.values():
            flat.end()
        if self._vote is not None:
            (handle, vote), self._vote = self._vote, None
            with contextlib.suppress(NegotiationError):  # the exchange of the units raises the same error
                handle.wait()
                least, most = vote.tolist()
                if least == -most:
                    self._unite()
        elif self._is_split:
            self._unite()

    def _unite(self) -> None:
        """Send whole buckets from now on; all ranks call it in the same step. See [Note: buckets by agreement]."""
        assert self._channel is not None
        before, self._flats = self._flats, {}
        self._lay_out(self.hooked, self._channel)
        self._flats = {members: before.get(members, flat) for members, flat in self._flats.items()}
        self._places = {one: (flat, i) for flat in self._flats.values() for i, one in enumerate(flat.members)}
        self.units = [Unit(flat.members, is_bucket=True) for flat in self._flats.values()]
        self.units += [Unit([one]) for one in self.hooked if one.by_rows]
        self._is_agreed, self._is_split = True, False

    # ---- sending units and storing their results ------------------------------------------------------------------------

    @override
    def _send(self, unit: Unit) -> None:
        channel = self._channel
        assert channel is not None
        for one in unit.members:
            gradient = one.parameter.grad
            if gradient is not None:
                one.sparse_dims = gradient.sparse_dim() if gradient.is_sparse else 0
        if any(one.by_rows or (one.sparse_dims and not self._sparse_as_dense) for one in unit.members):
            self._send_sparse(unit, channel)
            return
        tensors = self._filled(unit)
        compressed = [self._compression.compress(tensor) for tensor in tensors]
        wires = tuple(wire.contiguous() for wire, _ in compressed)
        handle = channel.submit(
            Submission(
                Kind.ALLREDUCE,
                _full_name(unit),
                tensors=wires,
                outputs=wires,
                reduction=self._reduction,
                prescale=self._prescale,
                postscale=self._postscale,
            )
        )

        def receive(_: Any) -> bool:
            for one in unit.members:
                self.warn_of_changes(one)
            for tensor, wire, (_, context) in zip(tensors, wires, compressed, strict=True):
                if wire is not tensor:
                    tensor.copy_(self._compression.decompress(wire, context))
            for one in unit.members:
                self._show(one)
            return True

        unit.pending = Pending(handle.wait, receive, handle.done)

    def _filled(self, unit: Unit) -> list[Tensor]:
        """Copy a unit's gradients, scaled, into flat tensors, zeros where there are none; return the tensors to send."""
        for one in unit.members:
            flat, index = self._places[one]
            views = flat.begin(self._scale)
            if not views.filled[index]:
                views.fill(index)
                one.version = -1 if one.parameter.grad is None else one.parameter.grad._version
        if unit.is_bucket:
            return [self._places[unit.members[0]][0].bucket.flat]
        if self._is_elementwise:
            return [flat.wire(index) for flat, index in map(self._places.__getitem__, unit.members)]
        return [flat.bucket.views[index] for flat, index in map(self._places.__getitem__, unit.members)]

    def _show(self, one: HookedParameter) -> None:
        """Make the result of the exchange the parameter's ``.grad``."""
        parameter = one.parameter
        if not parameter.requires_grad and parameter.grad is None:
            return  # with a ``.grad`` the optimizer would change this parameter, which the program has frozen since
        flat, index = self._places[one]
        parameter.grad = None
        flat.begin(self._scale).settle(index, used=True)
        if one.sparse_dims and parameter.grad is not None:
            parameter.grad = parameter.grad.to_sparse(one.sparse_dims)

    # ---- sparse gradients -------------------------------------------------------------------------------------------------

    def _send_sparse(self, unit: Unit, channel: NamedChannel) -> None:
        if len(unit.members) > 1 and not unit.is_bucket:
            name = next(one.name for one in unit.members if one.sparse_dims)
            what = f"parameter {name!r} has a sparse gradient, and a group travels as dense tensors"
            fix = "pass sparse_as_dense=True, or leave the parameter out of groups"
            raise ValueError(explain(what, fix=fix))
        if unit.members[0].by_rows:
            self._send_rows(unit)
            return
        handle = channel.submit(Submission(Kind.BARRIER, _full_name(unit), ()))
        unit.pending = Pending(handle.wait, lambda _: False, handle.done)

    @override
    def _retried(self, unit: Unit, error: NegotiationError | None) -> list[Unit]:
        """Send a unit in another way, now that all ranks know of a sparse gradient. See [Note: sparse gradients]."""
        is_group = len(unit.members) > 1 and not unit.is_bucket
        if error is not None and (is_group or not error.is_of_kinds):
            raise error
        if len(unit.members) == 1:
            unit.members[0].by_rows = True
            self._send_rows(unit)
            return [unit]
        self._is_split = True
        single = [Unit([one]) for one in unit.members]
        self.units = [each for each in self.units if each is not unit] + single
        for each in single:
            self._launch(each)
        return single

    def _send_rows(self, unit: Unit) -> None:
        (one,) = unit.members
        gradient = one.parameter.grad
        if gradient is None:
            gradient = no_rows(one.parameter)
        elif not gradient.is_sparse:
            flat, index = self._places.get(one, (None, 0))
            if flat is not None and flat.was_filled(index) and self._scale != 1.0:
                gradient = gradient / self._scale
            gradient = gradient.to_sparse(1)

        def receive(rows: Tensor) -> bool:
            if one.parameter.requires_grad or one.parameter.grad is not None:
                one.parameter.grad = rows
            return True

        unit.pending = Pending(sparse_allreduce_async(gradient, one.name, self._op, self.process_set), receive)


class AdasumUnits(BackwardPasses):
    """Exchanges not gradients, but the change of each weight by the rank's own step.

    When the gradient of a parameter is complete, the user's optimizer steps on it alone, d = after - before, and the weight is
    set back to its value from before. The adaptive sum of the ranks' d is added when ``step()`` is called. All ranks begin and
    end a step with the same weights; each keeps an optimizer state of its own.
    Source: Maleki et al. 2021, MLSys, arXiv:2006.02924; the formula stands in ``guozhuang.exchange.adasum``.

    Args:
        names, process_set, num_passes: see :class:`BackwardPasses`.
        compression: a class with ``compress`` and ``decompress``.
        step_on: function that makes the optimizer step on the given parameters only.
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        process_set: ProcessSet,
        num_passes: int,
        compression: Any,
        step_on: Callable[[Sequence[Tensor]], None],
    ) -> None:
        super().__init__(names, process_set, num_passes)
        self._compression, self._step_on = compression, step_on

    @override
    def _send(self, unit: Unit) -> None:
        parameter = unit.members[0].parameter
        with torch.no_grad():
            before = parameter.clone()
            # Keep the version counter, so that autograd graphs stay valid: the weight gets its old value back before use.
            with torch.autograd._unsafe_preserve_version_counter(parameter):
                self._step_on([parameter])
                delta = parameter - before
                parameter.copy_(before)
        wire, context = self._compression.compress(delta)
        wire = wire.contiguous()
        submission = Submission(Kind.ALLREDUCE, _full_name(unit), (wire,), (wire,), Reduction.ADASUM)
        assert self._channel is not None
        handle = self._channel.submit(submission)

        def receive(_: Any) -> bool:
            with torch.no_grad():
                parameter.add_(self._compression.decompress(wire, context))
            return True

        unit.pending = Pending(handle.wait, receive, handle.done)


def _full_name(unit: Unit) -> str:
    if unit.is_bucket and len(unit.members) > 1:
        return f"allreduce.{unit.members[0].name} and {len(unit.members) - 1} more"
    return f"{'grouped_' if len(unit.members) > 1 else ''}allreduce.{unit.members[0].name}"
