"""The process group of ranks on one node. Reading order: program, collectives, engine, endpoint, operations, calls."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .process_group import SharedMemoryGroup

__all__ = ["SharedMemoryGroup"]


def __getattr__(name: str) -> Any:
    """Import the group on first use: a program that only needs constants then loads no sockets."""
    if name in __all__:
        return getattr(importlib.import_module(".process_group", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
