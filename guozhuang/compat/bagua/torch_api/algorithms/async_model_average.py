"""``AsyncModelAverageAlgorithm``: each rank trains at its own speed, and weights are averaged in the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from typing_extensions import override

from guozhuang.errors import UsageError, explain
from guozhuang.exchange import AllReduce, GradientExchange
from guozhuang.exchange.async_average import AsyncModelAverage
from guozhuang.exchange.weights import WeightExchange

from .base import Algorithm, AlgorithmImpl


class AsyncModelAverageAlgorithm(Algorithm):
    """Averages weights at intervals of time, without letting ranks wait; they may make different numbers of steps.

    Call ``model.bagua_algorithm.abort(model)`` before evaluation and at the end, and ``resume(model)`` before training again.

    Args:
        peer_selection_mode: "all".
        sync_interval_ms: the least time from one average to the next, in milliseconds; 0 or less: weights are never averaged.
        warmup_steps: the first training forwards, in which gradients are averaged instead; all ranks must make these.

    Raises:
        UsageError: another ``peer_selection_mode``; a negative ``warmup_steps``.
    """

    def __init__(
        self, peer_selection_mode: Literal["all"] = "all", sync_interval_ms: int = 500, warmup_steps: int = 0
    ) -> None:
        if peer_selection_mode != "all":
            fix = "leave it out, or take the algorithm decentralized"
            raise UsageError(explain("peer_selection_mode of async is 'all'", value=peer_selection_mode, fix=fix))
        if warmup_steps < 0:
            what = "warmup_steps is a number of forwards, at least 0"
            raise UsageError(explain(what, value=warmup_steps, fix="leave it out for no warm-up"))
        self.peer_selection_mode, self.sync_interval_ms = peer_selection_mode, sync_interval_ms
        self.warmup_steps = warmup_steps

    @override
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return AsyncModelAverageImpl(process_group, self.sync_interval_ms, self.warmup_steps)

    def abort(self, model: Any) -> None:
        """Do what ``model.bagua_algorithm.abort(model)`` does; older scripts call it here."""
        _impl_of(model).abort(model)

    def resume(self, model: Any) -> None:
        """Do what ``model.bagua_algorithm.resume(model)`` does."""
        _impl_of(model).resume(model)


class AsyncModelAverageImpl(AlgorithmImpl):
    """Averages gradients in the warm-up, then weights by ``AsyncModelAverage``, until :meth:`abort`."""

    def __init__(self, process_group: Any, interval_ms: float, warmup_steps: int) -> None:
        super().__init__(process_group)
        self._interval_ms, self._warmup = interval_ms, warmup_steps
        self._is_running = True

    @override
    def check(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], do_flatten: bool) -> None:
        assert do_flatten, explain("async needs do_flatten=True", value=do_flatten, fix="leave do_flatten out")

    @override
    def need_reset(self, forward: int) -> bool:
        return self._warmup > 0 and forward == self._warmup + 1

    @override
    def gradients(self, forward: int, optimizers: Sequence[torch.optim.Optimizer]) -> GradientExchange[Any] | None:
        return AllReduce() if forward <= self._warmup else None

    @override
    def weights(self, forward: int) -> WeightExchange[Any] | None:
        return AsyncModelAverage(self._interval_ms) if forward > self._warmup and self._interval_ms > 0 else None

    @override
    def after_step(self, forward: int) -> None:
        if self.exchange is not None and self._is_running:
            self.exchange.after_step(self.state, forward)

    def abort(self, model: Any) -> None:
        """Finish running averages, and make the weights of all ranks equal. Every rank must call it; twice is harmless.

        Args:
            model: the model, or what ``DistributedDataParallel`` returned for it.

        Raises:
            UsageError: this object does not train ``model``.
            WorldError: a rank did not call within the group's time-out; the text names it.
        """
        self._check_model(model)
        if self.exchange is not None and self._is_running:
            with torch.no_grad():
                self.exchange.agree(self.state)
        self._is_running = False

    def resume(self, model: Any) -> None:
        """Let averages begin again after :meth:`abort`. Every rank must call it.

        Raises:
            UsageError: this object does not train ``model``.
        """
        self._check_model(model)
        self._is_running = True

    def _check_model(self, model: Any) -> None:
        if _impl_of(model) is not self:
            fix = "call model.bagua_algorithm.abort(model) and .resume(model) with one model"
            raise UsageError(explain("this algorithm trains another model", value=type(model).__name__, fix=fix))


def _impl_of(model: Any) -> AsyncModelAverageImpl:
    found = getattr(model, "bagua_algorithm", None)
    if not isinstance(found, AsyncModelAverageImpl):
        what = "abort and resume take a model that trains by the algorithm async"
        raise UsageError(explain(what, value=type(model).__name__, fix="give the model that with_bagua returned"))
    return found
