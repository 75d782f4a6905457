"""Which exchange the wrapper's buckets go through: chosen before the first backward, saved and restored with its state."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch.optim import Optimizer

from ..errors import UsageError, explain
from ..exchange import AllReduce, CommHook, GradientExchange
from ..exchange.cast import Cast
from ..exchange.comm_hook import Hook, check_hook
from ..gradients.reducer import Reducer
from ..weights.around import AroundSteps, check_weight_exchange, exchanged_parameters
from .precision import Precision

if TYPE_CHECKING:
    from ..exchange.weights import WeightExchange
    from .module import DistributedDataParallel

_WRAP_ANEW = "wrap the module anew"


class Exchanging:
    """The part of ``DistributedDataParallel`` that knows its exchange."""

    _reducer: Reducer | None
    _chosen: GradientExchange[Any] | None = None
    _precision: Precision | None = None
    around: AroundSteps | None = None

    if TYPE_CHECKING:

        @property
        def reducer(self) -> Reducer | None:
            """See ``DistributedDataParallel``."""

    @property
    def exchange(self) -> GradientExchange[Any]:
        """What is done with a full bucket; an all-reduce unless another was chosen."""
        if self._chosen is not None:
            return self._chosen
        wire = None if self._precision is None else self._precision.wire_dtype
        return AllReduce() if wire is None else Cast(wire, AllReduce())

    def use_exchange(self, exchange: GradientExchange[Any]) -> None:
        """Exchange gradients by another method of ``guozhuang.exchange``. Every rank must call it, before any backward.

        Args:
            exchange: equal on all ranks.

        Raises:
            UsageError: it is no exchange.
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
        Buckets are laid out anew once, after the first backward. On CPU each bucket's hook is waited for before backward goes
        on, because a hook may issue collectives from callbacks, whose order among other collectives would differ between ranks.
        PyTorch's allreduce, fp16 and bf16 hooks, and a hook with an attribute ``one_round = True``, are known to issue all of
        them when they are called; these overlap with backward.

        Raises:
            TypeError: ``hook`` cannot be called, or has no parameter ``bucket``.
            UsageError: its annotations are not a hook's.
            RuntimeError: a hook was registered before, or gradients have been exchanged already.
        """
        check_hook(hook)
        self._choose(CommHook(hook, state), "a communication hook", hook)

    def _choose(self, exchange: GradientExchange[Any], what: str, value: object) -> None:
        if self._chosen is not None:
            raise RuntimeError(explain(f"{what} can be registered only once", value=value, fix=_WRAP_ANEW))
        if self._precision is not None:
            raise RuntimeError(explain("mixed_precision has a communication hook of its own", fix="use one of the two"))
        if self._reducer is not None and self._reducer.step > 0:
            what = f"{what} must be registered before the first backward"
            raise RuntimeError(explain(what, value=value, fix=_WRAP_ANEW))
        self._chosen = exchange
        if self._reducer is not None:
            self._reducer.use(exchange)
        else:
            _ = self.reducer  # made with this exchange, which says now what it refuses

    def exchange_state_dict(self) -> dict[str, Any]:
        """Return what the exchange needs to go on exactly from a checkpoint. Every rank must call; each saves its own.

        Returns:
            "step", the number of exchanges so far, "exchange", whatever the method keeps (its error feedback, for example), and
            "layout", the names of each bucket's parameters (None before the ranks have agreed on it);
            with a weight exchange also "weights": the ranks agree on one set of them first, so call it before ``state_dict()``.
        """
        around = {} if self.around is None else {"weights": self.around.state_dict()}
        if self.reducer is None:
            return {"step": 0, "exchange": {}, "layout": None, **around}
        kept, layout = self.reducer.exchange_state(), self.reducer.named_layout()
        return {"step": self.reducer.step, "exchange": kept, "layout": layout, **around}

    def load_exchange_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where ``exchange_state_dict`` was called on this rank. Every rank must call, after the exchange was chosen.

        With a weight exchange the weights are loaded before this or after it, but before the next step. Buckets are laid out as
        they were then, whatever their size is to be now, because codes may depend on it; not where others are trained.

        Raises:
            UsageError: it was saved with another exchange, or for other parameters.
        """
        if self.reducer is not None:
            self.reducer.load_exchange_state(saved["exchange"], int(saved["step"]), saved.get("layout"))
        if (self.around is None) != ("weights" not in saved):
            what = "the checkpoint was saved " + ("with" if self.around is None else "without") + " a weight exchange"
            raise UsageError(explain(what, fix="choose the exchange that it was saved with"))
        if self.around is not None:
            self.around.load_state_dict(saved["weights"])

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
        called everywhere also where gradients overflowed, or bf16 without a scaler. A rank that left out a step alone raises
        where the ranks agree, and so do the others; the error names ranks and steps. Inside ``join()`` there is one
        synchronized forward for each optimizer step: to accumulate, run all forwards but the last one in ``no_sync()``.
        Anything else raises UsageError.

        Args:
            exchange: equal on all ranks.
            optimizer: the one that steps the module's parameters; it must hold all that are trained, since what it holds is
                what is exchanged.

        Raises:
            UsageError: it is no weight exchange, the optimizer does not hold all trained parameters, or some are delayed
                (``delay_all_reduce_named_params``).
            RuntimeError: another was chosen before, or gradients have been exchanged already.
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
        self.around = around = AroundSteps(
            ddp.module,
            optimizer,
            exchange,
            ddp.process_group,
            ignored=ddp.ignored,
            averages_buffers=ddp.forward_sync_buffers,
            is_shadowed=_IsShadowed(ddp),
        )
        ddp.forward_sync_buffers = False  # here, where nothing can fail any more
        if gradients is not None and ddp.reducer is not None:  # by the optimizer's steps, too
            this = weakref.proxy(around)  # a parameter's hooks may keep the reducer longer than the wrapper
            ddp.reducer.exchange_step = lambda: this.step
        elif not exchange.averages_gradients(0):
            ddp.leave_gradients_local()

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


class _IsShadowed:
    """Tells whether a wrapper is in a join context whose ranks without data shadow its steps."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)

    def __call__(self) -> bool:
        ddp = self._ddp()
        if ddp is None or not ddp.in_join_context:
            return False
        return bool(ddp._join_config.enable and not ddp._join_config.throw_on_early_termination)
