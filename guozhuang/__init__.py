"""Guozhuang trains one PyTorch model on many processes; how it is spread is chosen outside the training script."""

from typing import TYPE_CHECKING, Any

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
from .strategies import prepare
from .strategies import register as _register_strategy
from .sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from .sharding import clip_grad_norm_

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "PeerLost",
    "SyncBatchNorm",
    "World",
    "clip_grad_norm_",
    "init",
    "loader",
    "prepare",
    "shutdown",
]

_register()  # makes the backend name "shm" known to torch; starts nothing
for _after, _fields in _strategies_of_others:
    _register_strategy(_Strategy(**_fields), _after)


def __getattr__(name: str) -> Any:
    if name == "clip_grad_norm_":  # the sharded optimizer is imported at its first use only
        from .sharding import clip_grad_norm_

        globals()[name] = clip_grad_norm_
        return clip_grad_norm_
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
