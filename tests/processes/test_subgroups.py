"""Groups made of the ranks of a group: they find each other whatever each rank has made or ended before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from guozhuang.groups.subgroups import subgroup, timeout_s, twin
from tests.processes.cases import names_of_cases, results_of_cases


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


NAMES = names_of_cases(globals())
RESULTS = {size: results_of_cases(__name__, size, NAMES) for size in (1, 3, 4)}


@pytest.mark.parametrize("size", RESULTS)
@pytest.mark.parametrize("name", NAMES)
def test_cases(name: str, size: int) -> None:
    RESULTS[size](name)
