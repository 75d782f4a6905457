"""The Horovod world of this process, from ``hvd.init()`` to ``hvd.shutdown()``, and the place of each rank on its node.

[Note: unnamed operations] Ranks match operations by name. An operation without a name is called "<op>.noname.<n>", where n
counts the unnamed operations of that kind in that process set on this rank. So ranks may submit named operations, and those of
other sets and kinds, in any order and number; only the unnamed ones of one kind and set must have the same order on all ranks.
Horovod uses one count for all operations, so a script that works there works here. An operation whose submission failed is not
counted. Ranks that call ``join`` early have counted fewer operations; since the global set has no unfinished operations when
``join`` ends, all ranks then count from 0 again.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from guozhuang.compat.horovod.common.variables import HorovodVariables
from guozhuang.errors import WorldError, explain
from guozhuang.gradients.named import NamedChannel, NamedEngine
from guozhuang.groups import StepNotices
from guozhuang.groups.subgroups import timeout_s
from guozhuang.world import World


@dataclass(eq=False)
class SetMember:
    """A registered process set, with the engine's channel for it.

    Attributes:
        channel: the channel in which its members negotiate; it exists on every rank, members or not.
        ranks: the ranks of the set in the Horovod world, in rising order.
        objects: the ``ProcessSet`` objects that hold its id.
    """

    channel: NamedChannel
    ranks: tuple[int, ...]
    objects: list[Any] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def full_name(self, operation: str, name: str | None) -> str:
        """Return the name by which ranks match an operation in this process set. See [Note: unnamed operations]."""
        if name is not None:
            return f"{operation}.{name}"
        with self._lock:
            count = self._counts.get(operation, 0)
            self._counts[operation] = count + 1
        return f"{operation}.noname.{count}"

    def take_back(self, operation: str, full_name: str) -> None:
        """Let the next unnamed operation reuse the name of one that was not submitted, unless a later name is in use."""
        with self._lock:
            count = self._counts.get(operation, 0)
            if full_name == f"{operation}.noname.{count - 1}":
                self._counts[operation] = count - 1

    def count_again(self) -> None:
        """Restart the count of unnamed operations at 0, at the same point on all ranks. See [Note: unnamed operations]."""
        with self._lock:
            self._counts.clear()


class RankPlace(NamedTuple):
    """The position of a rank on its node and across the nodes, as ``hvd.local_rank``, ``hvd.cross_rank`` and others return it.

    Attributes:
        local_rank: its index among the ranks of its node.
        local_size: the number of ranks of its node.
        cross_rank: the index of its node among the nodes that have a rank with this local rank.
        cross_size: the number of those nodes.
        is_homogeneous: all nodes have equally many ranks.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


@dataclass(eq=False)
class HorovodState:
    """The state of the Horovod world in this process, as ``hvd.init()`` makes it.

    Attributes:
        engine: matches and runs collectives by name, over the ranks of the Horovod world.
        world: all processes that the launcher started; larger than the Horovod world if ``init(comm=...)`` chose some of them.
        variables: the HOROVOD_* variables as they were at ``init``.
        rank: the rank of this process in the Horovod world. size: the number of ranks there.
        place: the place of this rank among the nodes.
        world_ranks: for each rank of the Horovod world, in order, its rank in ``world``.
        made_world: ``hvd.init()`` entered the world of ``guozhuang``, so ``hvd.shutdown()`` leaves it.
        dynamic: process sets may be added and removed.
        sets: the process sets by id; 0 is the global one.
        made_group: the group of the ranks that ``init(comm=...)`` chose; None for all. It ends with the Horovod world.
        next_set: the id of the next process set.
    """

    engine: NamedEngine
    world: World
    variables: HorovodVariables
    rank: int
    size: int
    place: RankPlace
    world_ranks: tuple[int, ...]
    made_world: bool
    dynamic: bool
    sets: dict[int, SetMember]
    made_group: dist.ProcessGroup | None = None
    next_set: int = 1


@dataclass
class _Current:
    state: HorovodState | None = None


_current = _Current()


def state() -> HorovodState | None:
    """Return the Horovod world of this process; None before ``hvd.init()`` and after ``hvd.shutdown()``."""
    return _current.state


def required() -> HorovodState:
    """Return the Horovod world of this process, like ``state()``, but raise if there is none.

    Raises:
        ValueError: ``hvd.init()`` has not been called.
    """
    if _current.state is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _current.state


def set_state(new: HorovodState | None) -> None:
    """Record the Horovod world that this process has entered, or None after it has left; only ``basics`` calls this."""
    _current.state = new


def place_of(rank: int, given: Sequence[tuple[int, int]]) -> RankPlace:
    """Return the ``RankPlace`` of a rank, computed from the node rank and local rank of every rank.

    Args:
        rank: the rank in the Horovod world.
        given: (node rank, local rank) of each rank as the launcher gave them. Numbers may be missing, of processes that are not
            in the Horovod world; local ranks need not rise with the ranks.
    """
    node = given[rank][0]
    nodes = [each for each, _ in given]
    sizes = Counter(nodes)
    on_node = sorted((place, other) for other, (each, place) in enumerate(given) if each == node)
    local_rank = [other for _, other in on_node].index(rank)
    across = sorted(each for each, size in sizes.items() if size > local_rank)
    return RankPlace(
        local_rank,
        sizes[node],
        across.index(node),
        len(across),
        is_homogeneous=len(set(sizes.values())) == 1,
    )


def compare_worlds(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Check that no process is in two Horovod worlds. Every process must call; one whose world has all processes does not wait.

    Args:
        group: the group of all processes.
        ranks: the ranks of this process's Horovod world, in rising order.

    Raises:
        ValueError: two processes gave worlds that overlap and are not the same; on all processes that wait.
        WorldError: a process did not call within the time-out of the group.
    """
    notices, rank = StepNotices(group, "horovod/worlds"), group.rank()
    notices.leave(0, json.dumps(list(ranks)))
    if len(ranks) == group.size():
        return
    limit_s = timeout_s(group)
    answers = notices.read(0, limit_s)
    missing = [each for each in range(group.size()) if each not in answers]
    if missing:
        what = f"ranks {missing} did not come to hvd.init() within {limit_s:g} s"
        raise WorldError(explain(what, rank=rank, fix="look at their own errors; every process must call it"))
    worlds = {each: frozenset(json.loads(text)) for each, text in sorted(answers.items())}
    for (one, first), (other, second) in itertools.combinations(worlds.items(), 2):
        if first != second and first & second:
            what = f"hvd.init(comm=...): rank {one} gave {sorted(first)}, rank {other} gave {sorted(second)}"
            fix = "give all processes of a world the same list, and each process one world"
            raise ValueError(explain(what, rank=rank, fix=fix))
