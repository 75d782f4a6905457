"""Several process groups of the same ranks that take collectives in turn, so that more than one is under way at a time.

A group does one thing after the other: gloo's ring waits for its slowest pair before the next bucket moves. With k groups,
k buckets move at once over connections of their own. PyTorch had such a group and dropped it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from guozhuang.errors import UsageError, explain
from guozhuang.groups.base import PythonGroup
from guozhuang.world import versions

#: The name that ``torch.distributed.get_backend`` tells for such a group.
NAME = "round_robin"


def over(num_groups: int, timeout_s: float) -> dist.ProcessGroup:
    """Make a round-robin group of all ranks, with the backend of the default group. Every rank must call.

    The group, and the ``num_groups`` groups under it, end with ``torch.distributed.destroy_process_group()``.

    Args:
        num_groups: how many groups take turns, at least 1.
        timeout_s: the limit of each collective, in seconds.

    Raises:
        UsageError: fewer than one group.
    """
    if num_groups < 1:
        raise UsageError(
            explain("a round-robin group needs at least one group", value=num_groups, fix="give 1 or more")
        )
    limit = datetime.timedelta(seconds=timeout_s)
    groups = [dist.new_group(timeout=limit) for _ in range(num_groups)]
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    made: dist.ProcessGroup = dist.new_group(timeout=limit, backend=NAME, pg_options=groups)
    return made


def _create(told: Any, groups: Any) -> dist.ProcessGroup:
    """What ``torch.distributed`` calls to make the group, so that all of its functions know it."""
    return RoundRobinGroup(groups)


def _in_turn(name: str) -> Callable[..., Any]:
    known = versions.name_of(name)  # the groups in turn are PyTorch's own

    def collective(self: RoundRobinGroup, *args: Any, **kwargs: Any) -> Any:
        work = getattr(self.groups[self._turn], known)(*args, **kwargs)
        # Only now: a call that is refused on one rank alone, for its arguments, must not shift that rank's turn.
        self._turn = (self._turn + 1) % len(self.groups)
        return work

    collective.__name__ = name
    collective.__doc__ = f"Hand ``{name}`` to the group whose turn it is, and return its work."
    return collective


def _by_the_first(name: str) -> Callable[..., Any]:
    def operation(self: RoundRobinGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.groups[0], name)(*args, **kwargs)

    operation.__name__ = name
    operation.__doc__ = f"Hand ``{name}``, which not every rank calls, to the first group."
    return operation


class RoundRobinGroup(PythonGroup):
    """A group that hands each collective to the next of several groups, and returns the work that that one returns.

    Ranks call collectives in the same order (as every process group demands), so the i-th collective goes to the same group
    on all of them; one that raises when it is called, for its arguments, takes no turn. Works of different groups may end in
    any order; wait for each. A barrier is one in every group. What only some ranks call, send and recv, goes through the
    first group. Neither turns anything.

    ``empty`` comes from the first group, where it has such memory: a tensor there is reduced in place when the turn is on
    that group, and through the staging memory of the others.

    Args:
        groups: the groups, of the same ranks in the same order, each used by nothing else.

    Raises:
        UsageError: no group, or groups of different ranks.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        if not groups or len({(group.rank(), group.size()) for group in groups}) > 1:
            places = [(group.rank(), group.size()) for group in groups]
            fix = "give at least one group, all made of the same ranks"
            raise UsageError(explain("a round-robin group needs groups of the same ranks", value=places, fix=fix))
        super().__init__(groups[0].rank(), groups[0].size(), NAME)
        self.groups = tuple(groups)
        self._turn = 0
        if hasattr(groups[0], "empty"):
            self.empty = groups[0].empty

    allreduce = _in_turn("allreduce")
    allreduce_coalesced = _in_turn("allreduce_coalesced")
    broadcast = _in_turn("broadcast")
    reduce = _in_turn("reduce")
    allgather = _in_turn("allgather")
    allgather_coalesced = _in_turn("allgather_coalesced")
    all_gather_single = _in_turn("all_gather_single")
    all_gather_single_coalesced = _in_turn("all_gather_single_coalesced")
    reduce_scatter = _in_turn("reduce_scatter")
    reduce_scatter_single = _in_turn("reduce_scatter_single")
    reduce_scatter_single_coalesced = _in_turn("reduce_scatter_single_coalesced")
    alltoall = _in_turn("alltoall")
    all_to_all_single = _in_turn("all_to_all_single")
    gather = _in_turn("gather")
    scatter = _in_turn("scatter")
    monitored_barrier = _in_turn("monitored_barrier")

    send = _by_the_first("send")
    recv = _by_the_first("recv")
    recv_anysource = _by_the_first("recv_anysource")
    _get_backend = _by_the_first("_get_backend")

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Wait for all ranks in every group, so that what was begun before it in any of them has its end; turns nothing."""
        return _EveryWork([group.barrier(*args, **kwargs) for group in self.groups])

    @property
    def _device_types(self) -> list[torch.device]:
        """The types of device whose tensors the groups take: what object collectives ask for."""
        return list(self.groups[0]._device_types)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the limit of each collective of every group."""
        for group in self.groups:
            group.set_timeout(timeout)

    def abort(self) -> None:
        """Abort every group."""
        for group in self.groups:
            group.abort()

    def shutdown(self) -> None:
        """Shut every group down."""
        for group in self.groups:
            group.shutdown()


class _EveryWork(dist._Work):
    """The work of a call that every group got."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for all of them, ``timeout`` for each; raises what one of them raises."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """What the first that failed raised."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Nothing: no tensor holds a result."""
        self.wait()
        return []

    def get_future(self) -> Future[list[Tensor]]:
        """A future that ends when all have ended; it raises what one of them raised."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(_nothing)


def _nothing(all_of_them: Future[list[Future[Any]]]) -> list[Tensor]:
    for each in all_of_them.value():
        each.value()
    return []
