"""Counts the gradients of each parameter, and sends a parameter's gradient after the last backward pass of a step.

[Note: units] Gradients are sent in *units*: the gradient of one parameter, or those of several. The hook of the gradient that
completes a unit sends it, while backward goes on. A unit that is not complete when the step ends is sent then, with zeros for
parameters that have no gradient here, because other ranks may have one. So every rank sends every unit once a step, in any
order.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from guozhuang.compat.horovod.common.exceptions import HorovodInternalError
from guozhuang.compat.horovod.common.process_sets import ProcessSet, member_of
from guozhuang.errors import explain
from guozhuang.gradients.named import NamedChannel, NegotiationError
from guozhuang.gradients.passes import weakly

if TYPE_CHECKING:
    from guozhuang.exchange.nan_watch import NanWatch


class HookedParameter:
    """A parameter whose gradients are exchanged.

    Attributes:
        parameter: the tensor. name: the name by which ranks match its gradients.
        left: number of gradients that it still gets in this step before they are sent.
        came: whether it got a gradient in this step.
        unit: the unit in which its gradient is sent.
        version: version counter of ``.grad`` when it was sent, to detect in-place changes by the program; -1: not sent.
        sparse_dims: number of sparse dimensions of its last gradient; 0: that was dense.
        by_rows: whether all ranks know that its gradients are sparse and are sent as rows.
    """

    __slots__ = ("by_rows", "came", "left", "name", "parameter", "sparse_dims", "unit", "version")

    def __init__(self, parameter: Tensor, name: str, num_passes: int) -> None:
        self.parameter, self.name, self.left = parameter, name, num_passes
        self.came, self.version, self.sparse_dims, self.by_rows = False, -1, 0, False
        self.unit: Unit = Unit([self])


@dataclass(slots=True)
class Pending:
    """The running exchange of a unit of gradients, whose result was not stored yet.

    Attributes:
        wait: waits for the result of the exchange, and returns it.
        receive: stores a result as gradients; returns False if the unit has to be sent again in another way.
        hurry: asks the channel to begin without collecting more; None if that is not needed.
    """

    wait: Callable[[], Any]
    receive: Callable[[Any], bool]
    hurry: Callable[[], object] | None = None


class Unit:
    """Parameters whose gradients are sent together. See [Note: units].

    Attributes:
        members: the parameters.
        num_left: how many of the parameters still wait for gradients in this step.
        pending: the exchange while it runs; None before and after.
        is_bucket: whether its gradients lie in one flat tensor and are sent as that tensor.
    """

    __slots__ = ("is_bucket", "members", "num_left", "pending")

    def __init__(self, members: Sequence[HookedParameter], is_bucket: bool = False) -> None:
        self.members, self.num_left, self.is_bucket = members, len(members), is_bucket
        self.pending: Pending | None = None
        for member in members:
            member.unit = self


class BackwardPasses(ABC):
    """Hooks an optimizer's parameters, and sends their gradients in units. See [Note: units].

    Args:
        names: name of each parameter.
        process_set: the ranks that exchange.
        num_passes: number of backward passes in a step; gradients accumulate on this rank until the last.

    Attributes:
        hooked: the parameters that take part.
        units: the units of their gradients.
        num_passes: number of backward passes in a step, from the next step on.
        is_open: whether a gradient came or was sent since the last step.
    """

    def __init__(self, names: Mapping[Tensor, str], process_set: ProcessSet, num_passes: int) -> None:
        self.names, self.process_set, self.num_passes = names, process_set, num_passes
        self.hooked: list[HookedParameter] = []
        self.units: list[Unit] = []
        self.is_open = False
        self._num_left = 0  # number of units that still lack a gradient in this step
        self._asleep: list[Tensor] = []  # parameters that did not require a gradient so far
        self._hooks: list[Any] = []
        self._channel: NamedChannel | None = None
        self._nan: NanWatch | None = None
        self._num_steps = 0
        self._forms: list[Any] = []  # dtype, device, shape and strides of each parameter when its gradient was laid out
        self._lock = threading.RLock()  # a model on several devices has a backward thread per device
        self._warned = False

    # ---- the parameters that are hooked -------------------------------------------------------------------------------

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Exchange the gradients of these parameters from now on, or from the step on in which they require gradients."""
        order = {id(p): place for place, p in enumerate(self.names)}
        added = []
        for parameter in sorted(parameters, key=lambda p: order[id(p)]):
            if not parameter.requires_grad:
                self._asleep.append(parameter)
            elif parameter.numel():
                one = HookedParameter(parameter, self.names[parameter], self.num_passes)
                hook = weakly(self._on_gradient, len(self.hooked))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
                self.hooked.append(one)
                self.units.append(one.unit)
                self._num_left += 1
                added.append(one)
        if added and self._channel is not None:
            self._forms += map(form_of, added)
            self._lay_out(added, self._channel)

    def group(self, members: Sequence[Sequence[int]]) -> None:
        """Send the gradients of each group of parameters as one unit; ``members`` has each group as indices in ``hooked``."""
        self.units = [Unit([self.hooked[i] for i in indices]) for indices in members]
        self._num_left = len(self.units)

    def _take_woken(self) -> None:
        awake = [p for p in self._asleep if p.requires_grad]
        if awake:
            self._asleep = [p for p in self._asleep if not p.requires_grad]
            self.take(awake)

    # ---- a step, from its first gradient to its last result -----------------------------------------------------------

    def _on_gradient(self, index: int) -> None:
        with self._lock:
            one = self.hooked[index]
            gradient = one.parameter.grad
            if one.left <= 0:
                what = "Gradients were computed more than backward_passes_per_step times before call to step()"
                fix = "Increase backward_passes_per_step to accumulate gradients locally, or call step() more often"
                raise AssertionError(explain(what, value=f"{self.num_passes}, parameter {one.name!r}", fix=fix))
            if gradient is not None and gradient.requires_grad:
                what = f"the gradient of {one.name!r} has a graph of its own, which is not known on other ranks"
                fix = "use torch.autograd.grad(..., create_graph=True) in place of backward(create_graph=True)"
                raise AssertionError(explain(what, fix=fix))
            self.open()
            one.came = True
            one.left -= 1
            if one.left == 0:
                unit = one.unit
                unit.num_left -= 1
                if unit.num_left == 0:
                    self._launch(unit)
                    self._num_left -= 1
                    # Send a large unit, or the last of a step, at once: the channel need not wait for more tensors to fuse.
                    if (unit.is_bucket or self._num_left == 0) and unit.pending is not None and unit.pending.hurry:
                        unit.pending.hurry()

    def open(self) -> None:
        """Begin a step unless one has begun; lay gradients out again if parameters or the channel have changed."""
        if self.is_open:
            return
        channel = member_of(self.process_set).channel
        forms = [form_of(one) for one in self.hooked]
        if channel is not self._channel or forms != self._forms:
            if channel is not self._channel:
                self._nan = channel.nan_watch()
            for one in self.hooked:
                one.by_rows &= channel is self._channel  # ranks of a new channel do not know which gradients are sparse
            self._channel, self._forms = channel, forms
            self._begin(channel)
            self._lay_out(self.hooked, channel)
        self.is_open = True
        self._opened(channel)

    def finish(self) -> None:
        """Send the units that were not sent yet, wait for all units, and begin the next step.

        Raises:
            HorovodInternalError: an exchange failed; all others have ended, and the next step may begin.
        """
        with self._lock:
            self._take_woken()
            if self.units:
                self.open()
            try:
                failed = self._finish()
            except Exception:  # not BaseException: KeyboardInterrupt must not wait for other units
                self.abandon()
                raise
            self._forget()
            self._num_steps += 1
            if failed is not None:
                raise HorovodInternalError(str(failed)) from failed

    def _finish(self) -> RuntimeError | None:
        """Send the units that were not sent yet and wait for all units; return the first error, or None."""
        failed: RuntimeError | None = None
        for unit in self.units:
            if unit.pending is None:
                self._launch(unit)
        waiting = list(self.units)
        while waiting:
            again: list[Unit] = []
            for unit in waiting:
                try:
                    again += self._receive(unit)
                except (NegotiationError, HorovodInternalError) as error:
                    failed = failed or error
                    unit.pending = None
                except Exception:
                    unit.pending = None
                    raise
            waiting = again
        return failed

    def _receive(self, unit: Unit) -> list[Unit]:
        """Wait for a unit and store its result; return the units that were sent again in its place, if any."""
        pending = unit.pending
        assert pending is not None
        try:
            result = pending.wait()
        except NegotiationError as error:
            return self._retried(unit, error)
        if not pending.receive(result):
            return self._retried(unit, None)
        unit.pending = None
        return []

    def _launch(self, unit: Unit) -> None:
        assert self._nan is not None
        members = unit.members
        self._nan.look_at([one.name for one in members], [one.parameter for one in members], self._num_steps)
        try:
            self._send(unit)
        except NegotiationError as error:  # the engine has failed
            raise HorovodInternalError(str(error)) from error

    def abandon(self) -> None:
        """End the step and drop the results of running exchanges, after waiting until none uses gradients' memory."""
        with self._lock:
            for unit in self.units:
                if unit.pending is not None:
                    with contextlib.suppress(RuntimeError):  # errors do not matter, since the result is dropped
                        unit.pending.wait()
            self._forget()

    def _forget(self) -> None:
        self.is_open = False
        for one in self.hooked:
            one.left, one.came, one.version = self.num_passes, False, -1
        for unit in self.units:
            unit.num_left, unit.pending = len(unit.members), None
        self._closed()
        self._num_left = len(self.units)

    def sent(self) -> list[Tensor]:
        """Return the parameters whose gradients are under way."""
        return [one.parameter for unit in self.units if unit.pending is not None for one in unit.members]

    def handles(self) -> dict[Any, tuple[Any, Any]]:
        """Return running exchanges by parameter, or by tuple of parameters for a group; None where a gradient is not sent."""
        found: dict[Any, tuple[Any, Any]] = {}
        for unit in self.units:
            if unit.pending is not None and len(unit.members) > 1 and not unit.is_bucket:
                found[tuple(one.parameter for one in unit.members)] = (unit.pending, None)
            elif unit.pending is not None:
                found.update({one.parameter: (unit.pending, None) for one in unit.members})
            else:
                found.update({one.parameter: (None, None) for one in unit.members if one.came})
        return found

    def warn_of_changes(self, one: HookedParameter) -> None:
        """Warn, the first time that the program changed a gradient in place while it was exchanged."""
        gradient = one.parameter.grad
        if gradient is None or one.version < 0 or gradient._version == one.version or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the gradient of {one.name!r} was changed in place after backward() and before its exchange had ended, so the "
            "change is lost or half lost. Call optimizer.synchronize() before gradients are clipped or unscaled, and then "
            "step() inside `with optimizer.skip_synchronize():`.",
            stacklevel=_level_of_the_program(),
        )

    # ---- methods for subclasses to implement --------------------------------------------------------------------------

    def _begin(self, channel: NamedChannel) -> None:  # noqa: B027 - there may be nothing to forget
        """Drop the layout of gradients in memory, because parameters or the channel have changed, as after ``hvd.init``."""

    def _lay_out(self, some: Sequence[HookedParameter], channel: NamedChannel) -> None:  # noqa: B027
        """Choose the places in memory for the gradients of added parameters, or of all parameters after :meth:`_begin`."""

    def _opened(self, channel: NamedChannel) -> None:  # noqa: B027
        """Prepare a step; called before its first gradient is sent."""

    def _closed(self) -> None:  # noqa: B027
        """Finish a step; called after the results of all units were stored or dropped."""

    def _retried(self, unit: Unit, error: NegotiationError | None) -> list[Unit]:
        """Send a unit again in another way, after it failed or ``receive`` returned False; return the units to wait for."""
        if error is not None:
            raise error
        return [unit]

    @abstractmethod
    def _send(self, unit: Unit) -> None:
        """Begin the exchange of a unit's gradients, and store it in ``unit.pending``."""


def form_of(one: HookedParameter) -> Any:
    """Return the properties of a parameter on which the layout of its gradient depends; ``model.to(...)`` may change them."""
    parameter = one.parameter
    return parameter.dtype, parameter.device, parameter.shape, parameter.stride()


def _level_of_the_program() -> int:
    """Return the ``stacklevel`` of the first frame outside this package and torch, so that a warning points at the program."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("guozhuang.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level
