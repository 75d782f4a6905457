"""Weights in place of gradients: what the wrapper does around the optimizer's step, before evaluation and in a checkpoint."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError, WorldError, explain
from ..groups import agree as meet
from ..groups.subgroups import timeout_s
from .equal_start import broadcast_tensors, kept, ordinary_tensors, take_mean
from .hook_of import HookOf
from .steps_behind import MAKE_EVERY_STEP, StepsBehind

if TYPE_CHECKING:
    from ..distributed.module import DistributedDataParallel
    from ..exchange.weights import WeightExchange

_log = logging.getLogger("guozhuang")
_EVERYBODY = "call model.eval(), model.state_dict() or model.agree() on every rank, not on one alone"
_EVERY_STEP = "look for the rank that left out optimizer.step(): every rank makes every step"
_NO_SYNC = "run all forwards of a step but the last one in no_sync()"


class WeightExchanging:
    """The part of ``DistributedDataParallel`` that knows a weight exchange; without one it does nothing."""

    around: AroundSteps | None = None

    def use_weight_exchange(self, exchange: WeightExchange[Any], optimizer: Optimizer) -> None:
        """Exchange weights around the optimizer's steps, and leave gradients local where the method says so.

        Every rank must call it, before any backward. The weights of all ranks are brought to one value before evaluation
        (``model.eval()``), before ``state_dict()`` and at the end of ``join()``, if there was a step since, or weights were
        loaded: these wait for all ranks then, and buffers of floating point become their mean over ranks. To save from rank 0
        alone, let every rank call ``model.eval()`` first. ``state_dict()`` of a part of the module does not make ranks agree.

        Weights are loaded with ``load_state_dict()`` on every rank, of all or of any part of the module; those of rank 0 are
        taken, of what was not loaded the mean, and the exchange begins anew from them. So it does, from their mean, where
        ``p.data`` was replaced. Values that are written in place (``p.copy_()``) are not noticed, and count as training: hand
        them to ``load_state_dict()``. The exchange's own state may be loaded before or after the weights.

        Every rank makes every step. With ``torch.amp.GradScaler`` take a fused optimizer (``fused=True``), whose ``step()`` is
        called everywhere also where gradients overflowed, or bf16 without a scaler. What a rank left out alone it makes up
        when the ranks agree, or go on from loaded weights, with a warning that names it, and until then the others may wait
        for it: meet by ``agree()`` before collectives of your own. Where gradients are averaged, as always inside the nodes of
        ``WeightHierarchical``, there is no making up while training goes on: its next backward and their step wait for each
        other, until the time-out. Inside ``join()`` there is one synchronized forward for each optimizer step: to accumulate,
        run all forwards but the last one in ``no_sync()``; anything else raises UsageError.

        Args:
            exchange: equal on all ranks.
            optimizer: the one that steps the module's parameters; it must hold all that are trained, since what it holds is
                what is exchanged.

        Raises:
            UsageError: it is no weight exchange, the optimizer does not hold all trained parameters, or some are delayed
                (``delay_all_reduce_named_params``).
            RuntimeError: another was chosen before, or gradients have been exchanged already.
        """
        from ..exchange.weights import WeightExchange

        if not isinstance(exchange, WeightExchange):
            fix = "give an object such as guozhuang.exchange.local_sgd.LocalSGD(16); use_exchange takes those of gradients"
            raise UsageError(explain("use_weight_exchange takes a WeightExchange", value=exchange, fix=fix))
        ddp = cast("DistributedDataParallel", self)
        if self.around is not None:
            raise RuntimeError(
                explain("a weight exchange can be chosen only once", value=exchange, fix="wrap the module anew")
            )
        _exchanged(ddp, optimizer)
        if (gradients := exchange.gradients()) is not None:
            ddp.use_exchange(gradients)
        elif ddp.reducer is not None and ddp.reducer.step > 0:
            what = "a weight exchange must be chosen before the first backward"
            raise RuntimeError(explain(what, value=exchange, fix="wrap the module anew"))
        self.around = AroundSteps(ddp, exchange, optimizer)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay on this rank in the coming backward, because weights are exchanged instead."""
        return self.around is not None and self.around.keeps_gradients

    def agree(self) -> None:
        """Bring the weights of all ranks to one value now. Every rank must call it. Without a weight exchange: nothing to do.

        Raises:
            WorldError: a rank did not come within the group's time-out; the text names it.
        """
        if self.around is not None:
            self.around.agree()

    def train(self, mode: bool = True) -> Any:
        """Switch between training and evaluation. With a weight exchange the ranks agree before evaluation: all must call."""
        if not mode:
            self.agree()
        return super().train(mode)  # type: ignore[misc]


