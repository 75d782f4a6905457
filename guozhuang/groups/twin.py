"""A further group of the same ranks: what is sent in it cannot change places with what is sent in the first one."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist


def timeout_s(group: dist.ProcessGroup) -> float:
    """Return the time-out of the group's operations in seconds."""
    for name in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(name)).options
            return float(options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return float(dist.constants.default_pg_timeout.total_seconds())


def twin(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a group of the same ranks, with the same backend and time-out. Every rank of the group must call.

    It ends with ``torch.distributed.destroy_process_group()``, or when it is handed to that function.

    Args:
        group: made by ``torch.distributed`` or registered with it.
    """
    backend = dist.get_backend_config(group)
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=datetime.timedelta(seconds=timeout_s(group)),
        backend=backend,
        use_local_synchronization=group is not dist.group.WORLD,
    )
    return made
