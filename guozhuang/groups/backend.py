"""The backend name "shm" for torch.distributed: what kind of group it becomes is found out when a group is made.

All ranks on one node: shared memory. Several nodes: hierarchical. No Linux, or a rank without the C part: gloo, and the
log says so. Importing this module loads nothing but torch.distributed; registering starts nothing.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch.distributed as dist

from guozhuang.watch.processes import Process, this_process

_LOG = logging.getLogger("guozhuang")
_TOPIC = "identity"  # of the cards that ranks leave when a group is made


def register() -> None:
    """Make "shm" known to ``torch.distributed.init_process_group`` and ``new_group``. Again does nothing."""
    if dist.is_available() and "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])


def _create(told: Any, options: Any) -> Any:
    """Make this rank's end of a group; ``torch.distributed`` calls it on every rank of the group."""
    from guozhuang.errors import UsageError, explain

    store, rank, size, timeout = told.store, told.group_rank, told.group_size, told.timeout
    if options is not None:
        raise UsageError(explain('the "shm" backend takes no options', value=options, fix="leave pg_options out"))
    if sys.platform != "linux":
        if rank == 0:
            _LOG.warning('"shm" needs Linux (this is %s): its groups are gloo groups here', sys.platform)
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    from guozhuang.groups import roll_call

    try:
        return _create_on_linux(told)
    except BaseException as error:  # peers that wait for this rank raise at once
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

    def ended(peer: int) -> int | None:
        return _ended(told.global_ranks_in_group[peer], node) if told.global_ranks_in_group else None

    cards = roll_call.call(store, _TOPIC, rank, size, str(mine), timeout.total_seconds(), ended)
    lacking = [peer for peer in range(size) if store.get(f"engine/{peer}") != b"built"]
    if lacking:
        if rank == 0:
            text = '"shm" needs its C part, which was not built for ranks %s: its groups are gloo groups here'
            _LOG.warning(text + " (install a C compiler and reinstall guozhuang)", lacking)
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    identities = [Process.read(card).node for card in cards]
    if len(set(identities)) == 1:
        from guozhuang.groups.shared_memory import SharedMemoryGroup

        return SharedMemoryGroup(store, rank, size, timeout, _num_neighbours(size))
    from guozhuang.groups.hierarchical import HierarchicalGroup

    return HierarchicalGroup(store, rank, size, timeout, identities)


def _ended(global_rank: int, node: str) -> int | None:
    """The pid of a rank that has left a card when the default group was made, if it has ended since then."""
    from guozhuang.groups import roll_call

    default = dist.group.WORLD
    if default is None or default.name() != "shm":
        return None
    process = roll_call.process_of(default.get_group_store(), _TOPIC, global_rank)
    return process.pid if process is not None and process.has_ended(node) else None


def _num_neighbours(size: int) -> int:
    """How many ranks the job has on this node, as far as the default group tells."""
    default = dist.group.WORLD
    return max(size, default.size()) if default is not None and default.name() == "shm" else size
