"""What an optimizer with ``op=Adasum`` sends: not gradients, but how far each rank's own step went.

For each parameter, when its gradient is there: the user's optimizer steps on it alone, d = after - before, and the weight
goes back to what it was. The adaptive sum of the ranks' d is added when ``step()`` is called. All ranks begin and end a step
with the same weights; each keeps an optimizer state of its own.
Source: Maleki et al. 2021, MLSys, arXiv:2006.02924; the formula stands in ``guozhuang.exchange.adasum``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from guozhuang.compat.horovod.common.process_sets import ProcessSet
from guozhuang.gradients.named import Channel, Handle, Kind, Reduction, Submission

from .backward_passes import BackwardPasses, Travelling, Unit
from .gradient_layout import GradientLayout


class AdasumExchange(BackwardPasses):
    """The exchange of all steps of one optimizer.

    Args:
        names, process_set, num_passes: see :class:`BackwardPasses`.
        compression: a class with ``compress`` and ``decompress``.
        step_on: steps on some parameters alone.
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
        self._layouts: dict[Travelling, tuple[GradientLayout, int]] = {}

    def _begin(self, channel: Channel) -> None:
        self._layouts = {}

    def _lay_out(self, some: Sequence[Travelling], channel: Channel) -> None:
        layout = GradientLayout([one.parameter for one in some], channel.allocate, lambda dtype: dtype)
        self._layouts.update({one: (layout, i) for i, one in enumerate(some)})

    def _send(self, unit: Unit) -> None:
        (one,) = unit.members
        layout, index = self._layouts[one]
        place, parameter = layout.place(index), one.parameter
        with torch.no_grad():
            place.gradient.copy_(parameter)
            # The weight is back at its value before anybody looks: graphs that saved it stay valid.
            with torch.autograd._unsafe_preserve_version_counter(parameter):
                self._step_on([parameter])
                before = place.gradient.clone()
                torch.sub(parameter, before, out=place.gradient)
                parameter.copy_(before)
        wire, context = self._compression.compress(place.wire)
        wire = wire.contiguous()
        submission = Submission(Kind.ALLREDUCE, f"allreduce.{one.name}", (wire,), (wire,), reduction=Reduction.ADASUM)
        assert self._channel is not None
        unit.pending = (self._channel.submit(submission), wire, context)

    def _hurry(self, unit: Unit) -> None:
        handle: Handle = unit.pending[0]
        handle.done()

    def _receive(self, unit: Unit) -> bool:
        handle, wire, context = unit.pending
        handle.wait()
        (one,) = unit.members
        layout, index = self._layouts[one]
        place = layout.place(index)
        whole = self._compression.decompress(wire, context)
        if whole is not place.wire:
            place.wire.copy_(whole)
        with torch.no_grad():
            one.parameter.add_(place.gradient)
        return True

    def _drop(self, unit: Unit) -> None:
        handle: Handle = unit.pending[0]
        handle.wait()
