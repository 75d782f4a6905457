"""``ScaledWarmupLR``: the learning rate of a small batch, scaled to a large one and reached by a warm-up.

With k = batch size / base batch size the learning rate is multiplied by k (linear: Goyal et al., Accurate, Large Minibatch SGD,
2017, arXiv:1706.02677; for SGD, LARS) or by sqrt(k) (square root: Krizhevsky, One weird trick, 2014, arXiv:1404.5997; Malladi
et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, 2022, arXiv:2205.10287; for Adam and LAMB). In the first
steps it rises linearly, from that of the small batch on.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import UsageError, explain

_RULES = {"linear": lambda k: k, "sqrt": math.sqrt}


class ScaledWarmupLR(LRScheduler):
    """Scales the learning rates of an optimizer to a larger batch, and lets them rise to that in a warm-up.

    The scaled values become the groups' ``initial_lr``, so schedulers that are made after this one, or go on from it in a
    ``SequentialLR`` or ``ChainedScheduler``, decay from there. Step it once per optimizer step.

    Args:
        optimizer: with the learning rates that fit ``base_batch_size``.
        batch_size: the global batch, over all ranks and accumulated backwards, in samples.
        base_batch_size: the batch for which the optimizer's learning rates are right, in samples.
        rule: "linear" for SGD and LARS, "sqrt" for Adam, AdamW and LAMB.
        warmup_steps: number of steps until the scaled learning rate is reached; 0: at once.
        last_epoch: the number of steps done, as in PyTorch's schedulers.

    Raises:
        UsageError: a batch size is below 1, the rule is unknown, or ``warmup_steps`` is negative.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batch_size: int,
        base_batch_size: int,
        rule: str = "linear",
        warmup_steps: int = 0,
        last_epoch: int = -1,
    ) -> None:
        if rule not in _RULES:
            raise UsageError(explain("there is no such rule to scale by", value=rule, fix="choose linear or sqrt"))
        if min(batch_size, base_batch_size) < 1 or warmup_steps < 0:
            what = "batch sizes are counts of samples, and warmup_steps of steps"
            value = f"batch_size={batch_size}, base_batch_size={base_batch_size}, warmup_steps={warmup_steps}"
            raise UsageError(
                explain(what, value=value, fix="give counts of at least 1, and warmup_steps of at least 0")
            )
        self.scale = float(_RULES[rule](batch_size / base_batch_size))
        self.warmup_steps = warmup_steps
        if last_epoch == -1:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.scale
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """Return by what the scaled learning rate is multiplied after ``step`` steps: from 1 / scale to 1 in the warm-up."""
        if step >= self.warmup_steps:
            return 1.0
        return 1.0 / self.scale + (1.0 - 1.0 / self.scale) * step / self.warmup_steps

    def get_lr(self) -> list[Any]:
        """Return the groups' learning rates for the present step, from those of the step before."""
        step = self.last_epoch
        by = self.factor(0) if step <= 0 else self.factor(step) / self.factor(step - 1)
        return [group["lr"] * by for group in self.optimizer.param_groups]

    def _get_closed_form_lr(self) -> list[Any]:
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]
