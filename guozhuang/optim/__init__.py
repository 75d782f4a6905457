"""Optimizers and schedulers: ``LARS`` and ``LAMB`` for large batches, ``QAdam``, which takes part in the exchange."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lamb import LAMB
    from .lars import LARS
    from .qadam import QAdam
    from .scaled_warmup import ScaledWarmupLR

__all__ = ["LAMB", "LARS", "QAdam", "ScaledWarmupLR"]

_MODULES = {"LAMB": "lamb", "LARS": "lars", "QAdam": "qadam", "ScaledWarmupLR": "scaled_warmup"}


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported at the first use
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
