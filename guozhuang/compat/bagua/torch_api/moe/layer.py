"""``MoE``: a mixture of experts whose experts are spread over all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang.errors import UsageError, explain

from ..communicators import place
from .gates import TopKGate


class MoE(nn.Module):
    """Sends each token to one or two of the experts of all ranks. Ranks hold different experts, and the same gate.

    All ranks must call it together, with equally many tokens. Experts begin as copies of ``expert``; their parameters have the
    attribute ``expert = True``, by which ``with_bagua`` leaves them to their rank.

    Args:
        hidden_size: the size of a token.
        expert: the module of one expert, from (tokens, hidden_size) to the same shape.
        num_local_experts: experts on each rank.
        k: experts for each token, 1 or 2.
        output_dropout_prob: dropout of the output.
        capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy: see ``TopKGate``.

    Raises:
        ValueError: ``k`` is neither 1 nor 2, or there is no local expert.
        AssertionError: another ``noisy_gate_policy``.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_local_experts: int = 1,
        k: int = 1,
        output_dropout_prob: float = 0.0,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
    ) -> None:
        super().__init__()
        if num_local_experts < 1:
            fix = "leave num_local_experts out for one"
            raise UsageError(explain("each rank holds at least one expert", value=num_local_experts, fix=fix))
        self.num_experts = num_local_experts * place()[1]
        capacity = capacity_factor, eval_capacity_factor, min_capacity
        gate = TopKGate(hidden_size, self.num_experts, k, *capacity, noisy_gate_policy)
        self.bagua_moe = MOELayer(gate, Experts(expert, num_local_experts))
        self.dropout = nn.Dropout(output_dropout_prob)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, of the shape of ``hidden_states``, the auxiliary loss, and the first choices by expert.

        Args:
            hidden_states: (..., hidden_size).
            used_token: as many numbers as tokens, 0 for those that no expert is to see; for ``k=1``.
        """
        output, l_aux, exp_counts = self.bagua_moe(hidden_states, used_token)
        return self.dropout(output), l_aux, exp_counts


class Experts(nn.Module):
    """The experts of this rank, which start as copies of one module."""

    def __init__(self, expert: nn.Module, num_local_experts: int) -> None:
        super().__init__()
        self.bagua_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        for parameter in self.bagua_experts.parameters():
            parameter.expert = True  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor) -> Tensor:
        """Give each expert its part: (ranks, experts here, places, size), and so is the result."""
        parts = [expert(part) for expert, part in zip(self.bagua_experts, tokens.unbind(1), strict=True)]
        # An expert may return a tuple whose first entry is its output.
        return torch.stack([part[0] if isinstance(part, tuple) else part for part in parts], 1)


class MOELayer(nn.Module):
    """Moves tokens to their experts and back; ``MoE`` makes it."""

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See ``MoE``."""
        size = hidden_states.shape[-1]
        tokens = hidden_states.reshape(-1, size)
        routing = self.gate(tokens, used_token)
        combine = routing.combine.to(tokens)
        _, num_ranks = place()
        sent = torch.einsum("sec,sm->ecm", (combine != 0).to(tokens), tokens)
        here = _exchanged(sent) if num_ranks > 1 else sent
        done = self.experts(here.view(num_ranks, -1, here.shape[1], size)).reshape(here.shape)
        back = _exchanged(done) if num_ranks > 1 else done
        return torch.einsum("sec,ecm->sm", combine, back).view(hidden_states.shape), routing.l_aux, routing.exp_counts


class _Exchanged(torch.autograd.Function):
    """All-to-all of equal parts along dimension 0; its gradient is the same exchange of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, tensor.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _Exchanged.forward(ctx, gradients[0])


def _exchanged(tensor: Tensor) -> Tensor:
    received: Tensor = _Exchanged.apply(tensor)  # type: ignore[no-untyped-call]
    return received


def is_moe_param(parameter: Tensor) -> bool:
    """Return whether a parameter belongs to an expert, and so to one rank."""
    return bool(getattr(parameter, "expert", False))
