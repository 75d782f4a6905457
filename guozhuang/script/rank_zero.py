"""What one rank does for all: ``rank_zero`` tells which one, ``print`` writes on it alone."""

from __future__ import annotations

import builtins
from typing import Any

import torch.distributed as dist

from ..world import current
from ..world.discovery import discover


def rank_zero() -> bool:
    """Tell whether this process is the one that writes for all: rank 0, or the only one. Nothing is communicated.

    Before ``init()`` the launcher's variables decide. What is guarded by this runs on one rank, so nothing in which all ranks
    take part may stand there: no ``reduce``, no ``state_dict()`` of a divided model, no forward of one.
    """
    world = current()
    if world is not None:
        return world.rank == 0
    return dist.get_rank() == 0 if dist.is_available() and dist.is_initialized() else discover().rank == 0


def print(*values: Any, **options: Any) -> None:
    """Print on rank 0 alone, at once (``flush=True``); otherwise Python's ``print``. Ranks need not call it together."""
    if rank_zero():
        builtins.print(*values, **{"flush": True, **options})
