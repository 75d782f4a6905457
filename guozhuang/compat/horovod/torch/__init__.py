"""Horovod's interface for PyTorch: ``import horovod.torch as hvd``.

Each process drives one device and calls ``hvd.init()``; ``hvd.DistributedOptimizer`` averages gradients. Collectives are
matched between ranks by name, see ``guozhuang.gradients.named``.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import mpi_ops
from .compression import Compression
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .mpi_ops import *  # noqa: F403
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",  # noqa: F405 - see __getattr__
    "mpi_ops",
]
__all__ += mpi_ops.__all__


def __getattr__(name: str) -> Any:
    """Import the submodule ``elastic``, which few scripts need, at its first use."""
    if name == "elastic":
        return importlib.import_module(".elastic", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
