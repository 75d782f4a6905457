"""``torch.amp.GradScaler`` over ranks that each hold a part of the gradients: all step, or all skip, and scales stay equal.

GradScaler keeps a flag "infinity found" in tensors of its own, and adapts its scale by it in ``update()``. So if one rank found
an infinity, the flag must be set in the scalers of all ranks. PyTorch passes the scaler to ``step`` of an optimizer that
asks for it by an argument ``grad_scaler``.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .carrier import Carrier

if TYPE_CHECKING:
    from .optimizer import ShardedOptimizer


def silence_warning() -> None:
    """Suppress PyTorch's warning, meant for authors of optimizers, that GradScaler may stop passing itself to ``step``."""
    warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


def unscale_together(scaler: Any, optimizer: ShardedOptimizer, carrier: Carrier) -> bool:
    """Unscale the collected gradients unless the user did, and tell whether to step. Every rank must call it.

    Args:
        scaler: the scaler, before or after ``unscale_(optimizer)``.
        optimizer: the object under whose id the scaler keeps its flags.
        carrier: its ``collect`` has been called.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    found: dict[torch.device, torch.Tensor] = state["found_inf_per_device"]
    device = optimizer.device
    if state["stage"] is OptState.READY:
        scale = scaler._scale
        local = torch.zeros((), dtype=torch.float32, device=device)
        gradients: dict[torch.dtype, list[torch.Tensor]] = {}
        for weight in carrier.weights:
            if weight.grad is not None:
                gradients.setdefault(weight.grad.dtype, []).append(weight.grad)
        inverse = scale.double().reciprocal().float().to(device)
        for same in gradients.values():
            torch._amp_foreach_non_finite_check_and_unscale_(same, local, inverse)
    else:
        local = sum((value.to(device) for value in found.values()), torch.zeros((), device=device))
    agreed = (local > 0).to(torch.float32).reshape(1)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=optimizer.group)
    found.clear()
    found[device] = agreed.reshape(())
    return not agreed.item()
