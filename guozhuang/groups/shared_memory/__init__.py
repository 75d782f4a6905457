"""The process group of ranks on one node. To read: program, collectives, engine, endpoint, operations, calls."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .process_group import SharedMemoryGroup

__all__ = ["SharedMemoryGroup"]


def __getattr__(name: str) -> Any:
    """Load the group when it is asked for: a program that only asks for constants needs no sockets."""
    if name in __all__:
        return getattr(importlib.import_module(".process_group", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
