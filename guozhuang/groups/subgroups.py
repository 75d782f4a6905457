"""Further groups of ranks of a group: a part of them, or all of them once more.

[Note: names of groups] Members of a new group find each other in the store under the group's name. PyTorch names a group that
its members make alone after its ranks and the number of groups that the process is in: members in different numbers of groups
wait for each other under different names, and after a group has ended its name, with the addresses under it, is found again.
Here the name is that of the group it comes from, its ranks, and how often they made one before; each rank counts in the store.

[Note: parts do not split] Where the default group is bound to a device, PyTorch makes the NCCL communicator of a new group by
splitting that of the default group, for which NCCL needs all ranks of the latter. Those outside the new group do not come here
and know nothing of it, so a part of the default group connects by itself: in its first collective, as with no device bound.
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
    """Make a group of the same ranks: what is sent in it cannot change places with what is sent in the first one.

    As ``subgroup()`` of all ranks.
    """
    return subgroup(group, range(group.size()))


def subgroup(group: dist.ProcessGroup, members: Sequence[int]) -> dist.ProcessGroup:
    """Make a group of some ranks of a group, with its backend and time-out. Every member must call, and nobody else.

    It ends with ``torch.distributed.destroy_process_group()``, or when it is handed to that function.

    Args:
        group: made by ``torch.distributed`` or registered with it.
        members: ranks in ``group``, rising; this rank is one of them.
    """
    assert list(members) == sorted(set(members)) and group.rank() in members, f"rank {group.rank()}: {members}"
    everyone = dist.get_process_group_ranks(group)
    ranks = [everyone[member] for member in members]
    limit, backend = datetime.timedelta(seconds=timeout_s(group)), dist.get_backend_config(group)
    default = dist.group.WORLD
    assert default is not None, "there is no process group"
    if hasattr(default, "new_group"):  # a default group of a kind that makes all others
        return _made(dist.new_group(ranks, limit, backend, use_local_synchronization=True))
    who = hashlib.sha256(" ".join(map(str, ranks)).encode()).hexdigest()[:16]
    number = store_of(group).add(f"guozhuang/subgroups/{who}/{group.rank()}", 1)
    splits = len(ranks) == default.size()  # [Note: parts do not split]
    # PyTorch's public new_group() lets nobody choose the name; this is what it calls.
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
    """End groups that were made of ``group``'s ranks, after all of them have come here. Every rank must call.

    Args:
        made: the same on all ranks; nothing that was sent in them may be under way on this rank. Others than
            ``torch.distributed`` knows, ended ones for example, are passed over.
        group: what they were made from; a barrier in it tells that all ranks are done with them.
    """
    dist.barrier(group=group)
    for each in made:
        if each in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(each)


def _connect_alone(made: dist.ProcessGroup, device: torch.device) -> None:
    """Keep a group that has not connected yet from splitting the default group's communicator. Not collective."""
    for kind in made._device_types:
        backend: Any = made._get_backend(kind)
        while hasattr(backend, "wrapped_pg"):  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend = backend.wrapped_pg
        options: Any = getattr(backend, "options", None)
        if getattr(options, "split_from", None) is not None:
            options.split_from = None
    made.bound_device_id = device  # now it connects nothing; a barrier takes it


def _made(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "this rank is no member of its own group"
    return group
