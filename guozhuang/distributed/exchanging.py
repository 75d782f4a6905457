"""Methods of the wrapper that choose its gradient or weight exchange, and save and load the exchange's state."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch.optim import Optimizer

from ..errors import UsageError, explain
from ..exchange import AllReduce, CommHook, GradientExchange
from ..exchange.cast import Cast
from ..exchange.comm_hook import Hook, check_hook
from ..gradients.passes import weakly
from ..weights.around import AroundSteps, check_weight_exchange, exchanged_parameters
from .precision import Precision
from .torch_reducer import TorchReducer

if TYPE_CHECKING:
    from ..exchange.weights import WeightExchange
    from .module import DistributedDataParallel

_WRAP_ANEW = "wrap the module anew"


class Exchanging:
    """The part of ``DistributedDataParallel`` that chooses its exchange, and saves and loads its state."""

    _reducer: TorchReducer | None
    _chosen: GradientExchange[Any] | None = None
    _precision: Precision | None = None
    around: AroundSteps | None = None

    if TYPE_CHECKING:

        @property
        def reducer(self) -> TorchReducer | None:
            """Declared for type checkers; ``DistributedDataParallel`` defines it."""

    @property
    def exchange(self) -> GradientExchange[Any]:
        """The exchange by which gradients are averaged: an all-reduce unless another exchange was chosen."""
        if self._chosen is not None:
            return self._chosen
        wire = None if self._precision is None else self._precision.wire_dtype
        return AllReduce() if wire is None else Cast(wire, AllReduce())

    def use_exchange(self, exchange: GradientExchange[Any]) -> None:
        """Exchange gradients by another method of ``guozhuang.exchange``. Every rank must call it, before any backward.

        Args:
            exchange: equal on all ranks.

        Raises:
            UsageError: ``exchange`` is not a GradientExchange.
            RuntimeError: an exchange or a communication hook was chosen before, gradients have been exchanged already, or the
                module trains in ``mixed_precision``, which has a wire format of its own.
        """
        if not isinstance(exchange, GradientExchange):
            fix = "give an object such as guozhuang.exchange.AllReduce()"
            raise UsageError(explain("use_exchange takes a GradientExchange", value=exchange, fix=fix))
        self._choose(exchange, "an exchange", exchange)

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let ``hook(state, bucket) -> Future[Tensor]`` exchange the buckets. Every rank must call it, before any backward.

        The bucket has the methods of ``torch.distributed.GradBucket``; gradients are not divided by the number of ranks.
        Buckets are assigned again once, after the first backward. On CPU, backward waits for each bucket's hook,
        because a hook may issue collectives from callbacks, whose order among other collectives would differ between ranks.
        PyTorch's allreduce, fp16 and bf16 hooks, and a hook with an attribute ``one_round = True``, are known to issue all
        collectives when they are called; these overlap with backward.

        Raises:
            TypeError: ``hook`` is not callable, or has no parameter ``bucket``.
            UsageError: the annotations of ``hook`` are not those of a communication hook.
            RuntimeError: a hook was registered before, or gradients have been exchanged already.
        """
        ddp = cast("DistributedDataParallel", self)
        try:
            check_hook(hook)
        except (TypeError, UsageError) as error:
            ddp.logger.set_error_and_log(f"{type(error)}: {error}")
            raise
        self._choose(CommHook(hook, state), "a communication hook", hook)
        ddp.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__qualname__))

    def _choose(self, exchange: GradientExchange[Any], what: str, value: object) -> None:
        if self._chosen is not None:
            raise RuntimeError(explain(f"{what} can be registered only once", value=value, fix=_WRAP_ANEW))
        if self._precision is not None:
            raise RuntimeError(explain("mixed_precision has a communication hook of its own", fix="use one of the two"))
        if self._reducer is not None and self._reducer.step > 0:
            what = f"{what} must be registered before the first backward"
            raise RuntimeError(explain(what, value=value, fix=_WRAP_ANEW))
        self._chosen = exchange
        try:
            if self._reducer is not None:
                self._reducer.use(exchange)
                self.compare_what_is_equal(self._reducer)
            else:
                _ = self.reducer  # create the reducer now, so that errors about this exchange are raised here
        except Exception:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Go back to the exchange that a wrapper has from the start, after the chosen one was refused."""
        self._chosen = None
        if self._reducer is not None:
            self._reducer.use(self.exchange)
            self.compare_what_is_equal(self._reducer)

    def compare_what_is_equal(self, reducer: TorchReducer) -> None:
        """Leave out of the comparisons of replicas what the exchange does not keep equal, as far as it is known."""
        if self.around is not None:
            reducer.alike = None
        elif reducer.alike is not None:
            reducer.alike.compares_weights = not isinstance(self.exchange, CommHook)

    def exchange_state_dict(self) -> dict[str, Any]:
        """Return the exchange's state, to continue exactly from a checkpoint. Every rank must call; each saves its own.

        Returns:
            "step", the number of exchanges so far, "exchange", the state of the method (its error feedback, for example), and
            "layout", the names of each bucket's parameters (None before the ranks have agreed on it);
            with a weight exchange also "weights": it then makes the ranks' weights equal, so call it before ``state_dict()``.
        """
        around = {} if self.around is None else {"weights": self.around.state_dict()}
        if self.reducer is None:
            return {"step": 0, "exchange": {}, "layout": None, **around}
        kept, layout = self.reducer.exchange_state(), self.reducer.named_layout()
        return {"step": self.reducer.step, "exchange": kept, "layout": layout, **around}

    def load_exchange_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what ``exchange_state_dict`` returned on this rank. Every rank must call, after the exchange was chosen.

        With a weight exchange, weights may be loaded before or after this, but before the next step. Buckets are assigned as
        in the saved run, whatever their size limit is now, as codes may depend on it, unless other parameters are trained.

        Raises:
            UsageError: the state was saved with another exchange, or for other parameters.
        """
        if self.reducer is not None:
            self.reducer.load_exchange_state(saved["exchange"], int(saved["step"]), saved.get("layout"))
        if (self.around is None) != ("weights" not in saved):
            what = "the checkpoint was saved " + ("with" if self.around is None else "without") + " a weight exchange"
            raise UsageError(explain(what, fix="choose the exchange that it was saved with"))
        if self.around is not None:
            self.around.load_state_dict(saved["weights"])

    def use_weight_exchange(self, exchange: WeightExchange[Any], optimizer: Optimizer) -> None:
        """Exchange weights around the optimizer's steps; gradients stay on each rank unless the method averages them.

        Every rank must call it, before any backward. The ranks' weights are made equal before evaluation
        (``model.eval()``), before ``state_dict()`` and at the end of ``join()``, if there was a step since, or weights were
        loaded: these calls then wait for all ranks, and floating-point buffers become their mean. To save from rank 0
        alone, let every rank call ``model.eval()`` first. ``state_dict()`` of a part of the module does not make weights equal.

        Load weights with ``load_state_dict()`` on every rank, on all or any part of the module; all ranks get rank 0's loaded
        weights, and the mean of those not loaded, and the exchange restarts from them. If ``p.data``
        was replaced, it restarts from the mean. Values written in place (``p.copy_()``) are not noticed, and count as
        training: use ``load_state_dict()``. The exchange's own state may be loaded before or after the weights.

        Every rank must make every step. With ``torch.amp.GradScaler`` use a fused optimizer (``fused=True``), whose ``step()``
        is called on all ranks even if gradients overflowed, or bf16 without a scaler. If one rank left out a step, all ranks
        raise where weights are made equal; the error names ranks and steps. Inside ``join()`` there must be one
        synchronized forward for each optimizer step: to accumulate, run all forwards but the last one in ``no_sync()``.
        Any other pattern raises UsageError.

        Args:
            exchange: equal on all ranks.
            optimizer: the optimizer of the module's parameters; it must hold all trained ones, since exactly its parameters
                are exchanged.

        Raises:
            UsageError: ``exchange`` is not a WeightExchange, the optimizer does not hold all trained parameters, or some are
                delayed (``delay_all_reduce_named_params``).
            RuntimeError: another weight exchange was chosen before, or gradients have been exchanged already.
        """
        check_weight_exchange(exchange)
        ddp = cast("DistributedDataParallel", self)
        if self.around is not None:
            raise RuntimeError(explain("a weight exchange can be chosen only once", value=exchange, fix=_WRAP_ANEW))
        if ddp._delayed_names:
            what = (
                "gradients that delay_all_reduce_named_params holds back do not go together with an exchange of weights"
            )
            raise UsageError(explain(what, fix="use one of the two"))
        if exchange.gradients() is None and ddp._reducer is not None and ddp._reducer.step > 0:
            what = "a weight exchange must be chosen before the first backward"
            raise RuntimeError(explain(what, value=exchange, fix=_WRAP_ANEW))
        exchanged_parameters(ddp.module, optimizer, ddp.ignored)
        gradients = exchange.gradients()
        if gradients is not None:
            ddp.use_exchange(gradients)
        try:
            self.around = around = AroundSteps(
                ddp.module,
                optimizer,
                exchange,
                ddp.process_group,
                ignored=ddp.ignored,
                averages_buffers=ddp.forward_sync_buffers,
                is_shadowed=weakly(self._is_shadowed),
            )
        except Exception:
            if gradients is not None:
                self._give_up()
            raise
        if ddp._reducer is not None:
            self.compare_what_is_equal(ddp._reducer)
        ddp.forward_sync_buffers = False  # changed only after all checks have passed
        if gradients is not None and ddp.reducer is not None:  # this exchange of gradients counts optimizer steps
            this = weakref.proxy(around)  # weak: a parameter's hooks may keep the reducer longer than the wrapper
            ddp.reducer.exchange_step = lambda: this.step
        elif not exchange.averages_gradients(0):
            ddp.leave_gradients_local()

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of the coming backward stay on this rank, because weights are exchanged instead."""
        return self.around is not None and self.around.keeps_gradients

    def _is_shadowed(self) -> bool:
        """Tell whether the wrapper is in a ``join()`` context, where ranks without data take part in the others' steps."""
        ddp = cast("DistributedDataParallel", self)
        config = ddp._join_config
        return bool(ddp.in_join_context and config.enable and not config.throw_on_early_termination)

    def agree(self) -> None:
        """Make the weights of all ranks equal now. Every rank must call it. Does nothing without a weight exchange.

        Raises:
            WorldError: a rank did not call within the group's time-out; the text names it.
        """
        if self.around is not None:
            self.around.agree()

    def train(self, mode: bool = True) -> Any:
        """Switch to training or evaluation. A weight exchange makes weights equal before evaluation: every rank must call."""
        if not mode:
            self.agree()
        return super().train(mode)  # type: ignore[misc]
