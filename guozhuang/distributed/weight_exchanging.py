"""Weights in place of gradients: what the wrapper does around the optimizer's step, before evaluation and in a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError, WorldError, explain
from ..groups import agree as meet
from ..groups.twin import timeout_s

if TYPE_CHECKING:
    from ..exchange.weights import WeightExchange
    from .module import DistributedDataParallel

_EVERYBODY = "call model.eval(), model.state_dict() or model.agree() on every rank, not on one alone"


class WeightExchanging:
    """The part of ``DistributedDataParallel`` that knows a weight exchange; without one it does nothing."""

    around: AroundSteps | None = None

    def use_weight_exchange(self, exchange: WeightExchange[Any], optimizer: Optimizer) -> None:
        """Exchange weights around the optimizer's steps, and leave gradients local where the method says so.

        Every rank must call it, before any backward. The weights of all ranks are brought to one value before evaluation
        (``model.eval()``), before ``state_dict()`` and at the end of ``join()``, if there was a step since: these wait for all
        ranks then, and buffers of floating point become their mean over ranks. To save from rank 0 alone, let every rank call
        ``model.eval()`` first.

        Args:
            exchange: equal on all ranks.
            optimizer: the one that steps the module's parameters; what it holds is what is exchanged.

        Raises:
            UsageError: it is no weight exchange, or the optimizer holds nothing of the module.
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
        self._group, self._module, self._optimizer = ddp.process_group, ddp.module, optimizer
        self._averages_buffers, ddp.forward_sync_buffers = ddp.forward_sync_buffers, False
        self._ignored = ddp.ignored
        self._named = _exchanged(ddp.module, optimizer, self._ignored)
        self._num_held = _num_held(optimizer)
        self._changed = self._loaded = False
        self._held = [exchange.prepare(self._named, self._group)]
        weak = weakref.WeakMethod
        before, after, agree, loaded = weak(self._before), weak(self._after), weak(self.agree), weak(self._was_loaded)
        # The module and the optimizer may outlive the wrapper; then these do nothing.
        optimizer.register_step_pre_hook(lambda *_: _call(before))
        optimizer.register_step_post_hook(lambda *_: _call(after))
        ddp.module.register_state_dict_pre_hook(lambda *_: _call(agree))
        ddp.module.register_load_state_dict_post_hook(lambda *_: _call(loaded))
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
        if self._loaded:
            self._start_anew()
        self._changed = True

    def shadow(self) -> None:
        """Take part in one step of the ranks that still have data, with the weights that are there."""
        self._changed = True
        if self.exchange.in_step:
            self._before()
            self._after()
        else:
            self.exchange.rest(self._state)

    @torch.no_grad()
    def agree(self) -> None:
        """See ``WeightExchanging.agree``."""
        if not self._changed:
            return
        if self._group.size() > 1 and self.exchange.in_step:  # an asynchronous method meets in its own way
            try:
                lines = [type(self.exchange).__name__]
                meet(self._group, "the method that makes weights equal", lines, timeout_s(self._group), _EVERYBODY)
            except WorldError as error:
                raise WorldError(
                    f"{error} Before evaluation or a checkpoint the ranks agree on one set of weights: {_EVERYBODY}."
                ) from error
            self._catch_up()
        self.exchange.agree(self._state)
        self._average_buffers()
        self._changed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and what the method keeps."""
        self.agree()
        return {"step": self.step, "exchange": self.exchange.state_dict(self._state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned on this rank; the weights were loaded before."""
        self._start_anew()
        self.exchange.load_state_dict(self._state, saved["exchange"])
        self.step = int(saved["step"])

    # ---- what the hooks call -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before(self) -> None:
        if self._loaded:
            self._start_anew()
        if _num_held(self._optimizer) != self._num_held:
            what = "parameters were added to the optimizer after its weight exchange had begun"
            fix = "add them before use_weight_exchange or prepare is called; until then switch requires_grad off"
            raise UsageError(explain(what, rank=self._group.rank(), fix=fix))
        self._changed = True
        self.exchange.before_step(self._state, self.step)

    @torch.no_grad()
    def _after(self) -> None:
        self.exchange.after_step(self._state, self.step)
        self.step += 1

    def _was_loaded(self) -> None:
        self._loaded = True

    def _start_anew(self) -> None:
        """Other weights were loaded: what the method derived from the old ones no longer holds."""
        self._loaded = self._changed = False
        self.exchange.close(self._state)
        self._held[0] = self.exchange.prepare(self._named, self._group)

    # ---- agreement -----------------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Shadow the steps that others have made and this rank has not, because its gradients overflowed, for example."""
        device = self._named[0][1].device
        most = torch.tensor([self.step], device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        while self.step < int(most.item()):
            self.shadow()

    def _average_buffers(self) -> None:
        if not self._averages_buffers or self._group.size() == 1:
            return
        from ..exchange.weights import FlatWeights
        from .equal_start import broadcast_tensors

        named = [(name, b) for name, b in self._module.named_buffers() if name not in self._ignored]
        floats = [(name, b) for name, b in named if b.is_floating_point()]
        mean = FlatWeights(
            floats, dtype=torch.float64 if any(b.dtype == torch.float64 for _, b in floats) else torch.float32
        )
        flats = mean.copy()
        for flat in flats:
            dist.all_reduce(flat, group=self._group)
            flat /= self._group.size()
        mean.write(flats)
        broadcast_tensors([b for _, b in named if not b.is_floating_point()], self._group, source=0)


def _exchanged(module: nn.Module, optimizer: Optimizer, ignored: frozenset[str]) -> list[tuple[str, Tensor]]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if id(p) in held and name not in ignored]
    if not named:
        fix = "make the optimizer from the parameters of the very module that is wrapped"
        raise UsageError(explain("the optimizer holds no parameter of the wrapped module", fix=fix))
    return [(name, torch.view_as_real(p.detach()) if p.is_complex() else p.detach()) for name, p in named]


def _num_held(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _call(method: weakref.WeakMethod[Any]) -> None:
    found = method()
    if found is not None:
        found()


def _close(exchange: WeightExchange[Any], held: list[Any]) -> None:
    exchange.close(held[0])
