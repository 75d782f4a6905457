"""``init_process_group``, ``new_group``, ``from_torch_group``; objects and lists of tensors that are sent to all ranks."""

from __future__ import annotations

import datetime
import enum
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from guozhuang import world
from guozhuang.errors import UsageError, explain
from guozhuang.groups import AbortableGroup
from guozhuang.watch.processes import node_identity

from . import env
from .communicators import BaguaCommunicator, BaguaProcessGroup, CommMember

__all__ = [
    "BaguaCommunicator",
    "BaguaProcessGroup",
    "CommMember",
    "ReduceOp",
    "allreduce_coalesced_inplace",
    "broadcast_coalesced",
    "broadcast_object",
    "from_torch_group",
    "init_process_group",
    "is_initialized",
    "new_group",
]

_LIMIT_S = 1800.0
_TWICE = "trying to initialize the default process group twice!"


class ReduceOp(enum.IntEnum):
    """How an all-reduce combines tensors. AVG is SUM, divided by the number of ranks then."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


# The group of Bagua's of each group of PyTorch's.
_torch_to_bagua_pg_map: weakref.WeakKeyDictionary[dist.ProcessGroup, BaguaProcessGroup] = weakref.WeakKeyDictionary()
# How many groups ``new_group`` has made since the default group of the key was there.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def init_process_group(
    store: dist.Store | None = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1
) -> None:
    """Enter the world, as all ranks must. A default group of ``torch.distributed`` that is there already is used as it is.

    Args:
        store: where the ranks meet; None: the launcher's variables tell it. Each wait is limited to 30 minutes.
        rank: with a store, this process's rank. It and the sizes are then written to RANK, WORLD_SIZE, LOCAL_RANK (the rank
            modulo ``local_world_size``) and LOCAL_WORLD_SIZE.
        world_size: with a store, the number of ranks.
        local_world_size: with a store, the number of ranks of each node.

    Raises:
        AssertionError: with a store, one of the numbers is not given or cannot be.
        RuntimeError: called twice.
        WorldError: a rank did not come in time; the text names it.
    """
    if is_initialized():
        raise RuntimeError(_TWICE)
    if store is not None:
        assert world_size > 0, f"world_size must be a positive number with a store, not {world_size}"
        assert 0 <= rank < world_size, f"rank must be in [0, {world_size}) with a store, not {rank}"
        assert 0 < local_world_size <= world_size, (
            f"local_world_size must be in [1, {world_size}], not {local_world_size}"
        )
        values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % local_world_size}
        values["LOCAL_WORLD_SIZE"] = local_world_size
        os.environ.update({name: str(value) for name, value in values.items()})
    if not dist.is_initialized():
        if store is None:
            world.init(timeout_s=_LIMIT_S)
        else:
            limit = datetime.timedelta(seconds=_LIMIT_S)
            dist.init_process_group(_backend(), store=store, rank=rank, world_size=world_size, timeout=limit)
    default = dist.group.WORLD
    assert default is not None
    nodes: list[Any] = [None] * default.size()
    dist.all_gather_object(nodes, node_identity())
    held = AbortableGroup(default, range(default.size()))
    _torch_to_bagua_pg_map[default] = BaguaProcessGroup(held, range(default.size()), nodes, None, "0", default)


def place() -> tuple[int, int]:
    """Return rank and size of the default group of ``torch.distributed``; of the launcher's variables before it is there."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return env.get_rank(), env.get_world_size()


def is_initialized() -> bool:
    """Return whether ``init_process_group`` was called and the default group is still there."""
    default = dist.group.WORLD
    return default is not None and default in _torch_to_bagua_pg_map


