"""``QAdamAlgorithm`` and its optimizer: Adam whose momentum is sent in 8 bits after a warm-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from typing_extensions import override

from guozhuang.errors import UsageError, explain
from guozhuang.exchange import AllReduce, GradientExchange
from guozhuang.exchange.adam_momentum import AdamMomentum
from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed
from guozhuang.exchange.warmup import Warmup
from guozhuang.optim import QAdam

from .base import Algorithm, AlgorithmImpl
from .gradient_allreduce import in_levels


class QAdamOptimizer(QAdam):
    """Adam whose second moment stays as it is after ``warmup_steps`` steps; see :class:`guozhuang.optim.QAdam`.

    The gradient of step ``warmup_steps`` takes part in both moments, and momentum is coded from the next one on; Bagua lost it.

    Args:
        params: parameters or groups, as for ``torch.optim.Adam``.
        lr: learning rate.
        warmup_steps: steps in which it is Adam.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: added to gradients times weights (L2).

    Raises:
        ValueError: ``lr``, ``eps`` or ``weight_decay`` negative, ``betas`` outside [0, 1), ``warmup_steps`` below 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, warmup_steps=warmup_steps)


class QAdamAlgorithm(Algorithm):
    """Averages gradients in the warm-up of the optimizer, then its momentum in 8 bits.

    Args:
        q_adam_optimizer: the optimizer, which ``with_bagua`` gets too.
        hierarchical: after the warm-up, sum inside each node first, without a code.

    Raises:
        UsageError: it is another optimizer. From ``with_bagua``: the model trains with another one.
    """

    def __init__(self, q_adam_optimizer: QAdam, hierarchical: bool = True) -> None:
        if not isinstance(q_adam_optimizer, QAdam):
            fix = "make it by bagua.torch_api.algorithms.q_adam.QAdamOptimizer(params, lr=..., warmup_steps=...)"
            raise UsageError(explain("qadam takes a QAdamOptimizer", value=type(q_adam_optimizer).__name__, fix=fix))
        self.optimizer, self.hierarchical = q_adam_optimizer, hierarchical

    @override
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return QAdamImpl(process_group, self.optimizer, self.hierarchical)


class QAdamImpl(AlgorithmImpl):
    """Exchanges gradients in the warm-up of a ``QAdam``, then its momenta."""

    def __init__(self, process_group: Any, optimizer: QAdam, hierarchical: bool) -> None:
        super().__init__(process_group)
        self._optimizer, self._hierarchical = optimizer, hierarchical

    @override
    def check(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], do_flatten: bool) -> None:
        if self._optimizer not in optimizers:
            fix = "give the same object to QAdamAlgorithm and in the list of with_bagua"
            raise UsageError(explain("qadam's optimizer is not one of with_bagua's optimizers", fix=fix))

    @override
    def gradients(self, forward: int, optimizers: Sequence[torch.optim.Optimizer]) -> GradientExchange[Any]:
        left = max(0, self._optimizer.warmup_steps - self._optimizer.num_steps)
        coded = in_levels(AdamMomentum(self._optimizer, Compressed(MinMax8())), self._hierarchical)
        return Warmup(left, AllReduce(), coded) if left else coded
