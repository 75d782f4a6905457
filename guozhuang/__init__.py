"""Guozhuang trains one PyTorch model on many processes; how it is spread is chosen outside the training script."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import TrainingState, epochs, keep, restore, save
    from .comparison import compare
    from .errors import RankFailed
    from .launch.functions import launch
    from .parallel.guard import full_tensor
    from .public import (
        DataParallel,
        DistributedDataParallel,
        DistributedSampler,
        PeerLost,
        SyncBatchNorm,
        World,
        init,
        loader,
        prepare,
        shutdown,
        unwrap,
    )
    from .script.accumulate import accumulate
    from .script.gather import all_gather
    from .script.global_mean import global_mean
    from .script.rank_zero import print as print
    from .script.rank_zero import rank_zero
    from .script.reduce import reduce
    from .script.tracking import Tracker
    from .sharding import clip_grad_norm_
    from .sharding.averaged import averaged_gradients

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "PeerLost",
    "RankFailed",
    "SyncBatchNorm",
    "Tracker",
    "TrainingState",
    "World",
    "accumulate",
    "all_gather",
    "averaged_gradients",
    "clip_grad_norm_",
    "compare",
    "epochs",
    "full_tensor",
    "global_mean",
    "init",
    "keep",
    "launch",
    "loader",
    "prepare",
    "rank_zero",
    "reduce",
    "restore",
    "save",
    "shutdown",
    "unwrap",
]  # without "print", so that `from guozhuang import *` leaves Python's alone

# Where names are defined whose modules are imported at their first use only.
_LATER = {
    "RankFailed": "errors",
    "Tracker": "script.tracking",
    "TrainingState": "checkpoint",
    "accumulate": "script.accumulate",
    "all_gather": "script.gather",
    "averaged_gradients": "sharding.averaged",
    "clip_grad_norm_": "sharding",
    "compare": "comparison",
    "epochs": "checkpoint",
    "full_tensor": "parallel.guard",
    "global_mean": "script.global_mean",
    "keep": "checkpoint",
    "launch": "launch",
    "print": "script.rank_zero",
    "rank_zero": "script.rank_zero",
    "reduce": "script.reduce",
    "restore": "checkpoint",
    "save": "checkpoint",
}


def _is_the_command() -> bool:
    """Return whether this process is the command ``guozhuang``, which imports torch only when it has understood its words."""
    name: str = os.path.basename(getattr(sys, "argv", [""])[0])
    if name == "-m":  # Python looks for the module of ``python -m MODULE``
        words: list[str] = sys.orig_argv
        return "-m" in words and words[words.index("-m") + 1 :][:1] == ["guozhuang"]
    return name == "guozhuang"


def __getattr__(name: str) -> Any:
    if name not in _LATER and name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_LATER.get(name, 'public')}"), name)
    globals()[name] = found
    return found


if not _is_the_command():
    from .public import *  # noqa: F403
