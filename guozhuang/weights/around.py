"""Runs a weight exchange around an optimizer's steps, before evaluation and in checkpoints, without a wrapper module."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError, WorldError, explain
from ..exchange.nan_watch import NanWatch
from ..exchange.weights import WeightExchange
from ..groups import agree as meet
from ..groups.subgroups import timeout_s
from ..registry import OfOneModel
from .equal_start import broadcast_tensors, kept, ordinary_tensors, take_mean
from .flat import as_real
from .steps import StepsBehind

_log = logging.getLogger("guozhuang")
_EVERYBODY = "call model.eval(), model.state_dict() or model.agree() on every rank, not on one alone"
_EVERY_STEP = "look for the rank that left out optimizer.step(): every rank makes every step"
_NO_SYNC = "run all forwards of a step but the last one in no_sync()"


class HookOf(OfOneModel):
    """A hook that calls a method if it is called for a given object and both still exist; a copy of the hook does nothing."""

    def __init__(self, whose: object, method: Callable[[object], object]) -> None:
        self._whose, self._method = weakref.ref(whose), weakref.WeakMethod(method)

    def __call__(self, caller: object, *_: object) -> None:
        """Call the method with ``caller`` if that is the object that the hook was made for."""
        method = self._method()
        if method is not None and caller is self._whose():
            method(caller)


class AroundSteps:
    """Runs a weight exchange for one module and its optimizer. Every rank must construct it, with equal weights.

    It needs no hooks on parameters and no memory for gradients: gradients stay where autograd puts them.

    Args:
        module: the module, without a wrapper, whose weights are exchanged.
        optimizer: the optimizer around whose steps weights are exchanged; it must hold all trained parameters.
        exchange: the method; equal on all ranks.
        group: the ranks.
        ignored: names of parameters and buffers that are left alone.
        averages_buffers: whether floating-point buffers become their mean over ranks when weights are made equal.
        is_shadowed: tells whether ranks without data shadow the steps of this rank; None: never.

    Attributes:
        step: number of optimizer steps so far.
        changed: whether the weights of the ranks may differ.
        after_exchange: called when weights may have been exchanged; None: nothing is.

    Raises:
        UsageError: ``exchange`` is not a WeightExchange, or the optimizer does not hold all trained parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        exchange: WeightExchange[Any],
        group: dist.ProcessGroup,
        ignored: frozenset[str] = frozenset(),
        averages_buffers: bool = True,
        is_shadowed: Callable[[], bool] | None = None,
    ) -> None:
        check_weight_exchange(exchange)
        self.exchange = exchange
        self.step = 0
        self.changed = False
        self.after_exchange: Callable[[], object] | None = None
        self._loaded: set[nn.Module] = set()  # submodules whose weights were loaded since the exchange was prepared
        self._saved: Mapping[str, Any] | None = (
            None  # the exchange's state, loaded before a step; loaded again if weights follow
        )
        self._forward_of = -1  # the step of the last synchronized forward, in which ranks without data take part
        self._stale = False  # whether this rank, being without data, missed steps with averaged gradients
        self._group, self._module, self._optimizer = group, module, optimizer
        self._averages_buffers, self._ignored = averages_buffers, ignored
        self._is_shadowed = is_shadowed
        self._look()
        self._num_held = _num_held(optimizer)
        self._held = [exchange.prepare(self._named, self._group)]
        self._steps, self._nan = StepsBehind(self._group), NanWatch(self._group)
        # These hooks do nothing if the module or the optimizer outlives this object, or is copied.
        optimizer.register_step_pre_hook(HookOf(optimizer, self._on_before))
        optimizer.register_step_post_hook(HookOf(optimizer, self._on_after))
        module.register_state_dict_pre_hook(HookOf(module, self._on_state_dict))
        for part in module.modules():
            part.register_load_state_dict_post_hook(HookOf(part, self._on_loaded))
        weakref.finalize(self, _close, exchange, self._held)

    @property
    def _state(self) -> Any:
        return self._held[0]

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients of the coming step stay on this rank, because the exchange does not average them."""
        return not self.exchange.averages_gradients(self.step)

    def note_forward(self, synchronizes: bool = True) -> None:
        """Record that a training forward runs, so that from here on the weights of the ranks may differ.

        Args:
            synchronizes: whether ranks without data take part in the step of this forward.

        Raises:
            UsageError: inside ``join()`` there are two forwards for one step, which ranks without data count as two steps.
        """
        self.take_up()
        self.changed = True
        if synchronizes and self._may_be_shadowed:
            if self._forward_of == self.step:
                what = "in join() a second forward came before optimizer.step(): ranks without data make a step each"
                fix = f"to accumulate, {_NO_SYNC}; with GradScaler take a fused optimizer, which steps everywhere"
                raise UsageError(explain(what, value=f"step {self.step}", rank=self._group.rank(), fix=fix))
            self._forward_of = self.step

    def awaits_none(self) -> None:
        """Forget a forward whose step did not come, because an exception has ended the context in which it ran."""
        self._forward_of = -1

    def take_up(self) -> bool:
        """Restart the exchange if weights were loaded or moved; return whether it was. All ranks must call it at one point."""
        if not self._loaded and not self._moved():
            return False
        self._start_anew()
        return True

    def shadow(self) -> None:
        """Take part in one step of the ranks that still have data, with this rank's present weights."""
        self.changed = True
        if self._in_step:
            self._stale = self._stale or self.exchange.averages_over_all(self.step)
            self.exchange.miss_step(self._state, self.step)
            self._before()
            self._after()
        else:
            self._saved = None
            self.exchange.rest(self._state)

    def agree(self) -> None:
        """Make the weights of all ranks equal, if a step was made or weights were loaded since. Every rank must call it.

        Raises:
            WorldError: a rank did not call within the group's time-out, or made fewer steps; the text names it.
        """
        if not (self.changed or self._loaded):
            return
        with ordinary_tensors():
            self._forward_of = -1
            if self.take_up():
                return
            self._saved = None
            if self._in_step:  # not for asynchronous methods, whose ``agree`` waits for all ranks itself
                self._meet("trained")
                self._refresh()
            self.exchange.agree(self._state)
            if self._averages_buffers:
                self._average_buffers()
            if self.after_exchange is not None:
                self.after_exchange()
            self.changed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of optimizer steps, and the state of the exchange. Every rank must call it."""
        self.agree()
        return {"step": self.step, "exchange": self.exchange.state_dict(self._state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank; weights may be loaded before, or until the next step."""
        step, of_exchange = int(saved["step"]), saved["exchange"]
        self.restart(self.step)
        self.exchange.load_state_dict(self._state, of_exchange)
        self._saved, self.step = of_exchange, step

    def restart(self, step: int) -> None:
        """Begin the exchange anew at a step, from rank 0's weights, which were written in place. Every rank must call it."""
        self._loaded.add(self._module)
        self._saved = None
        self._start_anew()
        self.step = step

    # ---- methods that the hooks call ---------------------------------------------------------------------------------------

    def _on_before(self, _: object) -> None:
        self.take_up()
        if _num_held(self._optimizer) != self._num_held:
            what = "parameters were added to the optimizer after its weight exchange had begun"
            fix = "add them before use_weight_exchange or prepare is called; until then switch requires_grad off"
            raise UsageError(explain(what, rank=self._group.rank(), fix=fix))
        self.changed = True
        self._nan.look_at([name for name, _ in self._named], self._parameters, self.step)
        self._before()

    def _on_after(self, _: object) -> None:
        if self._may_be_shadowed and self._forward_of != self.step:
            what = "in join() optimizer.step() came without a synchronized forward: ranks without data miss it"
            raise UsageError(explain(what, value=f"step {self.step}", rank=self._group.rank(), fix=_NO_SYNC))
        self._after()
        if self.after_exchange is not None:
            self.after_exchange()

    def _on_state_dict(self, _: object) -> None:
        self.agree()

    def _on_loaded(self, part: object) -> None:
        self._loaded.add(cast(nn.Module, part))

    # ---- methods that make one step of the exchange --------------------------------------------------------------------------

    @torch.no_grad()
    def _before(self) -> None:
        self._saved = None
        with self._steps.inside(self.step):
            self.exchange.before_step(self._state, self.step)

    @torch.no_grad()
    def _after(self) -> None:
        averages = self.exchange.averages_over_all
        with self._steps.inside(self.step):
            if averages(self.step) and not averages(self.step + 1):  # the last step that averages gradients
                if self._group.size() > 1:
                    point = "end the steps in which gradients are averaged"
                    self._steps.gather(point, timeout_s(self._group), None, _EVERY_STEP)
                self._refresh()
            self.exchange.after_step(self._state, self.step)
        self.step += 1

    # ---- methods that find loaded or moved weights, and restart the exchange -------------------------------------------------

    def _look(self) -> None:
        """Record the parameters that are exchanged, and the addresses of their memory."""
        found = exchanged_parameters(self._module, self._optimizer, self._ignored)
        self._parameters = [p for _, p in found]
        self._named = as_real(found)
        self._places = [p.data_ptr() for p in self._parameters]

    def _moved(self) -> bool:
        """Tell whether a parameter got other memory (``p.data = ...``), as by ``vector_to_parameters`` or ``module.half()``."""
        return self._places != [p.data_ptr() for p in self._parameters]

    def _start_anew(self) -> None:
        """Make replaced weights equal on all ranks, and prepare the exchange again, whose state is of the old weights."""
        with ordinary_tensors():
            self._look()
            given, buffers = self._given()
            if not self._in_step:
                with kept(given):
                    self.exchange.rest(self._state)
            and_state = "" if self._saved is None else ", and before them the exchange's own state"
            self._meet(f"loaded: {self._loaded_parts()}{and_state}" if self._loaded else "set by p.data")
            if self._loaded:
                broadcast_tensors([*given, *buffers], self._group, source=0)
            else:
                what = "parameters were given other memory (p.data): the exchange begins anew from their mean"
                _log.warning("%s", explain(what, rank=self._group.rank(), fix="set values in place: p.copy_(...)"))
            if self._module not in self._loaded:  # if all was loaded, all ranks have rank 0's values already
                take_mean(self._named, self._group)
                if self._averages_buffers:
                    self._average_buffers()
            self.exchange.end(self._state)
            self._held[0] = self.exchange.prepare(self._named, self._group)
            if self._saved is not None:
                self.exchange.load_state_dict(self._state, self._saved)
        self._loaded.clear()
        self._stale = self.changed = False
        self._forward_of = -1
        self._steps.restart()

    def _given(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights and the buffers that were loaded; all of both, if parameters were only given other memory."""
        all_were = self._module in self._loaded or not self._loaded
        # Compare tensors by identity: a tied weight has one name, but is loaded with any module that holds it.
        loaded = {id(t) for part in self._loaded for t in (*part.parameters(), *part.buffers())}
        both = zip(self._parameters, self._named, strict=True)
        weights = [t for p, (_, t) in both if all_were or id(p) in loaded]
        buffers = self._buffers() if self._averages_buffers else []
        return weights, [b for _, b in buffers if all_were or id(b) in loaded]

    def _loaded_parts(self) -> str:
        """Return the names of the loaded submodules, without those inside other loaded submodules."""
        if self._module in self._loaded:
            return "all"
        names = [name for name, part in self._module.named_modules() if part in self._loaded]
        inside = {name for name in names if any(name.startswith(f"{other}.") for other in names)}
        return ", ".join(name for name in names if name not in inside) or "what is no part of the module any more"

    # ---- methods by which all ranks get equal weights ------------------------------------------------------------------------

    @property
    def _may_be_shadowed(self) -> bool:
        return self._in_step and self._is_shadowed is not None and bool(self._is_shadowed())

    @property
    def _in_step(self) -> bool:
        """Whether all ranks make the coming step together, because they exchange weights or average gradients in it."""
        return self.exchange.in_step or not self.keeps_gradients

    def _meet(self, weights: str) -> None:
        """Wait for all ranks, and compare their numbers of steps and whether their weights were trained, loaded or moved."""
        if self._group.size() == 1:
            return
        made = self.step if self._in_step and self._saved is None else None
        try:
            self._steps.gather("agree on one set of weights", timeout_s(self._group), made, _EVERYBODY)
            lines = [type(self.exchange).__name__, f"weights were {weights}"]
            meet(self._group, "the method that makes weights equal", lines, timeout_s(self._group), _EVERYBODY)
        except WorldError as error:
            what = "Before evaluation or a checkpoint, and after weights were loaded, the ranks agree on one set of weights"
            raise WorldError(f"{error} {what}: {_EVERYBODY}.") from error

    def _most(self, *numbers: int) -> list[int]:
        """Return the element-wise maximum of the numbers over all ranks. Every rank must call it."""
        most = torch.tensor(numbers, device=self._named[0][1].device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return [int(each) for each in most.tolist()]

    def _refresh(self) -> None:
        """Copy the weights of a rank that made all steps to ranks that missed steps with averaged gradients."""
        if self._group.size() == 1:
            return
        source, any_stale = self._most(-1 if self._stale else self._group.rank(), int(self._stale))
        if any_stale and source >= 0:
            broadcast_tensors([p for _, p in self._named], self._group, source)
        self._stale = False

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, b) for name, b in self._module.named_buffers() if name not in self._ignored]

    def _average_buffers(self) -> None:
        named = self._buffers()
        take_mean([(name, b) for name, b in named if b.is_floating_point()], self._group)
        broadcast_tensors([b for _, b in named if not b.is_floating_point()], self._group, source=0)


def check_weight_exchange(exchange: object) -> None:
    """Raise unless ``exchange`` is a WeightExchange.

    Raises:
        UsageError: ``exchange`` is another object.
    """
    if not isinstance(exchange, WeightExchange):
        fix = "give an object such as guozhuang.exchange.local_sgd.LocalSGD(16); use_exchange takes those of gradients"
        raise UsageError(explain("use_weight_exchange takes a WeightExchange", value=exchange, fix=fix))


def exchanged_parameters(
    module: nn.Module, optimizer: Optimizer, ignored: frozenset[str]
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the module that an optimizer steps; exactly these are exchanged.

    Raises:
        UsageError: the optimizer holds none of the module's parameters, or not all trained ones.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    named = [(name, p) for name, p in found if id(p) in held]
    if not named:
        fix = "make the optimizer from the parameters of the very module that is wrapped"
        raise UsageError(explain("the optimizer holds no parameter of the wrapped module", fix=fix))
    left_out = [name for name, p in found if p.requires_grad and id(p) not in held]
    if left_out:
        what = "the optimizer does not hold all trained parameters; these would drift apart between ranks"
        fix = "give one optimizer over all of them, or switch requires_grad off"
        raise UsageError(explain(what, value=", ".join(left_out), fix=fix))
    return named


def _num_held(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _close(exchange: WeightExchange[Any], held: list[Any]) -> None:
    exchange.close(held[0])
