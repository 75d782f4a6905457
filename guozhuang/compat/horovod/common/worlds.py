"""Each process tells which processes are in its Horovod world; who is named must name the same ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import torch.distributed as dist

from guozhuang.errors import WorldError, explain
from guozhuang.groups.agreement import StepNotices
from guozhuang.groups.subgroups import timeout_s


def compare(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
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
