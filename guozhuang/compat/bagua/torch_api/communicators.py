"""Communicators, and the groups of ranks that have them; ``communication`` offers both to scripts.

A communicator is a ``torch.distributed`` group of its own, or the sentinel of a rank that is no member, with which every call
returns at once. Which ranks share a node is found by comparing the nodes' identities, not from NODE_RANK.
"""

from __future__ import annotations

import datetime
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from guozhuang import world
from guozhuang.errors import UsageError, explain
from guozhuang.groups import AbortableGroup, subgroups
from guozhuang.watch.processes import node_identity

from . import env

_LIMIT_S = 1800.0
_TWICE = "trying to initialize the default process group twice!"
# The collectives of ``bagua.torch_api`` by their names, which a communicator has as methods.
VERBS: dict[str, Callable[..., None]] = {}
# The group of Bagua's of each group of PyTorch's.
_torch_to_bagua_pg_map: weakref.WeakKeyDictionary[dist.ProcessGroup, BaguaProcessGroup] = weakref.WeakKeyDictionary()
# How many groups ``new_group`` has made since the default group of the key was there.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class CommMember:
    """Values of an argument ``comm`` that are no communicators.

    Attributes:
        WORLD: the communicator of all ranks.
        NON_COMM_MEMBER: what a rank gets that is no member of a communicator; every collective returns at once with it.
    """

    WORLD = object()
    NON_COMM_MEMBER = object()


class BaguaCommunicator:
    """The ranks that call a collective together. It has all verbs of ``bagua.torch_api`` as methods, without ``comm``.

    Args:
        held: the group that carries it, which :meth:`abort` ends.
        stream: the stream that was given for its group.
    """

    def __init__(self, held: AbortableGroup, stream: Any = None) -> None:
        self._held, self._stream = held, stream

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a verb of ``bagua.torch_api`` that is called in this communicator."""
        if name not in VERBS:
            raise AttributeError(f"a communicator has no attribute {name}")
        return functools.partial(VERBS[name], comm=self)

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """The group of ``torch.distributed`` that carries it, of its own."""
        found: dist.ProcessGroup = self._held.group
        return found

    def rank(self) -> int:
        """Return the rank of this process in this communicator."""
        return self.torch_group.rank()

    def nranks(self) -> int:
        """Return the number of ranks."""
        return self.torch_group.size()

    def device_id(self) -> int:
        """Return the number of the device that this rank drives, which is its local rank."""
        return env.get_local_rank()

    @property
    def cuda_stream(self) -> int:
        """The address of the CUDA stream that was given for the group; 0 if none was. Nothing runs on it."""
        return int(getattr(self._stream, "cuda_stream", 0))

    def abort(self) -> None:
        """End this communicator on all ranks; any thread may call it. What waits in it returns, and later calls do at once.

        So does what waits on another rank for this one, or for one that has learned of it by such a wait. Their tensors hold
        anything then; :meth:`check_abort` tells it. A rank that did not call ``abort`` itself is warned.
        """
        self._held.abort()

    def check_abort(self) -> bool:
        """Return whether this communicator was aborted, as far as this rank knows."""
        return bool(self._held.aborted_by)

    def ended_by_abort(self) -> bool:
        """Return whether a collective of it that has failed did so because a rank aborted it. Not collective."""
        knew = self.check_abort()
        if not self._held.look():
            return False
        if not knew:
            what = f"{self._held.aborted_by} aborted a communicator in which this rank waited"
            warnings.warn(explain(what, fix="call check_abort() before the result is used"), stacklevel=3)
        return True


class BaguaProcessGroup:
    """Some ranks, with communicators of all of them, of those of this rank's node, and of one rank of each node.

    Attributes:
        ranks: ranks in the default group, rising.
        stream: the stream that was given; nothing runs on it.
        group_name: "1", "2" and so on for those of ``new_group``; "0" for the default group.
    """

    def __init__(
        self,
        held: AbortableGroup | None,
        ranks: Sequence[int],
        nodes: Sequence[str],
        stream: Any,
        name: str,
        torch_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.ranks, self.stream, self.group_name = sorted(ranks), stream, name
        self._nodes = list(nodes)  # of each rank of the default group
        self._made: dict[tuple[int, ...], BaguaCommunicator] = {}
        if held is not None:
            self._made[tuple(self.ranks)] = BaguaCommunicator(held, stream)
            self._group = weakref.ref(torch_group or held.group)

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """The group of ``torch.distributed`` of these ranks.

        Raises:
            UsageError: it was destroyed, or this rank is no member.
        """
        here = dist.get_rank()
        if here not in self.ranks:
            what = "this rank is no member of the process group"
            raise UsageError(explain(what, value=self.ranks, rank=here, fix="call this on its members only"))
        found = self._group()
        if found is None or not subgroups.is_open(found):
            fix = "make a new one after init_process_group"
            raise UsageError(explain("the process group was destroyed", value=self.ranks, fix=fix))
        return found

    def get_global_communicator(self) -> Any:
        """Return the communicator of all members; the sentinel on a rank that is none."""
        return self._of(self.ranks)

    def get_intra_node_communicator(self) -> Any:
        """Return the communicator of the members on this rank's node. Each of them must call it at its first use."""
        here = self._nodes[dist.get_rank()]
        return self._of([rank for rank in self.ranks if self._nodes[rank] == here])

    def get_inter_node_communicator(self) -> Any:
        """Return the communicator of the members with the first member's local rank. Each must call it at its first use."""
        first = self._local_rank(self.ranks[0])
        return self._of([rank for rank in self.ranks if self._local_rank(rank) == first])

    def _local_rank(self, rank: int) -> int:
        return self._nodes[:rank].count(self._nodes[rank])

    def _of(self, ranks: Sequence[int]) -> Any:
        if dist.get_rank() not in ranks or dist.get_rank() not in self.ranks:
            return CommMember.NON_COMM_MEMBER
        whole = self.torch_group
        key = tuple(ranks)
        if key not in self._made:
            held = AbortableGroup(whole, [self.ranks.index(rank) for rank in ranks])
            self._made[key] = BaguaCommunicator(held, self.stream)
        return self._made[key]


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
        UsageError: without a store, a number is not that of the launcher.
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
    numbers = ("rank", rank), ("world_size", world_size), ("local_world_size", local_world_size)
    for (name, number), found in zip(numbers, (*place(), env.get_local_size()), strict=True):
        if store is None and number not in (-1, found):
            fix = "leave it out, or give a store too"
            raise UsageError(explain(f"the launcher's {name} is {found}", value=number, fix=fix))
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
