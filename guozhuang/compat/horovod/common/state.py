"""The one world that this process is in, between ``hvd.init()`` and ``hvd.shutdown()``, and which rank is where in it.

[Note: unnamed operations] Ranks match operations by name. One that got no name is called "<op>.noname.<n>", where n counts the
unnamed operations of that kind in that process set on this rank. So ranks may issue named operations, and operations of other
sets and kinds, in any order and number; only the unnamed ones of one kind and set must come in the same order on all ranks.
Horovod counts all operations together, so every script that works there works here. What a rank was not allowed to submit does
not count. When ``join`` ends nothing is under way in the global set, and ranks that left early have counted less: there
everybody begins again at 0.
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
from guozhuang.groups.agreement import StepNotices
from guozhuang.groups.subgroups import timeout_s
from guozhuang.world import World


@dataclass(eq=False)
class SetMember:
    """A process set as the engine knows it.

    Attributes:
        channel: where its members negotiate; made on every rank, members or not.
        ranks: of the set, rising; ranks of the Horovod world.
        objects: the ``ProcessSet`` objects that hold its id.
    """

    channel: NamedChannel
    ranks: tuple[int, ...]
    objects: list[Any] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def full_name(self, operation: str, name: str | None) -> str:
        """Return the name by which ranks match. See [Note: unnamed operations]."""
        if name is not None:
            return f"{operation}.{name}"
        with self._lock:
            count = self._counts.get(operation, 0)
            self._counts[operation] = count + 1
        return f"{operation}.noname.{count}"

    def take_back(self, operation: str, full_name: str) -> None:
        """Let the name of an unnamed operation be given again, which was not submitted; a later one may have come since."""
        with self._lock:
            count = self._counts.get(operation, 0)
            if full_name == f"{operation}.noname.{count - 1}":
                self._counts[operation] = count - 1

    def count_again(self) -> None:
        """Begin again at 0, on all ranks at the same point. See [Note: unnamed operations]."""
        with self._lock:
            self._counts.clear()


@dataclass(eq=False)
class HorovodState:
    """What ``hvd.init()`` found and made.

    Attributes:
        engine: the collectives by name, over the ranks of the Horovod world.
        world: all processes that the launcher started; larger than the Horovod world where ``init(comm=...)`` chose some.
        variables: the HOROVOD_* variables as they were at ``init``.
        rank: this process in the Horovod world. size: of it.
        local_rank: this process among those of its node. local_size: how many its node has.
        cross_rank: this node among those that have this local rank. cross_size: how many those are.
        is_homogeneous: all nodes have equally many ranks.
        world_ranks: the processes of the Horovod world, in the order of their ranks there, as ranks of ``world``.
        made_world: the world of ``guozhuang`` was entered by ``hvd.init()``, and is left by ``hvd.shutdown()``.
        dynamic: process sets may be added and removed.
        sets: the process sets by id; 0 is the global one.
        made_group: of the ranks that ``init(comm=...)`` chose, if they are some; ends with the Horovod world.
        next_set: the id of the next process set.
    """

    engine: NamedEngine
    world: World
    variables: HorovodVariables
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
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
    """The world this process is in; None before ``hvd.init()`` and after ``hvd.shutdown()``."""
    return _current.state


def required() -> HorovodState:
    """As ``state()``.

    Raises:
        ValueError: there is none.
    """
    if _current.state is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _current.state


def set_state(new: HorovodState | None) -> None:
    """Enter a world, or leave it; ``basics`` calls this, nobody else."""
    _current.state = new


class RankPlace(NamedTuple):
    """Where a rank is.

    Attributes:
        local_rank: its place among the ranks of its node.
        local_size: how many ranks its node has.
        cross_rank: the place of its node among those that have a rank with this local rank.
        cross_size: how many those are.
        is_homogeneous: all nodes have equally many ranks.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


def place_of(rank: int, told: Sequence[tuple[int, int]]) -> RankPlace:
    """Return where a rank is.

    Args:
        rank: of whom.
        told: of each rank its node, and its place there by the launcher's word, which may number the ranks of a node in any
            order. Both with gaps where some processes are no ranks.
    """
    node = told[rank][0]
    nodes = [each for each, _ in told]
    sizes = Counter(nodes)
    on_node = sorted((place, other) for other, (each, place) in enumerate(told) if each == node)
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
    """Check that no process is in two worlds. Every process must call; only one in a part of them waits for the others.

    Args:
        group: all processes.
        ranks: those of this one's world, rising.

    Raises:
        ValueError: two processes gave worlds that overlap and are not the same; on all that wait.
        WorldError: a process did not come within the time-out of the group.
    """
    notices, rank = StepNotices(group, "horovod/worlds"), group.rank()
    notices.leave(0, json.dumps(list(ranks)))
    if len(ranks) == group.size():
        return
    limit_s = timeout_s(group)
    told = notices.read(0, limit_s)
    missing = [each for each in range(group.size()) if each not in told]
    if missing:
        what = f"ranks {missing} did not come to hvd.init() within {limit_s:g} s"
        raise WorldError(explain(what, rank=rank, fix="look at their own errors; every process must call it"))
    worlds = {each: frozenset(json.loads(text)) for each, text in sorted(told.items())}
    for (one, first), (other, second) in itertools.combinations(worlds.items(), 2):
        if first != second and first & second:
            what = f"hvd.init(comm=...): rank {one} gave {sorted(first)}, rank {other} gave {sorted(second)}"
            fix = "give all processes of a world the same list, and each process one world"
            raise ValueError(explain(what, rank=rank, fix=fix))
