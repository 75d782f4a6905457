"""``strategy="horovod"``: makes the calls that a Horovod script makes between making its optimizer and training."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

import guozhuang.compat.horovod.torch as hvd
from guozhuang import world


def prepare(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Prepare a plain model and its optimizer for training with Horovod. Every rank must call this, after ``guozhuang.init()``.

    Starts the engine that matches gradients by name, if it does not run yet; the engine ends with the world. Broadcasts the
    weights, buffers and optimizer state of rank 0. If ranks run out of data at different times, each must call
    ``guozhuang.compat.horovod.torch.join()`` after its last batch.

    Returns:
        The model, and the distributed optimizer.
    """
    hvd.init()
    world.before_leaving(hvd.shutdown)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
