"""Loaded by `import guozhuang`: its public names, the backend "shm" in torch, and strategies for other systems' scripts."""

# The world is imported first: it raises if PyTorch is too old, or was built without torch.distributed.
from .world import World, init, shutdown

# isort: split
from .compat import STRATEGIES as _strategies_of_others
from .data import DistributedSampler, loader
from .data_parallel import DataParallel
from .distributed import DistributedDataParallel
from .errors import PeerLost
from .groups.backend import register as _register
from .strategies import Strategy as _Strategy
from .strategies import prepare, unwrap
from .strategies import register as _register_strategy
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "PeerLost",
    "SyncBatchNorm",
    "World",
    "init",
    "loader",
    "prepare",
    "shutdown",
    "unwrap",
]

_register()  # makes the backend name "shm" known to torch; starts nothing
for _after, _fields in _strategies_of_others:
    _register_strategy(_Strategy(**_fields), _after)
