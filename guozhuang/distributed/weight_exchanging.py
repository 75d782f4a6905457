"""Weights in place of gradients: what the wrapper does around the optimizer's step, before evaluation and in a checkpoint."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError, WorldError, explain
from ..groups import agree as meet
from ..groups.subgroups import timeout_s
from .equal_start import broadcast_tensors

if TYPE_CHECKING:
    from ..exchange.weights import WeightExchange
    from .module import DistributedDataParallel

_log = logging.getLogger("guozhuang")
_EVERYBODY = "call model.eval(), model.state_dict() or model.agree() on every rank, not on one alone"


class WeightExchanging:
    """The part of ``DistributedDataParallel`` that knows a weight exchange; without one it does nothing."""

    around: AroundSteps | None = None

    def use_weight_exchange(self, exchange: WeightExchange[Any], optimizer: Optimizer) -> None:
        """Exchange weights around the optimizer's steps, and leave gradients local where the method says so.

        Every rank must call it, before any backward. The weights of all ranks are brought to one value before evaluation
        (``model.eval()``), before ``state_dict()`` and at the end of ``join()``, if there was a step since, or weights were
        loaded: these wait for all ranks then, and buffers of floating point become their mean over ranks. To save from rank 0
        alone, let every rank call ``model.eval()`` first. Weights are loaded on every rank; those of rank 0 are taken, and the
        exchange begins anew from them. So it does, from their mean, where ``p.data`` was replaced.

        Every rank makes every step. With ``torch.amp.GradScaler`` take a fused optimizer (``fused=True``), whose ``step()`` is
        called everywhere also where gradients overflowed, or bf16 without a scaler: a rank that leaves out a step alone makes
        the others wait for it. Inside ``join()`` there is one synchronized forward for each optimizer step: to accumulate,
        run all forwards but the last one in ``no_sync()``.

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
        self._loaded = self._stale = False
        self._group, self._module, self._optimizer = ddp.process_group, ddp.module, optimizer
        self._ddp = weakref.ref(ddp)
        self._averages_buffers, self._ignored = ddp.forward_sync_buffers, ddp.ignored
        self._look()
        self._num_held = _num_held(optimizer)
        self._held = [exchange.prepare(self._named, self._group)]
        ddp.forward_sync_buffers = False  # here, where nothing can fail any more
        # The module and the optimizer may outlive the wrapper, and be copied; then these do nothing.
        optimizer.register_step_pre_hook(_Hook(optimizer, self._before))
        optimizer.register_step_post_hook(_Hook(optimizer, self._after))
        ddp.module.register_state_dict_pre_hook(_Hook(ddp.module, self.agree))
        ddp.module.register_load_state_dict_post_hook(_Hook(ddp.module, self._was_loaded))
        weakref.finalize(self, _close, exchange, self._held)

    @property
    def _state(self) -> Any:
        return self._held[0]

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of the coming step stay local."""
        return not self.exchange.averages_gradients(self.step)

    def note_forward(self) -> None:
        """Training goes on: from here on the ranks may differ."""
        self.take_up()
        self.changed = True

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
            self._stale = self._stale or not self.keeps_gradients
            self._before()
            self._after()
        else:
            self.exchange.rest(self._state)

    def agree(self) -> None:
        """See ``WeightExchanging.agree``."""
        if not (self.changed or self._loaded):
            return
        with _ordinary_tensors():
            if self.take_up():
                return
            if self._in_step:  # an asynchronous method meets in its own way
                self._meet("trained")
                self._catch_up()
                self._refresh()
            self.exchange.agree(self._state)
            if self._averages_buffers:
                self._average_buffers()
            self.changed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and what the method keeps."""
        self.agree()
        return {"step": self.step, "exchange": self.exchange.state_dict(self._state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned on this rank; the weights were loaded before."""
        self._loaded = True
        self._start_anew()
        self.exchange.load_state_dict(self._state, saved["exchange"])
        self.step = int(saved["step"])

    # ---- what the hooks call -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before(self) -> None:
        self.take_up()
        if _num_held(self._optimizer) != self._num_held:
            what = "parameters were added to the optimizer after its weight exchange had begun"
            fix = "add them before use_weight_exchange or prepare is called; until then switch requires_grad off"
            raise UsageError(explain(what, rank=self._group.rank(), fix=fix))
        self.changed = True
        self.exchange.before_step(self._state, self.step)

    @torch.no_grad()
    def _after(self) -> None:
        averages = self.exchange.averages_gradients
        if averages(self.step) and not averages(self.step + 1):
            self._refresh()  # from here on weights are exchanged
        self.exchange.after_step(self._state, self.step)
        self.step += 1

    def _was_loaded(self) -> None:
        self._loaded = True

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
        loaded = self._loaded
        with _ordinary_tensors():
            self._look()
            self._meet("loaded" if loaded else "set by p.data")
            tensors = [p for _, p in self._named]
            if loaded:
                tensors += [b for _, b in self._buffers()] if self._averages_buffers else []
                broadcast_tensors(tensors, self._group, source=0)
            else:
                what = (
                    "parameters were given other memory (p.data): the exchange of weights begins anew from their mean"
                )
                _log.warning("%s", explain(what, rank=self._group.rank(), fix="set values in place: p.copy_(...)"))
                _take_mean(self._named, self._group)
                if self._averages_buffers:
                    self._average_buffers()
            self.exchange.close(self._state)
            self._held[0] = self.exchange.prepare(self._named, self._group)
        self._loaded = self._stale = self.changed = False

    # ---- agreement -----------------------------------------------------------------------------------------------------------

    @property
    def _in_step(self) -> bool:
        """Whether all ranks make the coming step together."""
        return self.exchange.in_step or not self.keeps_gradients

    def _meet(self, weights: str) -> None:
        if self._group.size() == 1:
            return
        try:
            lines = [type(self.exchange).__name__, f"weights were {weights}"]
            meet(self._group, "the method that makes weights equal", lines, timeout_s(self._group), _EVERYBODY)
        except WorldError as error:
            what = "Before evaluation or a checkpoint, and after weights were loaded, the ranks agree on one set of weights"
            raise WorldError(f"{error} {what}: {_EVERYBODY}.") from error

    def _most(self, *numbers: int) -> list[int]:
        """Return the greatest of all ranks' numbers. Every rank must call."""
        most = torch.tensor(numbers, device=self._named[0][1].device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return [int(each) for each in most.tolist()]

    def _catch_up(self) -> None:
        """Shadow the steps that others have made and this rank has not, because its gradients overflowed, for example."""
        [most] = self._most(self.step)
        while self.step < most:
            self.shadow()

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
        _take_mean([(name, b) for name, b in named if b.is_floating_point()], self._group)
        broadcast_tensors([b for _, b in named if not b.is_floating_point()], self._group, source=0)


class _Hook:
    """Calls a method when it is called with a certain object first, while both are there; a copy of it calls nothing."""

    def __init__(self, whose: object = None, method: Callable[[], object] | None = None) -> None:
        self._whose = None if whose is None else weakref.ref(whose)
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, caller: object, *_: object) -> None:
        if self._whose is not None and self._method is not None and caller is self._whose():
            method = self._method()
            if method is not None:
                method()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """What is made here can be written to later, also where the user evaluates in ``torch.inference_mode()``."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _take_mean(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Average over ranks what differs from rank 0; what is equal stays as it is, bit for bit, and so does infinity."""
    if group.size() == 1:
        return
    from ..exchange.weights import FlatWeights

    wide = torch.float64 if any(t.dtype == torch.float64 for _, t in named) else torch.float32
    mean = FlatWeights(named, dtype=wide)
    flats = mean.copy()
    for flat in flats:
        base = flat.clone()
        dist.broadcast(base, group=group, group_src=0)
        change = torch.where(flat == base, 0.0, flat - base)
        dist.all_reduce(change, group=group)
        torch.add(base, change, alpha=1 / group.size(), out=flat)
    mean.write(flats)


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
