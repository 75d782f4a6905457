"""``import byteps.torch.cross_barrier as bps``: an optimizer that steps on each parameter when its gradient has come.

BytePS's own lets the next forward begin before all parameters are stepped; each layer waits for its own parameters, so the
weights are those of synchronous training. Here ``step`` does all of it before it returns: weights are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, RMSprop

from guozhuang.errors import explain

from .compression import Compression
from .functions import broadcast_optimizer_state, broadcast_parameters
from .ops import byteps_push_pull, init, local_rank, local_size, poll, rank, shutdown, size, synchronize
from .optimizer import DistributedOptimizer

__all__ = [
    "Compression", "CrossBarrier", "broadcast_optimizer_state", "broadcast_parameters", "byteps_push_pull", "init",
    "local_rank", "local_size", "poll", "rank", "shutdown", "size", "synchronize",
]  # fmt: skip


def CrossBarrier(
    model: nn.Module,
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    num_steps: int = 10**6,
) -> Any:
    """Make an optimizer step on the mean of all ranks' gradients, and zero the gradients after each step. Every rank must call.

    Args:
        model: the model whose parameters are trained.
        optimizer: an SGD, Adam or RMSprop optimizer, or one derived from them.
        named_parameters, compression, backward_passes_per_step: see ``DistributedOptimizer``.
        num_steps: the step after which BytePS waits for all parameters; here every step does, so fewer or more may follow.

    Returns:
        What ``DistributedOptimizer`` returns. Each ``step`` exchanges, also the first, which BytePS keeps on the rank.

    Raises:
        ValueError: another optimizer; no model; a number that is less than one; see also ``DistributedOptimizer``.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(explain("CrossBarrier takes a model", value=type(model).__name__, fix="give an nn.Module"))
    if not isinstance(optimizer, SGD | Adam | RMSprop):
        what = "CrossBarrier steps as SGD, Adam or RMSprop do"
        raise ValueError(explain(what, value=type(optimizer).__name__, fix="use one of them, or DistributedOptimizer"))
    if num_steps < 1:
        raise ValueError(explain("num_steps is at least 1", value=num_steps))
    made = DistributedOptimizer(optimizer, named_parameters, compression, backward_passes_per_step)
    made.register_step_post_hook(_zero)
    return made


def _zero(optimizer: Any, args: object, kwargs: object) -> None:
    optimizer.zero_grad(set_to_none=False)
