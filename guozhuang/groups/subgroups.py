"""Make further process groups from the ranks of a group: from some of them, or from all of them again.

[Note: names of groups] The members of a new group find each other in the store under the group's name. If only the members
call it, PyTorch makes the name from their ranks and the number of groups that the process is in: members in different
numbers of groups wait under different names, and a name with its old addresses can recur after a group has ended. Here the
name has the parent group's name, the ranks, and how often they have made such a group; each rank counts in the store.

[Note: parts do not split] Where the default group is bound to a device, PyTorch makes the NCCL communicator of a new group by
splitting that of the default group, in which NCCL needs all of its ranks to take part. Ranks outside the new group do not
call this function, so a partial group connects on its own: in its first collective, as when no device is bound.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .agreement import store_of


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
    """Make a second group of the same ranks; its collectives need no common order with those of the first group.

    Equal to ``subgroup()`` with all ranks.
    """
    return subgroup(group, range(group.size()))


def subgroup(group: dist.ProcessGroup, members: Sequence[int]) -> dist.ProcessGroup:
    """Make a group of some ranks of a group, with its backend and time-out. Every member must call it, and no other rank.

    The new group ends with ``torch.distributed.destroy_process_group()``, without arguments or with this group.

    Args:
        group: a group made by ``torch.distributed`` or registered with it.
        members: ranks in ``group``, rising; this rank is one of them.
    """
    assert list(members) == sorted(set(members)) and group.rank() in members, f"rank {group.rank()}: {members}"
    everyone = dist.get_process_group_ranks(group)
    ranks = [everyone[member] for member in members]
    limit, backend = datetime.timedelta(seconds=timeout_s(group)), dist.get_backend_config(group)
    default = dist.group.WORLD
    assert default is not None, "there is no process group"
    if hasattr(default, "new_group"):  # a default group with this method makes its subgroups itself
        return _made(dist.new_group(ranks, limit, backend, use_local_synchronization=True))
    who = hashlib.sha256(" ".join(map(str, ranks)).encode()).hexdigest()[:16]
    number = store_of(group).add(f"guozhuang/subgroups/{who}/{group.rank()}", 1)
    splits = len(ranks) == default.size()  # whether NCCL may split. See [Note: parts do not split]
    # PyTorch's public new_group() does not let the caller choose the name; this is the private function that it calls.
    c10d = dist.distributed_c10d
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        list(members).index(group.rank()),
        ranks,
        dist.Backend(backend),
        store_of(default),
        c10d.GroupName(f"{group.group_name}.{who}.{number}"),
        timeout=limit,
        device_id=default.bound_device_id if splits else None,
    )
    found = _made(made)
    c10d._world.pg_group_ranks[found] = {rank: i for i, rank in enumerate(ranks)}
    if default.bound_device_id is not None and not splits:
        _connect_alone(found, default.bound_device_id)
    return found


def end_together(made: Sequence[dist.ProcessGroup], group: dist.ProcessGroup) -> None:
    """End groups made from ``group``'s ranks, after all of these ranks have called this. Every rank must call it.

    Args:
        made: the same on all ranks; no collective in them may be unfinished on this rank. Groups that
            ``torch.distributed`` does not know, such as ended ones, are skipped.
        group: their parent group; a barrier in it makes sure that all ranks have finished using them.
    """
    dist.barrier(group=group)
    for each in made:
        destroy(each)


def is_open(group: dist.ProcessGroup) -> bool:
    """Return whether ``torch.distributed`` knows a group: it was not destroyed. Not collective."""
    return group in dist.distributed_c10d._world.pg_map


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group, unless it was destroyed together with the default group. Not collective."""
    if is_open(group):
        dist.destroy_process_group(group)


def _connect_alone(made: dist.ProcessGroup, device: torch.device) -> None:
    """Prevent a group that has not connected yet from splitting the default group's NCCL communicator. Not collective."""
    for kind in made._device_types:
        backend: Any = made._get_backend(kind)
        while hasattr(backend, "wrapped_pg"):  # such wrappers exist with TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend = backend.wrapped_pg
        options: Any = getattr(backend, "options", None)
        if getattr(options, "split_from", None) is not None:
            options.split_from = None
    made.bound_device_id = device  # a barrier needs this; set only now, it opens no connection


def _made(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "this rank is no member of its own group"
    return group
