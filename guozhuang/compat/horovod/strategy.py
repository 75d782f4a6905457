"""``strategy="horovod"``, ``"byteps"``: makes the calls that such a script makes between making its optimizer and training."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import guozhuang.compat.horovod.torch as hvd
from guozhuang import world


def prepare(model: nn.Module, optimizer: Optimizer, system: Any = hvd) -> tuple[nn.Module, Optimizer]:
    """Prepare a plain model and its optimizer for training with Horovod. Every rank must call this, after ``guozhuang.init()``.

    Starts the engine that matches gradients by name, if it does not run yet; the engine ends with the world. Broadcasts the
    weights, buffers and optimizer state of rank 0. If ranks run out of data at different times, each must call
    ``guozhuang.compat.horovod.torch.join()`` after its last batch.

    Unlike in a Horovod script, gradients are combined when backward returns, as under every other strategy: they can be clipped
    and unscaled without ``synchronize()`` and ``skip_synchronize()``.

    Args:
        model, optimizer: what is trained.
        system: the module with the calls: that of Horovod, or of BytePS, which has the same.

    Returns:
        The model, and the distributed optimizer.
    """
    system.init()
    world.before_leaving(system.shutdown)
    system.broadcast_parameters(model.state_dict(), root_rank=0)
    system.broadcast_optimizer_state(optimizer, root_rank=0)
    distributed = system.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    _Synchronizing(distributed)
    return model, distributed


class _Synchronizing:
    """Lets a distributed optimizer synchronize at the end of a backward that began an exchange, and not again at its step."""

    def __init__(self, optimizer: Any) -> None:
        # Weak, because tensors hold their hooks where Python's garbage collector does not see them.
        self._optimizer = weakref.ref(optimizer)
        # The callback that is to run at the end of the present backward. Autograd drops it where a backward raises.
        self._queued: weakref.ref[Any] | None = None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._arrived)
        optimizer.register_step_post_hook(_synchronizes_again)

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self._queued is None or self._queued() is None:
            callback = functools.partial(self._backward_ended)
            self._queued = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _backward_ended(self) -> None:
        self._queued = None
        optimizer = self._optimizer()
        # A gradient of which no pass is left was sent; with accumulation that happens in the last pass of a step.
        if optimizer is not None and any(one.came and one.left == 0 for one in optimizer._exchange.hooked):
            optimizer.synchronize()
            optimizer._should_synchronize = False


def _synchronizes_again(optimizer: Any, args: object, kwargs: object) -> None:
    optimizer._should_synchronize = True
