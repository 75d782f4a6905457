"""Communicators, and the groups of ranks that have them.

A communicator is a ``torch.distributed`` group of its own, or the sentinel of a rank that is no member, with which every call
returns at once. Which ranks share a node is found by comparing the nodes' identities, not from NODE_RANK.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from guozhuang.errors import UsageError, explain
from guozhuang.groups import AbortableGroup, subgroups

from . import env

# The collectives of ``bagua.torch_api`` by their names, which a communicator has as methods.
VERBS: dict[str, Callable[..., None]] = {}


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

        Their tensors hold anything then; :meth:`check_abort` tells it. A rank that did not call ``abort`` itself is warned.
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
