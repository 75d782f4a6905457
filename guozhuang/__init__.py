"""Guozhuang trains one PyTorch model on many processes; how it is spread is chosen outside the training script."""

import importlib
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
    from .script.rank_zero import print as print
    from .script.rank_zero import rank_zero
    from .script.reduce import reduce
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
    "rank_zero",
    "reduce",
    "shutdown",
]  # without "print", so that `from guozhuang import *` leaves Python's alone

# Where names are defined whose modules are imported at their first use only.
_LATER = {
    "clip_grad_norm_": "sharding",
    "print": "script.rank_zero",
    "rank_zero": "script.rank_zero",
    "reduce": "script.reduce",
}

_register()  # makes the backend name "shm" known to torch; starts nothing
for _after, _fields in _strategies_of_others:
    _register_strategy(_Strategy(**_fields), _after)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = found
    return found
