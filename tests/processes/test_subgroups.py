"""Groups made of the ranks of a group: they find each other whatever each rank has made or ended before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from guozhuang.groups.subgroups import _connect_alone, subgroup, timeout_s, twin
from tests.processes.cases import as_tests


def total(group: dist.ProcessGroup) -> float:
    value = torch.tensor([float(2 ** dist.get_rank())])
    dist.all_reduce(value, group=group)
    return float(value)


def case_a_twin_of_a_twin_again_after_both_have_ended(rank: int, size: int) -> None:
    for _ in range(3):
        first = twin(dist.group.WORLD)
        second = twin(first)
        assert second is not first and second.size() == first.size() == size and second.rank() == rank
        assert total(second) == total(first) == 2**size - 1
        assert timeout_s(second) == timeout_s(dist.group.WORLD)
        dist.destroy_process_group(second)
        dist.destroy_process_group(first)


def case_members_that_are_in_different_numbers_of_groups(rank: int, size: int) -> None:
    alone = [subgroup(dist.group.WORLD, [rank]) for _ in range(rank)]
    assert all(total(group) == 2**rank for group in alone)
    assert total(twin(dist.group.WORLD)) == 2**size - 1


def case_parts_side_by_side_and_parts_of_parts(rank: int, size: int) -> None:
    ends = sorted({0, size - 1}) if rank in (0, size - 1) else list(range(1, size - 1))
    part = subgroup(dist.group.WORLD, ends)
    assert dist.get_process_group_ranks(part) == ends and total(part) == sum(2**member for member in ends)
    again = subgroup(part, range(part.size()))
    assert dist.get_process_group_ranks(again) == ends and total(again) == total(part)
    last = subgroup(part, [part.rank()])
    assert last.size() == 1 and total(last) == 2**rank
    assert dist.get_global_rank(again, again.size() - 1) == ends[-1]


def case_parts_of_a_default_group_that_is_bound_to_a_device_connect_alone(rank: int, size: int) -> None:
    world, c10d, device = dist.group.WORLD, dist.distributed_c10d, torch.device("cuda", 0)
    assert world is not None
    make, asked = c10d._new_process_group_helper, []

    def spy(*args: Any, device_id: torch.device | None, **options: Any) -> Any:
        asked.append(device_id)
        return make(*args, device_id=device_id, **options)

    c10d._new_process_group_helper, world.bound_device_id = spy, device
    try:
        groups = [subgroup(world, [rank]), twin(world)]
    finally:
        c10d._new_process_group_helper, world.bound_device_id = make, None
    assert asked == [device if size == 1 else None, device]
    assert all(group.bound_device_id == device for group in groups)
    assert [total(group) for group in groups] == [2**rank, 2**size - 1]


test_cases = as_tests(globals(), (1, 3, 4))


def test_a_part_does_not_split_the_communicator_of_the_default_group() -> None:
    """No more than what is set: that NCCL then connects it alone takes several GPUs to see."""
    wrapped, plain = SimpleNamespace(split_from="the default group's"), SimpleNamespace()
    backends = {
        "cuda": SimpleNamespace(wrapped_pg=SimpleNamespace(options=wrapped)),
        "cpu": SimpleNamespace(options=plain),
    }
    made = SimpleNamespace(_device_types=list(backends), _get_backend=backends.__getitem__)
    _connect_alone(cast(dist.ProcessGroup, made), torch.device("cuda", 1))
    assert wrapped.split_from is None and made.bound_device_id == torch.device("cuda", 1) and not vars(plain)
