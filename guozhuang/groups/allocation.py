"""Allocate tensors that a group will reduce: a group may offer memory that it reduces in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.groups.base import PythonGroup


def zeros_for(group: dist.ProcessGroup) -> Callable[[int, torch.dtype, torch.device], Tensor]:
    """Return a function that allocates flat tensors of zeros for this group: ``allocate(num_elements, dtype, device)``.

    CPU tensors are placed in the group's own memory if it has such memory (``group.empty``); all others come from PyTorch.
    Not collective: ranks may allocate different sizes at different times.
    """
    # Gloo's connections end with the last reference to its group, so one without such memory is not kept by what is returned.
    own = group if isinstance(group, PythonGroup) else None

    def allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # It is looked up each time, because it is another one after a change of the group's ranks.
        empty = getattr(own, "empty", None)
        if empty is None or device.type != "cpu" or num_elements == 0:
            return torch.zeros(num_elements, dtype=dtype, device=device)
        flat: Tensor = empty(num_elements, dtype)
        return flat.zero_()

    return allocate
