"""Gates of a mixture of experts: which tokens go to which expert, at which place, and with which weight.

Formulas, with S tokens, E experts, logits z = W x in float32, and p = softmax(z):
top-1: a token goes to its greatest p; an expert that more than ``capacity`` tokens chose keeps as many, drawn at random. The
output is p times that of the expert; l_aux = E sum_e mean(p_e) mean(m_e), with m the choice before places are given.
top-2: the second choice is the greatest of z plus Gumbel noise among the other experts; places are given in the order of
tokens, first choices before second ones. Weights are the two p, divided by their sum; l_aux is that of top-1.
Error: tokens without a place get zeros.
Source: GShard, Lepikhin et al. 2020, arXiv:2006.16668; random places: DeepSpeed-MoE, Rajbhandari et al. 2022, arXiv:2201.05596.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guozhuang.errors import UsageError, explain

_JITTER = 1e-2


@dataclass
class Routing:
    """What a gate decides for S tokens, E experts and a capacity of C tokens for each.

    Attributes:
        l_aux: the loss that asks for equal use of the experts; a scalar.
        combine: (S, E, C), the weight of a token's place in its output; zero where it has none.
        exp_counts: (E,), on the CPU: how many tokens chose each expert first.
    """

    l_aux: Tensor
    combine: Tensor
    exp_counts: Tensor


class TopKGate(nn.Module):
    """The gate of one layer.

    Args:
        model_dim: the size of a token.
        num_experts: E, of all ranks.
        k: experts for each token, 1 or 2.
        capacity_factor: places of an expert, as a multiple of the tokens' equal share, in training.
        eval_capacity_factor: the same in evaluation.
        min_capacity: the least number of places, for top-1.
        noisy_gate_policy: None; "Jitter" multiplies what the gate sees by noise in training; "RSample" draws the choice of
            top-1 by Gumbel noise in training.

    Raises:
        UsageError: (a ValueError) ``k`` is another number.
        AssertionError: another policy.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
    ) -> None:
        super().__init__()
        if k not in (1, 2):
            raise UsageError(explain("a token goes to one or two experts", value=f"k={k}", fix="give k=1 or k=2"))
        policy = None if noisy_gate_policy == "None" else noisy_gate_policy
        assert policy in (None, "Jitter", "RSample"), explain(
            "noisy_gate_policy is None, 'Jitter' or 'RSample'", value=noisy_gate_policy, fix="leave it out"
        )
        self.wg = nn.Linear(model_dim, num_experts, bias=False).float()
        self.k, self.min_capacity, self.policy = k, min_capacity, policy
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor

    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Routing:
        """Route tokens of shape (S, model_dim).

        Args:
            tokens: of any floating-point dtype; the gate computes in float32.
            used_token: (S,), 0 for tokens that no expert is to see; for top-1. None: all are seen.
        """
        seen = tokens.float()
        if self.policy == "Jitter" and self.training:
            seen = seen * torch.empty_like(seen).uniform_(1 - _JITTER, 1 + _JITTER)
        with torch.autocast(seen.device.type, enabled=False):
            logits = F.linear(seen, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        if self.k == 2:
            return top2(logits, factor)
        noisy = self.policy == "RSample" and self.training
        return top1(logits, factor, self.min_capacity, used_token, noisy)


def top1(
    logits: Tensor, factor: float, min_capacity: int, used_token: Tensor | None = None, noisy: bool = False
) -> Routing:
    """Route each token to one expert; see the formulas at the top of the module."""
    num_tokens, num_experts = logits.shape
    assert num_tokens >= min_capacity, explain(
        "there are fewer tokens than min_capacity", value=(num_tokens, min_capacity), fix="lower min_capacity"
    )
    gates = logits.softmax(1)
    capacity = min(max(math.ceil(num_tokens / num_experts * factor), min_capacity), num_tokens)
    chosen = (logits + _gumbel(logits) if noisy else gates).argmax(1)
    mask = F.one_hot(chosen, num_experts)
    if used_token is not None:
        mask = mask * used_token.reshape(-1, 1).to(mask)
    l_aux = (gates.mean(0) * mask.float().mean(0)).sum() * num_experts
    drawn = (mask * torch.rand_like(gates)).topk(capacity, dim=0).indices
    kept = mask * torch.zeros_like(mask).scatter_(0, drawn, 1)
    return Routing(l_aux, _combine(gates, kept, kept.cumsum(0) - 1, capacity), mask.sum(0).detach().cpu())


def top2(logits: Tensor, factor: float) -> Routing:
    """Route each token to two experts; see the formulas at the top of the module."""
    num_tokens, num_experts = logits.shape
    gates = logits.softmax(1)
    capacity = math.ceil(2 * num_tokens / num_experts * factor)
    first = F.one_hot(gates.argmax(1), num_experts)
    others = (logits + _gumbel(logits)).masked_fill(first.bool(), -math.inf)
    second = F.one_hot(others.argmax(1), num_experts)
    if num_experts == 1:
        second = torch.zeros_like(first)
    l_aux = (gates.mean(0) * first.float().mean(0)).mean() * num_experts**2
    places = first.cumsum(0) - 1, second.cumsum(0) - 1 + first.sum(0, keepdim=True)
    kept = [mask * (place < capacity) for mask, place in zip((first, second), places, strict=True)]
    weights = [(gates * mask).sum(1, keepdim=True) for mask in kept]
    total = (weights[0] + weights[1]).clamp(min=torch.finfo(gates.dtype).eps)
    parts = [
        _combine(weight / total, mask, place, capacity)
        for weight, mask, place in zip(weights, kept, places, strict=True)
    ]
    return Routing(l_aux, parts[0] + parts[1], first.sum(0).detach().cpu())


def _combine(weights: Tensor, mask: Tensor, places: Tensor, capacity: int) -> Tensor:
    """Return (S, E, C) with the weights of tokens at their places; ``weights`` is (S, E) or (S, 1)."""
    place = F.one_hot((places * mask).sum(1), capacity).to(weights)
    return torch.einsum("se,sc->sec", weights * mask, place)


def _gumbel(logits: Tensor) -> Tensor:
    return -torch.empty_like(logits).exponential_().log()
