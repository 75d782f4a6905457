"""``LAMB``: Adam whose step of each layer is in proportion to the layer's weights.

Formula, for a parameter w of two dims or more with gradient g in its step t: m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2,
u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + d w, ratio = |w| / |u|, w <- w - lr ratio u, with the 2-norms of the whole
parameter and d the weight decay. Others (biases, normalization): ratio 1 and d 0.
Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes, ICLR 2020, arXiv:1904.00962.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from .layerwise import LayerwiseOptimizer, checked


class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments, for large batches of models that are trained by Adam (transformers).

    Norms are those of whole parameters under every strategy and layout. Groups take ``"layerwise"``: True or False decides for
    all their parameters whether they have a trust ratio and weight decay; None, for those of two dims or more.

    Args:
        params: parameters or groups, as in ``torch.optim``.
        lr: the learning rate.
        betas: b1 and b2 of the formula, from 0 to below 1.
        eps: is added to the denominator.
        weight_decay: d of the formula.

    Raises:
        UsageError: a value is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {
            "lr": checked("lr", lr, 0.0),
            "betas": (checked("betas[0]", betas[0], 0.0, 1.0), checked("betas[1]", betas[1], 0.0, 1.0)),
            "eps": checked("eps", eps, 0.0),
            "weight_decay": checked("weight_decay", weight_decay, 0.0),
        }
        super().__init__(params, defaults)

    @override
    def _directions(self, group: dict[str, Any], used: list[Tensor], layerwise: list[bool]) -> list[Tensor]:
        for p in used:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }
        states = [self.state[p] for p in used]
        gradients = [p.grad for p in used if p.grad is not None]
        beta1, beta2 = group["betas"]
        torch._foreach_add_([state["step"] for state in states], 1)
        steps = [float(state["step"]) for state in states]
        means, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        below = torch._foreach_sqrt(squares)
        torch._foreach_div_(below, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(below, group["eps"])
        found = torch._foreach_div(means, [1 - beta1**step for step in steps])
        torch._foreach_div_(found, below)
        decays = [group["weight_decay"] if each else 0.0 for each in layerwise]
        torch._foreach_add_(found, torch._foreach_mul(used, decays))
        return list(found)

    @override
    def _measured(self, gradients: list[Tensor | None], directions: list[Tensor | None]) -> list[Tensor | None]:
        return directions

    @override
    def _ratio(self, group: dict[str, Any], weight: Tensor, measured: Tensor) -> Tensor:
        return torch.where((weight > 0) & (measured > 0), weight / measured, 1.0)

    @override
    def _move(
        self, group: dict[str, Any], weights: list[Tensor], directions: list[Tensor], ratios: list[Tensor]
    ) -> None:
        lr = group["lr"]
        torch._foreach_mul_(directions, [(lr * ratio).to(d.dtype) for ratio, d in zip(ratios, directions, strict=True)])
        torch._foreach_sub_(weights, directions)
