"""The algorithms that exchange weights with few ranks: decentralized and low_precision_decentralized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from typing_extensions import override

from guozhuang.errors import UsageError, explain
from guozhuang.exchange.decentralized import Decentralized
from guozhuang.exchange.low_precision_decentralized import LowPrecisionDecentralized
from guozhuang.exchange.weights import WeightExchange

from ..contrib.fuse.optimizer import is_fused_optimizer
from .base import Algorithm, AlgorithmImpl, local_names


class DecentralizedAlgorithm(Algorithm):
    """Averages weights over ranks while forward and backward run; gradients stay on each rank.

    Args:
        hierarchical: average inside each node first; ranks of one node then have equal weights after each exchange.
        peer_selection_mode: "all" for the mean, "shift_one" for one other rank (one other node, if hierarchical) at a time.
        communication_interval: training forwards from one exchange to the next; the first forward exchanges.

    Raises:
        UsageError: another word; an interval below 1. From ``with_bagua``: hierarchical "shift_one" on one node.
    """

    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection_mode: Literal["all", "shift_one"] = "all",
        communication_interval: int = 1,
    ) -> None:
        self.hierarchical, self.peer_selection_mode = hierarchical, peer_selection_mode
        self.communication_interval = _checked(communication_interval)
        self._exchange = Decentralized(peer_selection_mode, nodes_first=hierarchical)

    @override
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return DecentralizedImpl(process_group, self._exchange, self.communication_interval)


class DecentralizedImpl(AlgorithmImpl):
    """``Decentralized``, begun before forwards; the average replaces the weights when backward has ended."""

    def __init__(self, process_group: Any, exchange: Decentralized, interval: int) -> None:
        super().__init__(process_group)
        self._exchange, self._interval = exchange, interval
        self._num_started = 0

    @override
    def weights(self, forward: int) -> WeightExchange[Any]:
        self._num_started = 0
        return self._exchange

    @override
    def before_forward(self, forward: int) -> None:
        lane = self.state.lane
        if lane is not None and not lane.in_flight and (forward - 1) % self._interval == 0:
            self._exchange.after_step(self.state, self._num_started - 1)
            self._num_started += 1

    @override
    def after_backward(self, forward: int) -> None:
        self._exchange.before_step(self.state, self._num_started)


class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """Averages weights with both neighbours in a ring after optimizer steps; differences are sent in 8 bits.

    Args:
        hierarchical: average inside each node first, without a code; the first ranks of the nodes are the ring.
        communication_interval: training forwards from one exchange to the next; the steps after the first forward exchange.

    Raises:
        UsageError: an interval below 1.
    """

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        self.hierarchical, self.communication_interval = hierarchical, _checked(communication_interval)
        self._exchange = LowPrecisionDecentralized(nodes_first=hierarchical)

    @override
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return LowPrecisionDecentralizedImpl(process_group, self._exchange, self.communication_interval)


class LowPrecisionDecentralizedImpl(AlgorithmImpl):
    """``LowPrecisionDecentralized`` after the step of each optimizer, in steps that follow certain forwards."""

    restarts_when_loaded = True

    def __init__(self, process_group: Any, exchange: LowPrecisionDecentralized, interval: int) -> None:
        super().__init__(process_group)
        self._exchange, self._interval = exchange, interval

    @override
    def weights(self, forward: int) -> WeightExchange[Any]:
        return self._exchange

    @override
    def check(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], do_flatten: bool) -> None:
        assert not any(map(is_fused_optimizer, optimizers)), explain(
            "low_precision_decentralized cannot train with a fused optimizer", fix="leave out fuse_optimizer"
        )
        ignored = local_names(module)
        held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in held and name not in ignored:
                what = "low_precision_decentralized needs each trained parameter in an optimizer"
                fix = "give with_bagua that optimizer, or list it in model._bagua_params_and_buffers_to_ignore"
                raise RuntimeError(explain(what, value=name, fix=fix))

    @override
    def after_step(self, forward: int) -> None:
        if forward > 0 and (forward - 1) % self._interval == 0:
            self._exchange.after_step(self.state, forward)


def _checked(interval: int) -> int:
    if not (isinstance(interval, int) and interval >= 1):
        fix = "give 1 to exchange in each of them"
        raise UsageError(explain("communication_interval is a number of forwards, at least 1", value=interval, fix=fix))
    return interval
