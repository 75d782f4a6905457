"""Guozhuang trains one PyTorch model on many processes; how it is spread is chosen outside the training script."""

from .data import DistributedSampler, loader
from .data_parallel import DataParallel
from .distributed import DistributedDataParallel
from .strategies import prepare
from .sync_batch_norm import SyncBatchNorm
from .world import World, init, shutdown

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "SyncBatchNorm",
    "World",
    "init",
    "loader",
    "prepare",
    "shutdown",
]
