"""Which exchange the wrapper's buckets go through: chosen before the first backward, saved and restored with its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError, explain
from ..exchange import AllReduce, CommHook, GradientExchange
from ..exchange.cast import Cast
from ..exchange.comm_hook import Hook, check_hook
from ..gradients.reducer import Reducer
from ..weights.around import AroundSteps
from .precision import Precision

_WRAP_ANEW = "wrap the module anew"


class Exchanging:
    """The part of ``DistributedDataParallel`` that knows its exchange."""

    reducer: Reducer | None
    _chosen: GradientExchange[Any] | None = None
    _precision: Precision | None = None
    around: AroundSteps | None

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
        if self.reducer is not None and self.reducer.step > 0:
            what = f"{what} must be registered before the first backward"
            raise RuntimeError(explain(what, value=value, fix=_WRAP_ANEW))
        self._chosen = exchange
        if self.reducer is not None:
            self.reducer.use(exchange)

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
