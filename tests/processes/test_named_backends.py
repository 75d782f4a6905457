"""Collectives matched by name over each kind of group: what tests/threads/test_named.py shows of ranks that are threads."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from guozhuang.gradients.named import NamedEngine, Settings
from guozhuang.groups.hierarchical import HierarchicalGroup
from tests.processes.negotiating import full, reduced, run_engines, together
from tests.processes.test_hierarchical import processes_of
from tests.processes.test_named_failures import expires_soon_once_connected, wait_longer_than_that
from tests.ranks import GROUP_TIMEOUT_S, run_ranks
from tests.threads.test_named import every_kind, in_any_order, joins
from tests.threads.test_named_mismatches import mismatches


@pytest.mark.parametrize(
    ("program", "num_ranks", "name", "more"),
    [
        (every_kind, 2, "gloo", ()),
        (every_kind, 4, "shm", ()),
        (in_any_order, 3, "shm", (7, 12)),
        (in_any_order, 4, "gloo", (4, 12)),
        (joins, 3, "gloo", ()),
        (mismatches, 2, "gloo", ()),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_over_groups_of_processes(program: Callable[..., Any], num_ranks: int, name: str, more: tuple[int]) -> None:
    first, *others = run_engines(program, num_ranks, *more, name=name)
    assert all(other == first for other in others), "ranks take part in the same rounds"


def over_nodes(rank: int, num_ranks: int, layout: str) -> None:
    def create(told: Any, options: object) -> dist.ProcessGroup:
        nodes = [layout[each] for each in told.global_ranks_in_group or range(num_ranks)]
        processes = processes_of(told.store, told.group_rank, nodes)
        return HierarchicalGroup(told.store, told.group_rank, told.group_size, told.timeout, processes)

    dist.Backend.register_backend("nodes", create, extended_api=True, devices=["cpu"])
    group = dist.new_group(backend="nodes", timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S))
    expires_soon_once_connected()
    engine = NamedEngine(group, Settings())
    together(engine.world)
    wait_longer_than_that(engine, late=1, waiting=0)  # an idle peer is no error
    every_kind(engine)
    part = engine.add([0, num_ranks - 1])
    if part.rank is not None:
        assert reduced(part, "x", full(1.0))[0].eq(2).all()
    engine.close()
    assert engine.failure is None


@pytest.mark.parametrize("layout", ["aabb", *(pytest.param(each, marks=pytest.mark.slow) for each in ("abb", "ab"))])
def test_every_kind_over_several_nodes(layout: str) -> None:
    run_ranks(over_nodes, len(layout), layout)
