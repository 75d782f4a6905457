"""Several groups that take collectives in turn."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import guozhuang as gz
from guozhuang import strategies
from guozhuang.errors import UsageError
from guozhuang.groups import round_robin
from tests.ranks import GROUP_TIMEOUT_S, run_ranks


class Counting(dist.ProcessGroup):
    """Passes on to a group and counts what came."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.inner, self.calls = group, list[str]()

    def __getattribute__(self, name: str) -> Any:
        if name in ("allreduce", "broadcast", "barrier", "send", "recv", "all_gather_single"):
            self.calls.append(name)
            return getattr(self.inner, name)
        return super().__getattribute__(name)


def takes_turns(rank: int, world_size: int) -> list[list[str]]:
    limit = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    counting = [Counting(dist.new_group(timeout=limit)) for _ in range(3)]
    group = round_robin.RoundRobinGroup(counting)
    works = []
    tensors = [torch.full((4,), float(rank + i)) for i in range(4)]
    for tensor in tensors:
        works.append(group.allreduce([tensor], dist.AllreduceOptions()))
    if rank == 0:
        group.send([torch.ones(2)], 1, 0).wait()  # turns nothing: not every rank calls it
    if rank == 1:
        group.recv([torch.ones(2)], 0, 0).wait()
    works.append(group.broadcast([torch.ones(2)], dist.BroadcastOptions()))  # a tensor that nothing else is done to
    group.barrier(dist.BarrierOptions()).wait()
    for work in works:
        assert work.wait()
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((4,), float(sum(r + i for r in range(world_size)))))
    assert (group.rank(), group.size()) == (rank, world_size)
    return [each.calls for each in counting]


def test_collectives_go_round_and_the_order_is_the_same_on_all_ranks() -> None:
    for rank, calls in enumerate(run_ranks(takes_turns, 3)):
        point_to_point = {0: ["send"], 1: ["recv"]}.get(rank, [])
        assert calls == [
            ["allreduce", "allreduce", *point_to_point, "barrier"],
            ["allreduce", "broadcast", "barrier"],
            ["allreduce", "barrier"],
        ]


def one_is_refused(rank: int, world_size: int) -> list[float]:
    group = round_robin.over(2, GROUP_TIMEOUT_S)
    found = []
    for step in range(3):
        if rank == 0 and step == 1:
            with pytest.raises((UsageError, RuntimeError, ValueError)):
                group.allreduce([torch.ones(2), torch.ones(3)], dist.AllreduceOptions()).wait()
        tensor = torch.full((2,), float(rank + step))
        dist.all_reduce(tensor, group=group)
        found.append(tensor[0].item())
    return found


def test_a_call_that_one_rank_alone_is_refused_shifts_no_turn() -> None:
    assert run_ranks(one_is_refused, 2) == [[1.0, 3.0, 5.0]] * 2


def begins_much(rank: int, world_size: int) -> list[bool]:
    group = round_robin.over(3, GROUP_TIMEOUT_S)
    tensors = [torch.ones(2_000_000) for _ in range(3)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.barrier(group=group)
    ended = [work.is_completed() for work in works]
    future = dist.barrier(group=group, async_op=True).get_future()
    assert future.wait() == []
    for work in works:
        work.wait()
    return ended


def test_after_a_barrier_what_was_begun_in_any_group_has_ended() -> None:
    assert run_ranks(begins_much, 2) == [[True] * 3] * 2


def everything(rank: int, world_size: int) -> None:
    group = round_robin.over(2, GROUP_TIMEOUT_S)
    assert dist.get_backend(group) == "round_robin"
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, world_size)
    for _ in range(3):
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((3,), float(sum(range(world_size)))))
        dist.broadcast(tensor, 0, group=group)
        dist.reduce(tensor, 1, group=group)
        output = torch.empty(2 * world_size)
        dist.all_gather_into_tensor(output, torch.full((2,), float(rank)), group=group)
        assert torch.equal(output, torch.arange(float(world_size)).repeat_interleave(2))
        listed = [torch.empty(1) for _ in range(world_size)]
        dist.all_gather(listed, torch.tensor([float(rank)]), group=group)
        assert [each.item() for each in listed] == list(range(world_size))
        scattered = torch.empty(1)
        dist.reduce_scatter_tensor(scattered, torch.arange(float(world_size)), group=group)
        assert scattered.item() == rank * world_size
        dist.all_to_all_single(torch.empty(world_size), torch.ones(world_size), group=group)
        found: list[Any] = [None] * world_size
        dist.all_gather_object(found, rank, group=group)
        assert found == list(range(world_size))
        gathered = [torch.empty(1) for _ in range(world_size)] if rank == 0 else None
        dist.gather(torch.tensor([float(rank)]), gathered, group=group)
        dist.scatter(torch.empty(1), gathered, group=group)
        dist.barrier(group=group)
    if rank == 0:
        dist.send(torch.ones(1), 1, group=group)
    if rank == 1:
        dist.recv(torch.ones(1), 0, group=group)
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    assert torch.equal(work.get_future().wait()[0], torch.full((2,), float(world_size)))


def test_every_collective_of_torch_distributed_works_on_it() -> None:
    run_ranks(everything, 3)


def trains(rank: int, world_size: int, strategy: str) -> tuple[Tensor, str, float]:
    gz.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped, optimizer = gz.prepare(model, optimizer, strategy)
    backend = str(dist.get_backend(wrapped.process_group))
    for step in range(4):
        batch = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = wrapped(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        flag = torch.ones(1)
        dist.all_reduce(flag, group=wrapped.process_group)
    del wrapped
    gz.shutdown()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), backend, flag.item()


@pytest.mark.parametrize("strategy", [name for name, one in strategies.STRATEGIES.items() if one.takes_groups])
def test_strategies_train_the_same_over_several_groups(strategy: str) -> None:
    [one, *_] = run_ranks(trains, 2, strategy, init=False, env={"GUOZHUANG_BACKEND": "gloo"})
    several = run_ranks(trains, 2, strategy, init=False, env={"GUOZHUANG_BACKEND": "gloo", "GUOZHUANG_GROUPS": "3"})
    assert one[1:] == ("gloo", 2.0)
    for weights, backend, total in several:
        assert (backend, total) == ("round_robin", 2.0)
        assert torch.equal(weights, one[0])


def test_there_is_at_least_one_group() -> None:
    with pytest.raises(UsageError, match="at least one group"):
        round_robin.over(0, 1.0)
    with pytest.raises(UsageError, match="groups of the same ranks"):
        round_robin.RoundRobinGroup([])
