"""Several process groups of the same ranks used in turn, so that more than one collective runs at a time.

One group runs one collective after the other: gloo's ring waits for its slowest pair before it starts the next bucket. With
k groups, k buckets travel at once over separate connections. PyTorch had such a group and removed it.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from guozhuang.errors import UsageError, explain
from guozhuang.groups.forwarding import ForwardingGroup
from guozhuang.groups.serial import CallWork

#: The name that ``torch.distributed.get_backend`` returns for such a group.
NAME = "round_robin"


def over(num_groups: int, timeout_s: float) -> dist.ProcessGroup:
    """Make a round-robin group of all ranks, with the backend of the default group. Every rank must call it.

    The group and its ``num_groups`` inner groups end with ``torch.distributed.destroy_process_group()``.

    Args:
        num_groups: the number of inner groups, at least 1.
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
    """Make a round-robin group; ``torch.distributed`` calls this function, and so registers the group as its own."""
    return RoundRobinGroup(groups)


class RoundRobinGroup(ForwardingGroup):
    """A group that passes each collective to the next of several inner groups, and returns the inner group's work.

    Ranks call collectives in the same order (every process group demands this), so the i-th collective goes to the same inner
    group on all ranks; a call that raises for its arguments takes no turn. Works of different groups may end in any order;
    wait for each. A barrier runs in every inner group. Calls that only some ranks make (send, recv) use the first inner group.
    Barriers, sends and receives do not change whose turn it is.

    ``empty`` is the first inner group's, if it has one: such a tensor is reduced in place when it is that group's turn, and
    through staging memory in the other groups.

    Args:
        groups: the inner groups, of the same ranks in the same order; nothing else may use them.

    Raises:
        UsageError: no inner group, or inner groups of different ranks.
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

    @override
    def _target(self) -> Any:
        return self.groups[0]

    @override
    def _forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        work = getattr(self.groups[self._turn], method)(*args, **kwargs)
        # Advance only after the call: if the call raises on one rank only, that rank must not use another group than the rest.
        self._turn = (self._turn + 1) % len(self.groups)
        return work

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        """Wait for all ranks in every inner group, so that earlier collectives have ended; the turn stays at the same group."""
        return _EveryWork([group.barrier(*args, **kwargs) for group in self.groups])

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the time-out of collectives in every inner group."""
        for group in self.groups:
            group.set_timeout(timeout)

    def abort(self) -> None:
        """Abort every inner group."""
        for group in self.groups:
            group.abort()

    def shutdown(self) -> None:
        """Shut down every inner group."""
        for group in self.groups:
            group.shutdown()


class _EveryWork(CallWork):
    """The work of a barrier in every inner group; a barrier has no result, so its future holds an empty list."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for all inner works, ``timeout`` for each; raise the first error."""
        for work in self._works:
            work.wait(timeout)
        return True

    @override
    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    @override
    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    @override
    def get_future(self) -> Future[list[Tensor]]:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(_nothing)


def _nothing(all_of_them: Future[list[Future[Any]]]) -> list[Tensor]:
    for each in all_of_them.value():
        each.value()
    return []