def new_group(ranks: Sequence[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """Make a group of some ranks. Every rank must call it, also those that are no members, and in one order.

    Args:
        ranks: of the default group; None: all of them.
        stream: becomes an attribute; nothing runs on it.

    Raises:
        ValueError: a rank is out of range, or there twice.
        RuntimeError: ``init_process_group`` was not called.
    """
    everyone = _get_default_group()
    default = dist.group.WORLD
    assert default is not None
    members = list(everyone.ranks) if ranks is None else sorted(ranks)
    if not members or len(set(members)) < len(members) or not 0 <= members[0] <= members[-1] < default.size():
        what = f"ranks of a group are different numbers from 0 to {default.size() - 1}"
        raise UsageError(explain(what, value=members, fix="name each member once"))
    _counts[default] = _counts.get(default, 0) + 1
    held = AbortableGroup(default, members) if default.rank() in members else None
    made = BaguaProcessGroup(held, members, everyone._nodes, stream, str(_counts[default]))
    if held is not None:
        _torch_to_bagua_pg_map[held.group] = made
    return made


def from_torch_group(group: dist.ProcessGroup, stream: Any = None) -> BaguaProcessGroup:
    """Return the group of the same ranks as a group of ``torch.distributed``, which carries it. Its members call it.

    Raises:
        RuntimeError: ``init_process_group`` was not called.
    """
    everyone = _get_default_group()
    if group not in _torch_to_bagua_pg_map:
        ranks = dist.get_process_group_ranks(group)
        held, name = AbortableGroup(group, range(group.size())), group.group_name
        _torch_to_bagua_pg_map[group] = BaguaProcessGroup(held, ranks, everyone._nodes, stream, name, group)
    return _torch_to_bagua_pg_map[group]


def communicator(comm: Any) -> BaguaCommunicator | None:
    """Return the communicator that an argument ``comm`` means; None if this rank is no member.

    Raises:
        RuntimeError: the one of all ranks is meant, and ``init_process_group`` was not called.
        UsageError: it is something else.
    """
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if comm is None or comm is CommMember.WORLD:
        comm = _get_default_group().get_global_communicator()
    if not isinstance(comm, BaguaCommunicator):
        fix = "give new_group(...).get_global_communicator(), or None for all ranks"
        raise UsageError(explain("comm is a communicator", value=comm, fix=fix))
    return comm


def broadcast_object(obj: Any, src: int = 0, comm: Any = None) -> Any:
    """Return the object of one rank on every rank. All ranks of the communicator call it; others get ``obj`` back.

    Args:
        obj: on ``src`` an object that can be pickled; ignored on other ranks.
        src: a rank in the communicator.
        comm: the communicator; None: of all ranks.
    """
    here = communicator(comm)
    if here is None:
        return obj
    sent = [obj]
    dist.broadcast_object_list(sent, group_src=src, group=here.torch_group)
    return sent[0]


def broadcast_coalesced(tensors: Sequence[torch.Tensor], src: int = 0, comm: Any = None) -> None:
    """Overwrite tensors with those of one rank, in few messages. All ranks of the communicator call it.

    Args:
        tensors: of equal shapes and dtypes on all ranks.
        src: a rank in the communicator.
        comm: the communicator; None: of all ranks.
    """
    here = communicator(comm)
    for flat, some in _by_dtype(tensors) if here is not None else ():
        dist.broadcast(flat, group_src=src, group=here.torch_group)  # type: ignore[union-attr]
        _write_back(flat, some)


def allreduce_coalesced_inplace(tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    """Combine tensors over ranks, in place, in few messages. All ranks of the communicator call it.

    Args:
        tensors: of equal shapes and dtypes on all ranks.
        op: how they are combined.
        comm: the communicator; None: of all ranks.
    """
    here = communicator(comm)
    for flat, some in _by_dtype(tensors) if here is not None else ():
        dist.all_reduce(flat, op=of_torch(op), group=here.torch_group)  # type: ignore[union-attr]
        _write_back(divided(flat, op, here), some)  # type: ignore[arg-type]


def of_torch(op: ReduceOp) -> Any:
    """Return PyTorch's operation; AVG is summed, because not every backend averages, and :func:`divided` then."""
    op = ReduceOp(op)
    return dist.ReduceOp.SUM if op is ReduceOp.AVG else getattr(dist.ReduceOp, op.name)


def divided(total: torch.Tensor, op: ReduceOp, here: BaguaCommunicator) -> torch.Tensor:
    """Divide the sum for AVG by the number of ranks, in place; whole numbers are cut towards zero."""
    if op != ReduceOp.AVG:
        return total
    return total.div_(here.nranks(), rounding_mode=None if total.is_floating_point() else "trunc")


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    kinds = dict.fromkeys((t.dtype, t.device) for t in tensors)
    parts = [[t for t in tensors if (t.dtype, t.device) == kind] for kind in kinds]
    return [(torch.cat([t.detach().reshape(-1) for t in some]), some) for some in parts]


def _write_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view(t.shape))


class GroupPatch:
    """The methods that PyTorch's process groups get by importing ``bagua.torch_api``."""

    def bagua_patch(self, stream: Any = None) -> Any:
        """Let Bagua know this group, and return it. Its members call it."""
        from_torch_group(self, stream)  # type: ignore[arg-type]
        return self

    @property
    def bagua_pg(self) -> BaguaProcessGroup:
        """This group as a group of Bagua's.

        Raises:
            AssertionError: before ``bagua_patch``.
        """
        found = _torch_to_bagua_pg_map.get(self)  # type: ignore[call-overload]
        assert found is not None, explain("this group is not known to Bagua", fix="call group.bagua_patch() first")
        return found  # type: ignore[no-any-return]

    def bagua_get_global_communicator(self) -> Any:
        """Return the communicator of all members."""
        return self.bagua_pg.get_global_communicator()

    def bagua_get_inter_node_communicator(self) -> Any:
        """Return the communicator of one member of each node."""
        return self.bagua_pg.get_inter_node_communicator()

    def bagua_get_intra_node_communicator(self) -> Any:
        """Return the communicator of the members on this rank's node."""
        return self.bagua_pg.get_intra_node_communicator()


def add_to_groups() -> None:
    """Give PyTorch's process groups the methods of :class:`GroupPatch`. Repeated calls are harmless."""
    for name, value in vars(GroupPatch).items():
        if name.startswith("bagua_"):
            setattr(dist.ProcessGroup, name, value)


def _get_default_group() -> BaguaProcessGroup:
    default = dist.group.WORLD
    if default is None or default not in _torch_to_bagua_pg_map:
        raise RuntimeError(
            explain("the default process group is not initialized", fix="call init_process_group() first")
        )
    return _torch_to_bagua_pg_map[default]


def _rank_not_in_group(group: BaguaProcessGroup | None = None) -> bool:
    return group is not None and dist.get_rank() not in group.ranks


def _backend() -> str:
    """Return the backend for a store that was given: nccl also if there are devices, and "shm" for ranks of one node."""
    size, local_size = os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
    cpu = world.backend_of_cpu_ranks(["this node"] * int(size))[0] if size == local_size else "gloo"
    return f"cpu:{cpu},cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else cpu