class AroundSteps:
    """A weight exchange at work on one module and its optimizer.

    Args:
        ddp: the wrapper.
        exchange: what is done.
        optimizer: around whose steps.
    """

    def __init__(self, ddp: DistributedDataParallel, exchange: WeightExchange[Any], optimizer: Optimizer) -> None:
        self.exchange = exchange
        self.step = 0
        self.changed = False  # whether ranks may differ
        self._loaded: set[nn.Module] = set()  # parts of the module, since the exchange began
        self._saved: Mapping[str, Any] | None = None  # taken over before a step; holds also if weights come later
        self._forward_of = -1  # the step of the last forward that ranks without data knew of
        self._stale = False
        self._group, self._module, self._optimizer = ddp.process_group, ddp.module, optimizer
        self._ddp = weakref.ref(ddp)
        self._averages_buffers, self._ignored = ddp.forward_sync_buffers, ddp.ignored
        self._look()
        self._num_held = _num_held(optimizer)
        self._held = [exchange.prepare(self._named, self._group)]
        self._behind = StepsBehind(self._group)
        ddp.forward_sync_buffers = False  # here, where nothing can fail any more
        if exchange.gradients() is not None and ddp.reducer is not None:  # by the optimizer's steps, too
            this = weakref.proxy(self)  # a parameter's hooks may keep the reducer longer than the wrapper
            ddp.reducer.exchange_step = lambda: this.step
        # The module and the optimizer may outlive the wrapper, and be copied; then these do nothing.
        optimizer.register_step_pre_hook(HookOf(optimizer, self._on_before))
        optimizer.register_step_post_hook(HookOf(optimizer, self._on_after))
        ddp.module.register_state_dict_pre_hook(HookOf(ddp.module, self._on_state_dict))
        for part in ddp.module.modules():
            part.register_load_state_dict_post_hook(HookOf(part, self._on_loaded))
        weakref.finalize(self, _close, exchange, self._held)

    @property
    def _state(self) -> Any:
        return self._held[0]

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of the coming step stay local."""
        return not self.exchange.averages_gradients(self.step)

    def note_forward(self) -> None:
        """Training goes on: from here on the ranks may differ.

        Raises:
            UsageError: in ``join()``, two forwards for one step, which ranks without data take for two steps.
        """
        self.take_up()
        self.changed = True
        ddp = self._ddp()
        if ddp is not None and ddp.require_backward_grad_sync and self._may_be_shadowed:
            if self._forward_of == self.step:
                what = "in join() a second forward came before optimizer.step(): ranks without data make a step each"
                fix = f"to accumulate, {_NO_SYNC}; with GradScaler take a fused optimizer, which steps everywhere"
                raise UsageError(explain(what, value=f"step {self.step}", rank=self._group.rank(), fix=fix))
            self._forward_of = self.step

    def take_up(self) -> bool:
        """Begin anew if the weights were loaded, or lie elsewhere; return whether. Every rank must call it, at one point."""
        if not self._loaded and not self._moved():
            return False
        self._start_anew()
        return True

    def shadow(self) -> None:
        """Take part in one step of the ranks that still have data, with the weights that are there."""
        self.changed = True
        if self._in_step:
            self._make_up(self.step + 1)
        else:
            self._saved = None
            self.exchange.rest(self._state)

    def agree(self) -> None:
        """See ``WeightExchanging.agree``."""
        if not (self.changed or self._loaded):
            return
        with ordinary_tensors():
            self._forward_of = -1
            if self.take_up():
                return
            self._saved = None
            if self._in_step:  # an asynchronous method meets in its own way
                self._meet("trained")
                self._even_out()
            self.exchange.agree(self._state)
            if self._averages_buffers:
                self._average_buffers()
            self.changed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and what the method keeps."""
        self.agree()
        return {"step": self.step, "exchange": self.exchange.state_dict(self._state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned on this rank; weights are loaded before, or later up to the next step."""
        self._loaded.add(self._module)
        self._saved = None
        self._start_anew()
        self.exchange.load_state_dict(self._state, saved["exchange"])
        self.step, self._saved = int(saved["step"]), saved["exchange"]

    # ---- what the hooks call -----------------------------------------------------------------------------------------------

    def _on_before(self, _: object) -> None:
        self.take_up()
        if _num_held(self._optimizer) != self._num_held:
            what = "parameters were added to the optimizer after its weight exchange had begun"
            fix = "add them before use_weight_exchange or prepare is called; until then switch requires_grad off"
            raise UsageError(explain(what, rank=self._group.rank(), fix=fix))
        self.changed = True
        self._before()

    def _on_after(self, _: object) -> None:
        if self._may_be_shadowed and self._forward_of != self.step:
            what = "in join() optimizer.step() came without a synchronized forward: ranks without data miss it"
            raise UsageError(explain(what, value=f"step {self.step}", rank=self._group.rank(), fix=_NO_SYNC))
        self._after()

    def _on_state_dict(self, _: object) -> None:
        self.agree()

    def _on_loaded(self, part: object) -> None:
        self._loaded.add(cast(nn.Module, part))

    # ---- one step ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before(self) -> None:
        self._saved = None
        self._behind.enter(self.step)
        try:
            self.exchange.before_step(self._state, self.step)
        finally:
            self._behind.leave()

    @torch.no_grad()
    def _after(self) -> None:
        averages = self.exchange.averages_over_all
        self._behind.enter(self.step)
        try:
            if averages(self.step) and not averages(self.step + 1):  # from here on weights are exchanged
                self._gather("end the steps in which gradients are averaged", _EVERY_STEP, inside=True)
                self._refresh()
            self.exchange.after_step(self._state, self.step)
        finally:
            self._behind.leave()
        self.step += 1

    def _make_up(self, num_steps: int) -> None:
        """Take part in the steps of others, with the weights that are there, until so many were made."""
        while self.step < num_steps:
            self._stale = self._stale or self.exchange.averages_over_all(self.step)
            self.exchange.miss_step(self._state, self.step)
            self._before()
            self._after()

    # ---- other weights -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Note which parameters there are, and where they lie."""
        ddp = self._ddp()
        assert ddp is not None
        found = _exchanged(ddp, self._optimizer)
        self._parameters = [p for _, p in found]
        self._named = [(name, torch.view_as_real(p.detach()) if p.is_complex() else p.detach()) for name, p in found]
        self._places = [p.data_ptr() for p in self._parameters]

    def _moved(self) -> bool:
        """Whether ``p.data`` was set since, by ``vector_to_parameters`` or ``module.half()``, for example."""
        return self._places != [p.data_ptr() for p in self._parameters]

    def _start_anew(self) -> None:
        """Other weights are there: make them equal; what the method derived from the old ones no longer holds."""
        with ordinary_tensors():
            self._look()
            given, buffers = self._given()
            if not self._in_step:
                with kept(given):
                    self.exchange.rest(self._state)
            and_state = "" if self._saved is None else ", and before them the exchange's own state"
            self._meet(f"loaded: {self._loaded_parts()}{and_state}" if self._loaded else "set by p.data", given)
            if self._in_step and self._saved is None:  # a rank behind has not begun what is under way in others
                self._even_out(given)
            if self._loaded:
                broadcast_tensors([*given, *buffers], self._group, source=0)
            else:
                what = "parameters were given other memory (p.data): the exchange begins anew from their mean"
                _log.warning("%s", explain(what, rank=self._group.rank(), fix="set values in place: p.copy_(...)"))
            if self._module not in self._loaded:  # else all is as rank 0 gave it
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
        self._behind.begin_anew()

    def _given(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights and the buffers that were loaded; all, where weights were given other memory."""
        all_were = self._module in self._loaded or not self._loaded
        # By identity: a tied weight has one name, and is loaded by any module that holds it.
        loaded = {id(t) for part in self._loaded for t in (*part.parameters(), *part.buffers())}
        both = zip(self._parameters, self._named, strict=True)
        weights = [t for p, (_, t) in both if all_were or id(p) in loaded]
        buffers = self._buffers() if self._averages_buffers else []
        return weights, [b for _, b in buffers if all_were or id(b) in loaded]

    def _loaded_parts(self) -> str:
        """Return the names of the parts that were loaded, without those inside others."""
        if self._module in self._loaded:
            return "all"
        names = [name for name, part in self._module.named_modules() if part in self._loaded]
        inside = {name for name in names if any(name.startswith(f"{other}.") for other in names)}
        return ", ".join(name for name in names if name not in inside) or "what is no part of the module any more"

    # ---- agreement -----------------------------------------------------------------------------------------------------------

    @property
    def _may_be_shadowed(self) -> bool:
        """Whether ranks without data shadow the steps of this one, in ``join()``."""
        ddp = self._ddp()
        if ddp is None or not ddp.in_join_context or not self._in_step:
            return False
        return bool(ddp._join_config.enable and not ddp._join_config.throw_on_early_termination)

    @property
    def _in_step(self) -> bool:
        """Whether all ranks make the coming step together."""
        return self.exchange.in_step or not self.keeps_gradients

    def _meet(self, weights: str, given: Sequence[Tensor] = ()) -> None:
        if self._group.size() == 1:
            return
        try:
            self._gather("agree on one set of weights", _EVERYBODY, given=given)
            lines = [type(self.exchange).__name__, f"weights were {weights}"]
            meet(self._group, "the method that makes weights equal", lines, timeout_s(self._group), _EVERYBODY)
        except WorldError as error:
            what = "Before evaluation or a checkpoint, and after weights were loaded, the ranks agree on one set of weights"
            raise WorldError(f"{error} {what}: {_EVERYBODY}.") from error

    def _gather(self, point: str, fix: str, inside: bool = False, given: Sequence[Tensor] = ()) -> None:
        """Wait for all ranks; meanwhile make up what is missing here, unless this is inside a step; ``given`` weights stay."""

        def make_up(num_steps: int) -> None:
            with kept(given):
                self._make_up(num_steps)

        if self._group.size() > 1:
            may = self._in_step and not inside
            self._behind.gather(point, timeout_s(self._group), lambda: self.step, make_up if may else None, fix)

    def _even_out(self, given: Sequence[Tensor] = ()) -> None:
        """Make up, where no rank is inside a step, what others made and this one did not; ``given`` weights stay."""
        if self._group.size() == 1:
            return
        [most] = self._most(self.step)
        if most > self.step:
            what = f"this rank left out {most - self.step} of {most} optimizer steps, and takes part in them now"
            _log.warning("%s", explain(what, rank=self._group.rank(), fix=MAKE_EVERY_STEP))
        with kept(given):
            self._make_up(most)
            self._refresh()

    def _most(self, *numbers: int) -> list[int]:
        """Return the greatest of all ranks' numbers. Every rank must call."""
        most = torch.tensor(numbers, device=self._named[0][1].device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return [int(each) for each in most.tolist()]

    def _refresh(self) -> None:
        """Give ranks that shadowed steps with averaged gradients, and so did not make them, the weights of one that did."""
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


def _exchanged(ddp: DistributedDataParallel, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [(name, p) for name, p in ddp.module.named_parameters() if name not in ddp.ignored]
    named = [(name, p) for name, p in found if id(p) in held]
    if ddp._delayed_names:
        what = "gradients that delay_all_reduce_named_params holds back do not go together with an exchange of weights"
        raise UsageError(explain(what, fix="use one of the two"))
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
