"""Elastic training with PyTorch: ``hvd.elastic.run``, ``TorchState``, ``ElasticSampler``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guozhuang.compat.horovod.common.elastic import run_fn

from ..mpi_ops import init, shutdown
from .sampler import ElasticSampler
from .state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Let a training function go on after ranks were lost or came::

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                ...
                state.commit()

        train(hvd.elastic.TorchState(model, optimizer, epoch=0))

    Before each call the state is that of rank 0 on all ranks. When a collective fails because a rank was lost, the state goes
    back to the last ``commit``, when hosts came or went it stays as it is; then this process gets a rank in the new world, and
    the function is called again. Under a launcher without an elastic driver (``guozhuang run``, torchrun) it is called once:
    a failure then leaves it, and the launcher starts all processes anew.

    Args:
        func: takes the state first.

    Returns:
        The function that does this, and returns what ``func`` returns. Every rank must call it, after ``hvd.init()``.

    Raises:
        RuntimeError: this worker was "removed from elastic job"; let the process end.
        HorovodInternalError: a collective failed, and there is no driver.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
