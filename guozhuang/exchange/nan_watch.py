"""Notices that gradients became NaN, and says so once in a run, with the step, the rank and the parameters.

[Note: a few elements of each gradient] A loss that is NaN makes nearly all gradients NaN, so a few elements of each parameter
tell it; to look at all of them would cost a pass over memory in each step. NaN that is in one row only, and so is missed, is
in all weights after the next optimizer step, and in all gradients of the step after it. On the CPU elements are read at once.
On an accelerator to read them would mean to wait for it, so they are read a step later, those of all buckets at once.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import explain
from ..gradients.buckets import Bucket
from ..groups.agreement import store_of
from ..world import requested_stop_on_nan
from .numbers import some_of

_ELEMENTS = 4  # of each parameter
_PARAMETERS = 4  # of the first and of the last ones, where gradients are looked at one by one
_KEY = "guozhuang/NaN was said"
_log = logging.getLogger("guozhuang")


class NanWatch:
    """Looks at this rank's own gradients, as they are before they are exchanged.

    Args:
        group: the ranks, of which the first one that finds NaN says so; None: there is one.
        defers: whether buckets are judged in the next step; None: those on accelerators are.
        are_averaged: whether the gradients are averages over the ranks, which do not tell whose samples are the cause.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, defers: bool | None = None, *, are_averaged: bool = False
    ) -> None:
        # A watch outlives its group: gloo's connections and the store's port are free with the last reference to them.
        self._group = (lambda: None) if group is None else weakref.ref(group)
        self._defers, self._stops = defers, requested_stop_on_nan()
        self._are_averaged = are_averaged
        self._places: dict[int, tuple[Sequence[Tensor], Tensor]] = {}
        self._pending: list[tuple[int, Tensor]] = []
        self._is_over = False

    def look(self, bucket: Bucket, step: int) -> None:
        """Look at a few elements of each gradient of a bucket, which holds this rank's own gradients of a step.

        Raises:
            FloatingPointError: they hold NaN, and ``guozhuang run --stop-on-nan`` asks to stop then.
        """
        if self._is_over or not bucket.flat.numel():
            return
        is_nan = bucket.flat.index_select(0, self._places_in(bucket)).isnan().any()
        self._judge(step, is_nan, lambda: zip(bucket.names, bucket.views, strict=True))

    def look_at(self, names: Sequence[str], parameters: Sequence[Tensor], step: int) -> None:
        """Look at the first and the last few of the gradients that are here, where ranks exchange no buckets of gradients.

        Of a gradient that is divided among the ranks (a DTensor) this rank's part is looked at. Parameters without a gradient,
        as those of frozen layers and of other stages of a pipeline, are passed over.

        Raises:
            FloatingPointError: as ``look`` does.
        """
        if self._is_over:
            return
        here = [p for p in parameters if p.grad is not None]
        few = here if len(here) <= 2 * _PARAMETERS else (*here[:_PARAMETERS], *here[-_PARAMETERS:])
        gradients = [g for p in few if (g := _own_part(p)) is not None and g.layout == torch.strided and g.numel()]
        flags = [each.flatten()[:: max(1, each.numel() // _ELEMENTS)].isnan().any() for each in gradients]
        if flags and len({flag.device for flag in flags}) == 1:
            pairs = zip(names, map(_own_part, parameters), strict=True)
            self._judge(step, torch.stack(flags).any(), lambda: ((name, g) for name, g in pairs if g is not None))

    def _judge(self, step: int, is_nan: Tensor, gradients: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        if not (is_nan.device.type != "cpu" if self._defers is None else self._defers):
            if bool(is_nan):
                self._found(step, [name for name, gradient in gradients() if gradient.isnan().any()])
            return
        before = [(number, flag) for number, flag in self._pending if number != step]
        self._pending = [(number, flag) for number, flag in self._pending if number == step]
        self._pending.append((step, is_nan))
        # The flags of a step are read together, because each reading waits for the accelerator.
        for device in {flag.device for _, flag in before}:
            flags = [(number, flag) for number, flag in before if flag.device == device]
            if bool(torch.stack([flag for _, flag in flags]).any()):
                self._found(next(number for number, flag in flags if bool(flag)), [])
                return

    def _places_in(self, bucket: Bucket) -> Tensor:
        known = self._places.get(bucket.index)
        if known is None or known[0] is not bucket.views:
            base = bucket.flat.storage_offset()
            places = [
                view.storage_offset() - base + round(part * (view.numel() - 1) / (_ELEMENTS - 1))
                for view in bucket.views
                if view.numel()
                for part in range(_ELEMENTS)
            ]
            known = (bucket.views, torch.tensor(sorted(set(places)), device=bucket.flat.device))
            self._places[bucket.index] = known
        return known[1]

    def _found(self, step: int, names: Sequence[str]) -> None:
        self._is_over, self._places, self._pending = True, {}, []
        # Of a training whose ranks average in several groups, one rank says it, by its number in the whole world.
        is_first, group = True, dist.group.WORLD if dist.is_initialized() else self._group()
        with contextlib.suppress(RuntimeError):  # a store that is gone
            is_first = group is None or store_of(group).add(_KEY, 1) == 1
        which, whose = (
            ("averaged gradient", "all ranks' batches") if self._are_averaged else ("gradient", "this rank's batch")
        )
        what = f"step {step}: the {which} of {some_of(names)} is NaN here, so the loss or what led to it was"
        fix = f"look at {whose}, the learning rate and the precision; with a GradScaler this may happen now and then"
        text = explain(what, rank=0 if group is None else group.rank(), fix=fix)
        if self._stops:
            raise FloatingPointError(text)
        if is_first:
            _log.warning("%s (said once; guozhuang run --stop-on-nan ends the run)", text)


def _own_part(parameter: Tensor) -> Tensor | None:
    gradient: Any = parameter.grad
    part: Tensor | None = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return part
