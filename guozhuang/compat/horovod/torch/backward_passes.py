"""Counts the gradients of each parameter, and sends what all backward passes of a step have brought.

[Note: units] Parameters travel in *units*: one parameter, or a group of them. A unit is sent by the hook of the gradient that
completes it, while backward goes on; what is not complete when the step ends is sent then, with zeros for parameters that have
no gradient here, because other ranks may have one. So every rank sends every unit once a step, in whatever order.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from guozhuang.compat.horovod.common.exceptions import HorovodInternalError
from guozhuang.compat.horovod.common.process_sets import ProcessSet, member_of
from guozhuang.errors import explain
from guozhuang.gradients.named import Channel, NegotiationError
from guozhuang.gradients.passes import weakly


class Travelling:
    """A parameter whose gradients are exchanged.

    Attributes:
        parameter: it. name: by which ranks match it.
        left: how many backward passes are still to come in this step.
        came: it got a gradient in this step.
        unit: what it travels in.
        version: of ``.grad`` when it was sent; the program must not change it in place before the step has ended.
        sparse_dims: of its last gradient, if that was sparse; 0 otherwise.
        by_rows: all ranks know that its gradients are sparse and travel by their rows.
    """

    __slots__ = ("by_rows", "came", "left", "name", "parameter", "sparse_dims", "unit", "version")

    def __init__(self, parameter: Tensor, name: str, num_passes: int) -> None:
        self.parameter, self.name, self.left = parameter, name, num_passes
        self.came, self.version, self.sparse_dims, self.by_rows = False, -1, 0, False
        self.unit: Unit = Unit([self])


class Unit:
    """Parameters that are sent at once. See [Note: units].

    Attributes:
        members: the parameters.
        num_left: how many of them are not complete in this step.
        pending: what was sent, until it has come back.
    """

    __slots__ = ("members", "num_left", "pending")

    def __init__(self, members: Sequence[Travelling]) -> None:
        self.members, self.num_left = members, len(members)
        self.pending: Any = None
        for member in members:
            member.unit = self


class BackwardPasses(ABC):
    """The hooks of an optimizer's parameters, and what they send.

    Args:
        names: of the parameters.
        process_set: the ranks that exchange.
        num_passes: backward passes in a step; gradients accumulate here until the last.

    Attributes:
        travelling: the parameters that take part.
        units: what they travel in.
        num_passes: from the next step on.
    """

    def __init__(self, names: Mapping[Tensor, str], process_set: ProcessSet, num_passes: int) -> None:
        self.names, self.process_set, self.num_passes = names, process_set, num_passes
        self.travelling: list[Travelling] = []
        self.units: list[Unit] = []
        self.is_open = False  # something came or was sent since the last step
        self._num_left = 0  # units that were not completed by a gradient in this step
        self._asleep: list[Tensor] = []  # do not require a gradient so far
        self._hooks: list[Any] = []
        self._channel: Channel | None = None
        self._addresses: list[int] = []  # of ``travelling``, when the last step began
        self._forms: list[Any] = []
        self._lock = threading.RLock()  # a model on several devices has a backward thread per device
        self._warned = False

    # ---- which parameters ---------------------------------------------------------------------------------------------

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Let parameters take part from now on; those that require no gradient as soon as they do."""
        order = {id(p): place for place, p in enumerate(self.names)}
        added = []
        for parameter in sorted(parameters, key=lambda p: order[id(p)]):
            if not parameter.requires_grad:
                self._asleep.append(parameter)
            elif parameter.numel():
                one = Travelling(parameter, self.names[parameter], self.num_passes)
                hook = weakly(self._on_gradient, len(self.travelling))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
                self.travelling.append(one)
                self.units.append(one.unit)
                self._num_left += 1
                added.append(one)
        if added and self._channel is not None:
            self._addresses += [one.parameter.data_ptr() for one in added]
            self._forms += map(_form, added)
            self._lay_out(added, self._channel)

    def group(self, members: Sequence[Sequence[int]]) -> None:
        """Let parameters travel together: groups of indices in ``travelling``, each index once."""
        self.units = [Unit([self.travelling[i] for i in indices]) for indices in members]
        self._num_left = len(self.units)

    def _take_woken(self) -> None:
        awake = [p for p in self._asleep if p.requires_grad]
        if awake:
            self._asleep = [p for p in self._asleep if not p.requires_grad]
            self.take(awake)

    # ---- a step -------------------------------------------------------------------------------------------------------

    def _on_gradient(self, index: int) -> None:
        with self._lock:
            one = self.travelling[index]
            gradient = one.parameter.grad
            if one.left <= 0:
                raise AssertionError(
                    explain(
                        "Gradients were computed more than backward_passes_per_step times before call to step()",
                        value=f"{self.num_passes}, parameter {one.name!r}",
                        fix="Increase backward_passes_per_step to accumulate gradients locally, or call step() more often",
                    )
                )
            if gradient is not None and gradient.requires_grad:
                raise AssertionError(
                    explain(
                        f"the gradient of {one.name!r} has a graph of its own, which is not known on other ranks",
                        fix="use torch.autograd.grad(..., create_graph=True) in place of backward(create_graph=True)",
                    )
                )
            self.open()
            one.came = True
            one.left -= 1
            if one.left == 0:
                unit = one.unit
                unit.num_left -= 1
                if unit.num_left == 0:
                    self._launch(unit)
                    self._num_left -= 1
                    if self._num_left == 0:  # nothing more comes in this step, so nothing is gained by collecting more
                        self._hurry(unit)

    def open(self) -> None:
        """Begin a step, if none has begun."""
        if self.is_open:
            return
        channel = member_of(self.process_set).channel
        addresses = [one.parameter.data_ptr() for one in self.travelling]
        if channel is not self._channel or addresses != self._addresses:
            forms = [_form(one) for one in self.travelling]
            if channel is not self._channel or forms != self._forms:
                for one in self.travelling:
                    one.by_rows &= channel is self._channel  # ranks that have come know nothing of it
                self._channel = channel
                self._begin(channel)
                self._lay_out(self.travelling, channel)
            self._addresses, self._forms = addresses, forms
        self.is_open = True

    def finish(self) -> None:
        """Send what is left, wait for everything, and begin the next step.

        Raises:
            HorovodInternalError: something failed; all else has ended, and the next step may begin.
        """
        with self._lock:
            self._take_woken()
            if self.units:
                self.open()
            try:
                failed = self._finish()
            except Exception:  # an interrupt does not wait for what else is under way
                self.abandon()
                raise
            self._forget()
            if failed is not None:
                raise HorovodInternalError(str(failed)) from failed

    def _finish(self) -> RuntimeError | None:
        """Send what is left and wait for everything; return what failed first."""
        failed: RuntimeError | None = None
        for unit in reversed(self.units):
            if unit.pending is None:
                self._launch(unit)
        waiting = self.units[::-1]
        while waiting:
            again = []
            for unit in waiting:
                try:
                    is_here = self._receive(unit)
                except (NegotiationError, HorovodInternalError) as error:
                    failed, is_here = failed or error, True
                except Exception:
                    unit.pending = None
                    raise
                if is_here:
                    unit.pending = None
                else:
                    again.append(unit)
            waiting = again
        return failed

    def _launch(self, unit: Unit) -> None:
        try:
            self._send(unit)
        except NegotiationError as error:  # the engine stands still
            raise HorovodInternalError(str(error)) from error

    def abandon(self) -> None:
        """Begin the next step without the results of what is still under way; wait until that has left the memory alone."""
        with self._lock:
            for unit in self.units:
                if unit.pending is not None:
                    with contextlib.suppress(RuntimeError):  # nobody wants to know
                        self._drop(unit)
            self._forget()

    def _forget(self) -> None:
        self.is_open = False
        for one in self.travelling:
            one.left, one.came, one.version = self.num_passes, False, -1
        for unit in self.units:
            unit.num_left, unit.pending = len(unit.members), None
        self._num_left = len(self.units)

    def handles(self) -> dict[Any, tuple[Any, Any]]:
        """Return what is under way: by parameter, or by tuple of them, a handle, None where a gradient is not sent yet."""
        found: dict[Any, tuple[Any, Any]] = {}
        for unit in self.units:
            if unit.pending is not None:
                members = tuple(one.parameter for one in unit.members)
                found[members if len(members) > 1 else members[0]] = (unit.pending, None)
            else:
                found.update({one.parameter: (None, None) for one in unit.members if one.came})
        return found

    def warn_of_changes(self, one: Travelling) -> None:
        """Say once that the program changed a gradient that was on its way."""
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

    # ---- what differs ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, channel: Channel) -> None:
        """Forget the last layout: the channel is another one, as after the world was left and entered, or parameters are."""

    @abstractmethod
    def _lay_out(self, some: Sequence[Travelling], channel: Channel) -> None:
        """Lay out the gradients of some parameters."""

    @abstractmethod
    def _send(self, unit: Unit) -> None:
        """Send a unit: set ``unit.pending``."""

    @abstractmethod
    def _hurry(self, unit: Unit) -> None:
        """Say that everything has been sent, and this unit last."""

    @abstractmethod
    def _receive(self, unit: Unit) -> bool:
        """Wait for a unit and put its result where it belongs. False: it was sent again, and is to be received once more."""

    @abstractmethod
    def _drop(self, unit: Unit) -> None:
        """Wait for a unit whose result nobody wants."""


def _form(one: Travelling) -> Any:
    """What a layout depends on. It can change only with the memory of the parameter, as by ``model.to(...)``."""
    parameter = one.parameter
    return parameter.dtype, parameter.device, parameter.shape, parameter.stride()


def _level_of_the_program() -> int:
    """Return how far above the caller the program stands, which may have called ``step``, or something that calls it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("guozhuang.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level
