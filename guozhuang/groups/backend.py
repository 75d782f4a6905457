"""Register the backend name "shm" with torch.distributed; the kind of group is chosen when a group is made.

If all ranks are on one node: shared memory. On several nodes: hierarchical. Without Linux, or where a rank lacks the C
part: gloo, with a warning in the log. Importing this module loads only torch.distributed; registering starts nothing.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch.distributed as dist

from guozhuang.watch.processes import Process, this_process
from guozhuang.world import versions

_LOG = logging.getLogger("guozhuang")
_TOPIC = "identity"  # prefix of the store keys under which ranks write their process and node when a group is made


def register() -> None:
    """Make "shm" known to ``torch.distributed.init_process_group`` and ``new_group``. Later calls do nothing."""
    if dist.is_available() and "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", create, extended_api=True, devices=["cpu"])


def create(told: Any, options: Any) -> Any:
    """Make this rank's process group object; ``torch.distributed`` calls this function on every rank of the group."""
    from guozhuang.errors import UsageError, explain

    store, rank, size, timeout = told.store, told.group_rank, told.group_size, told.timeout
    if options is not None:
        raise UsageError(explain('the "shm" backend takes no options', value=options, fix="leave pg_options out"))
    if sys.platform != "linux":
        if rank == 0:
            _LOG.warning('"shm" needs Linux (this is %s): its groups are gloo groups here', sys.platform)
        more = {"enable_reconfigure": True} if versions.field(told, "enable_reconfigure") else {}
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout, **more)
    from guozhuang.groups import roll_call

    if versions.field(told, "enable_reconfigure"):
        from guozhuang.groups.reconfigurable import ReconfigurableGroup

        return ReconfigurableGroup(store, rank, size, timeout)
    try:
        return _create_on_linux(told)
    except BaseException as error:  # the error is reported, so that peers waiting for this rank raise at once
        roll_call.tell_failed(store, _TOPIC, rank, error)
        raise


def _create_on_linux(told: Any) -> Any:
    from guozhuang.groups import roll_call
    from guozhuang.groups.shared_memory.engine import native_built
    from guozhuang.groups.shared_memory.rendezvous import identity

    store, rank, size, timeout = told.store, told.group_rank, told.group_size, told.timeout
    node = identity()
    store.set(f"engine/{rank}", "built" if native_built() else "")
    mine = this_process(node)
    # A rank has ended if its process has ended since the default group was made.
    default, ranks = dist.group.WORLD, told.global_ranks_in_group
    earlier = None
    if default is not None and default.name() == "shm" and ranks:
        earlier = roll_call.EarlierProcesses(default.get_group_store(), _TOPIC)

    def ended(peer: int) -> int | None:
        return earlier.ended(ranks[peer], node) if earlier is not None else None

    members = ranks or range(size)
    cards = roll_call.call(store, _TOPIC, rank, size, str(mine), timeout.total_seconds(), ended, members=members)
    lacking = [peer for peer in range(size) if store.get(f"engine/{peer}") != b"built"]
    if lacking:
        if rank == 0:
            text = '"shm" needs its C part, which was not built for ranks %s: its groups are gloo groups here'
            _LOG.warning(text + " (install a C compiler and reinstall guozhuang)", lacking)
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    processes = [Process.read(card) for card in cards]
    if len({each.node for each in processes}) == 1:
        from guozhuang.groups.shared_memory import SharedMemoryGroup

        return SharedMemoryGroup(store, rank, size, timeout, _num_neighbours(size), processes)
    from guozhuang.groups.hierarchical import HierarchicalGroup

    return HierarchicalGroup(store, rank, size, timeout, processes)


def _num_neighbours(size: int) -> int:
    """Return the number of ranks of the job on this node: the default group's size if that is an "shm" group, else ``size``."""
    default = dist.group.WORLD
    return max(size, default.size()) if default is not None and default.name() == "shm" else size
