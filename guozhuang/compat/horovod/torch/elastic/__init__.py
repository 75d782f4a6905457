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
    """Let a training function continue after ranks were lost or added::

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                ...
                state.commit()

        train(hvd.elastic.TorchState(model, optimizer, epoch=0))

    Before each call all ranks get the state of rank 0. When a collective fails because a rank was lost, the state is restored
    to the last ``commit``; when hosts were added or removed it is kept. Then this process gets a rank in the new world, and
    the function is called again. Under a launcher without an elastic driver (``guozhuang run``, torchrun) it is called once:
    an error is then raised to the caller, and the launcher restarts all processes.

    Args:
        func: a function whose first argument is the state.

    Returns:
        The function that does this, and returns what ``func`` returns. Every rank must call it, after ``hvd.init()``.

    Raises:
        RuntimeError: this worker was "removed from elastic job"; let the process end.
        HorovodInternalError: a collective failed, and the run has no elastic driver.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
