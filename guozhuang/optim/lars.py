"""``LARS``: stochastic gradient descent with momentum whose step of each layer is in proportion to the layer's weights.

Formula, for a parameter w of two dims or more with gradient g: ratio = c |w| / (|g| + d |w| + eps),
v <- m v + lr ratio (g + d w), w <- w - v, with the 2-norms of the whole parameter, c the trust coefficient, d the weight decay
and m the momentum.
Others (biases, normalization): ratio 1 and d 0.
Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017, arXiv:1708.03888.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from .layerwise import LayerwiseOptimizer, checked


class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling, for large batches of models that are trained by SGD (convolutional networks).

    Norms are those of whole parameters under every strategy and layout. Groups take ``"layerwise"``: True or False decides for
    all their parameters whether they have a trust ratio and weight decay; None, for those of two dims or more.

    Args:
        params: parameters or groups, as in ``torch.optim``.
        lr: the learning rate; by the paper's experiments large, from 1 on, and reached by a warm-up.
        momentum: the share of the last step that is kept, from 0 to below 1.
        weight_decay: d of the formula.
        trust_coefficient: c of the formula.
        eps: is added to the denominator.

    Raises:
        UsageError: a value is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": checked("lr", lr, 0.0),
            "momentum": checked("momentum", momentum, 0.0, 1.0),
            "weight_decay": checked("weight_decay", weight_decay, 0.0),
            "trust_coefficient": checked("trust_coefficient", trust_coefficient, 0.0),
            "eps": checked("eps", eps, 0.0),
        }
        super().__init__(params, defaults)

    @override
    def _directions(self, group: dict[str, Any], used: list[Tensor], layerwise: list[bool]) -> list[Tensor]:
        decays = [group["weight_decay"] if each else 0.0 for each in layerwise]
        found = [p.grad.detach().clone() for p in used if p.grad is not None]
        torch._foreach_add_(found, torch._foreach_mul(used, decays))
        return found

    @override
    def _measured(self, gradients: list[Tensor | None], directions: list[Tensor | None]) -> list[Tensor | None]:
        return gradients

    @override
    def _ratio(self, group: dict[str, Any], weight: Tensor, measured: Tensor) -> Tensor:
        found = group["trust_coefficient"] * weight / (measured + group["weight_decay"] * weight + group["eps"])
        return torch.where((weight > 0) & (measured > 0), found, 1.0)

    @override
    def _move(
        self, group: dict[str, Any], weights: list[Tensor], directions: list[Tensor], ratios: list[Tensor]
    ) -> None:
        lr = group["lr"]
        torch._foreach_mul_(directions, [(lr * ratio).to(d.dtype) for ratio, d in zip(ratios, directions, strict=True)])
        if group["momentum"]:
            for p in weights:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            kept = [self.state[p]["momentum_buffer"] for p in weights]
            torch._foreach_mul_(kept, group["momentum"])
            torch._foreach_add_(kept, directions)
            directions = kept
        torch._foreach_sub_(weights, directions)
