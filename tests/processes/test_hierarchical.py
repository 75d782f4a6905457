"""The group over several nodes, on one machine: what makes a node is the identity that each rank is given."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import PeerLost, UsageError, WorldError
from guozhuang.groups import roll_call
from guozhuang.groups.agreement import store_of
from guozhuang.groups.hierarchical import HierarchicalGroup
from guozhuang.groups.hierarchical.collectives import PART_BYTES
from guozhuang.watch.processes import Process, this_process
from tests.processes.shm_peers import state_of
from tests.ranks import RankError, run_ranks
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S, until

# One letter per rank: its node.
EVEN, THREE_AND_ONE, ONE_AND_TWO, TURNED = "aabb", "aaab", "abb", "abba"
TWO_AND_THREE, ONE_NODE, FLAT = "aabbb", "aaa", "abc"
LAYOUTS = (EVEN, THREE_AND_ONE, ONE_AND_TWO, TURNED, TWO_AND_THREE, ONE_NODE, FLAT)


def processes_of(store: dist.Store, rank: int, nodes: Sequence[str]) -> list[Process]:
    cards = roll_call.call(store, "processes", rank, len(nodes), str(this_process(nodes[rank])), NEVER_S)
    return [Process.read(card) for card in cards]


def make(layout: str, timeout_s: float = NEVER_S) -> dist.ProcessGroup:
    def create(told: Any, options: Any) -> dist.ProcessGroup:
        processes = processes_of(told.store, told.group_rank, layout)
        return HierarchicalGroup(told.store, told.group_rank, told.group_size, told.timeout, processes)

    dist.Backend.register_backend("nodes", create, extended_api=True, devices=["cpu"])
    return dist.new_group(backend="nodes", timeout=datetime.timedelta(seconds=timeout_s))


def values(rank: int, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank gives; every rank can compute what every other gives."""
    generator = torch.Generator().manual_seed(1000 + rank)
    whole = torch.randint(-9, 10, (num_elements,), generator=generator)
    return whole.to(dtype) if dtype != torch.bool else whole > 0


def expected(world_size: int, num_elements: int, combine: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    return combine(torch.stack([values(r, num_elements, dtype) for r in range(world_size)]))


PART = PART_BYTES // 4  # float32 of one lane in one piece
SIZES = (1, 2, 3, 7, 1000, 2 * PART, 5 * PART + 1)


def reduces(rank: int, world_size: int, layout: str) -> list[str]:
    group = make(layout)
    wrong = []
    for size in SIZES:
        tensor = values(rank, size)
        dist.all_reduce(tensor, group=group)
        if not torch.equal(tensor, expected(world_size, size, lambda t: t.sum(0), torch.float32)):
            wrong.append(f"all_reduce of {size}")
        root = world_size - 1
        tensor = values(rank, size)
        dist.reduce(tensor, root, group=group)
        if rank == root and not torch.equal(tensor, expected(world_size, size, lambda t: t.sum(0), torch.float32)):
            wrong.append(f"reduce of {size}")
    kinds: list[tuple[Any, torch.dtype, Callable[[Tensor], Tensor]]] = [
        (dist.ReduceOp.AVG, torch.float32, lambda t: t.sum(0) / world_size),
        (dist.ReduceOp.MAX, torch.int64, lambda t: t.amax(0)),
        (dist.ReduceOp.MIN, torch.int32, lambda t: t.amin(0)),
        (dist.ReduceOp.PRODUCT, torch.float64, lambda t: t.prod(0)),
        (dist.ReduceOp.SUM, torch.bfloat16, lambda t: t.float().sum(0).bfloat16()),
        (dist.ReduceOp.SUM, torch.float16, lambda t: t.float().sum(0).half()),
        (dist.ReduceOp.SUM, torch.int8, lambda t: t.sum(0, dtype=torch.int8)),
        (dist.ReduceOp.SUM, torch.complex64, lambda t: t.sum(0)),
        (dist.ReduceOp.MAX, torch.bool, lambda t: t.any(0)),
    ]
    for op, dtype, combine in kinds:
        tensor = values(rank, 101, dtype)
        dist.all_reduce(tensor, op=op, group=group)
        torch.testing.assert_close(tensor, expected(world_size, 101, combine, dtype), msg=f"{op} {dtype}")
    if layout != FLAT:  # gloo, which is alone there, mixes up the elements of a tensor with gaps
        whole = values(rank, 60).view(5, 12)
        dist.all_reduce(whole[:, 1::2], group=group)
        wanted = expected(world_size, 60, lambda t: t.sum(0), torch.float32).view(5, 12)
        assert torch.equal(whole[:, 1::2], wanted[:, 1::2])
        assert torch.equal(whole[:, ::2], values(rank, 60).view(5, 12)[:, ::2]), "what lies between stays"
    dist.destroy_process_group(group)
    return wrong


@pytest.mark.parametrize(
    "layout",
    [each if each in (EVEN, TWO_AND_THREE) else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS],
)
def test_reductions_count_every_rank_once(layout: str) -> None:
    assert run_ranks(reduces, len(layout), layout) == [[]] * len(layout)


def moves(rank: int, world_size: int, layout: str) -> None:
    group = make(layout)
    for size in (1, 3, 1000, 2 * PART + 5):
        for root in range(world_size):
            tensor = values(rank, size)
            dist.broadcast(tensor, root, group=group)
            assert torch.equal(tensor, values(root, size)), ("broadcast", size, root)
        output = torch.empty(world_size * size)
        dist.all_gather_into_tensor(output, values(rank, size), group=group)
        assert torch.equal(output, torch.cat([values(r, size) for r in range(world_size)])), ("all_gather", size)
        listed = [torch.empty(size) for _ in range(world_size)]
        dist.all_gather(listed, values(rank, size), group=group)
        assert all(torch.equal(each, values(r, size)) for r, each in enumerate(listed)), ("all_gather", size)
        scattered = torch.empty(size)
        dist.reduce_scatter_tensor(scattered, values(rank, world_size * size), group=group)
        wanted = expected(world_size, world_size * size, lambda t: t.sum(0), torch.float32).view(world_size, size)
        assert torch.equal(scattered, wanted[rank]), ("reduce_scatter", size)
        scattered = torch.empty(size)
        parts = list(values(rank, world_size * size).view(world_size, size))
        dist.reduce_scatter(scattered, parts, op=dist.ReduceOp.AVG, group=group)
        assert torch.equal(scattered, wanted[rank] / world_size), ("reduce_scatter of a list", size)
    flags = values(rank, 50, torch.bool)
    dist.broadcast(flags, 1, group=group)
    assert torch.equal(flags, values(1, 50, torch.bool))
    dist.barrier(group=group)

    received = torch.empty(world_size * 2)
    dist.all_to_all_single(received, torch.arange(world_size * 2.0) + 100 * rank, group=group)
    wanted = torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(world_size)])
    assert torch.equal(received, wanted), "all_to_all"
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, {"rank": rank}, group=group)
    assert found == [{"rank": r} for r in range(world_size)]
    gathered = [torch.empty(3) for _ in range(world_size)] if rank == 1 else None
    dist.gather(values(rank, 3), gathered, dst=1, group=group)
    assert gathered is None or all(torch.equal(each, values(r, 3)) for r, each in enumerate(gathered))
    given = [values(r, 3) for r in range(world_size)] if rank == 0 else None
    mine = torch.empty(3)
    dist.scatter(mine, given, src=0, group=group)
    assert torch.equal(mine, values(rank, 3))
    if rank == world_size - 1:
        dist.send(values(rank, 4), 0, group=group, tag=7)
    if rank == 0:
        tensor = torch.empty(4)
        assert dist.recv(tensor, group=group, tag=7) == world_size - 1
        assert torch.equal(tensor, values(world_size - 1, 4))
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "layout", [EVEN, *(pytest.param(each, marks=pytest.mark.slow) for each in (THREE_AND_ONE, FLAT)), TURNED]
)
def test_every_other_collective(layout: str) -> None:
    run_ranks(moves, len(layout), layout)


def overlaps(rank: int, world_size: int, layout: str) -> list[Tensor]:
    group = make(layout)
    torch.manual_seed(rank)
    tensors = [torch.randn(size) for size in (5, 3 * PART, 100, PART + 3, 1)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    future = works[1].get_future().then(lambda done: done.value()[0].sum().item())
    dist.barrier(group=group)  # after all of them, in order
    assert all(work.is_completed() for work in works)
    for work in works:
        work.wait()
    assert future.wait() == tensors[1].sum().item()
    dist.destroy_process_group(group)
    return tensors


@pytest.mark.parametrize("layout", [EVEN, THREE_AND_ONE])
def test_works_end_in_order_with_the_same_bits_on_all_ranks(layout: str) -> None:
    first, *others = run_ranks(overlaps, len(layout), layout)
    torch.manual_seed(0)
    for other in others:
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(first, other, strict=True))


def trains(rank: int, world_size: int, layout: str) -> Tensor:
    group = make(layout)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Linear(300, 4))
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(2 * world_size, 20, generator=generator)
        ddp(batch[rank::world_size]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del ddp
    dist.destroy_process_group(group)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_pytorchs_own_ddp_trains_on_it() -> None:
    weights = run_ranks(trains, 4, EVEN)
    assert all(torch.equal(weights[0], other) for other in weights)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Linear(300, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(weights[0], alone)


def compresses(rank: int, world_size: int, layout: str) -> float:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    group = make(layout)
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, matrix_approximation_rank=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        ddp(torch.randn(4, 64)).square().mean().backward()
    return float(ddp.module.weight.grad.double().sum())


def test_a_hook_that_reduces_again_when_a_reduction_ends_does_not_wait_for_itself() -> None:
    assert len(set(run_ranks(compresses, 3, ONE_AND_TWO))) == 1


def refuses(rank: int, world_size: int, layout: str) -> list[str]:
    group = make(layout)
    texts = []
    for op, given in (
        (dist.ReduceOp.BAND, torch.ones(4)),
        (dist.ReduceOp.SUM, torch.ones(4, dtype=torch.int16)),
        (dist.ReduceOp.SUM, torch.ones(1).expand(4)),
    ):
        try:
            dist.all_reduce(given, op=op, group=group)
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)  # what was refused before anything moved breaks nothing
    assert torch.equal(tensor, torch.full((4,), float(world_size)))
    return texts


def test_what_every_rank_refuses_breaks_nothing() -> None:
    for texts in run_ranks(refuses, 3, ONE_AND_TWO):
        assert len(texts) == 3 and "share memory" in texts[2], texts


def gathers_lists(rank: int, world_size: int, layout: str) -> None:
    group = make(layout)
    inputs = [values(rank, 4), values(rank, 6).view(2, 3)]
    found = {}
    for name, one in (("ours", group), ("gloo", dist.group.WORLD)):
        outputs = [[torch.empty_like(tensor) for tensor in inputs] for _ in range(world_size)]
        dist.all_gather_coalesced(outputs, inputs, group=one)
        found[name] = outputs
    for ours, gloos in zip(found["ours"], found["gloo"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, gloos, strict=True))
    assert torch.equal(found["ours"][1][0], values(1, 4))


@pytest.mark.parametrize("layout", [EVEN, ONE_AND_TWO])
def test_coalesced_all_gather_has_a_list_per_rank_as_gloo(layout: str) -> None:
    run_ranks(gathers_lists, len(layout), layout)


def test_there_is_an_identity_for_every_rank() -> None:
    with pytest.raises(UsageError, match="node of every rank"):
        HierarchicalGroup(dist.HashStore(), 0, 2, datetime.timedelta(seconds=LIMIT_S), [this_process("a")])


def loses(rank: int, world_size: int, layout: str, victim: int, how: str) -> dict[str, Any]:
    group: Any = make(layout)
    store, noticed = store_of(dist.group.WORLD), [f"noticed/{r}" for r in range(world_size) if r != victim]
    tensor = torch.ones(4 * PART)
    dist.all_reduce(tensor, group=group)
    dist.barrier(group=group)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    for _ in range(3 if rank == victim or how == "stop" else 0):  # else the others are in the middle of something
        dist.all_reduce(tensor, group=group)
    if rank == victim:
        if how == "leave":
            dist.destroy_process_group(group)
            store.wait(noticed, datetime.timedelta(seconds=NEVER_S))  # alive all the time
            return {}
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    if how == "stop":
        until(lambda: state_of(pids[victim]) == "T")
        group.set_timeout(datetime.timedelta(seconds=EXPIRES_S))
    errors = []
    for _ in range(2):  # the second time at once
        try:
            while True:
                dist.all_reduce(tensor, group=group)
        except WorldError as error:
            errors.append(error)
    group.shutdown()  # which waits for nobody
    first = errors[0]
    store.set(f"noticed/{rank}", "")
    if how == "stop" and rank == min(set(range(world_size)) - {victim}):
        store.wait(noticed, datetime.timedelta(seconds=NEVER_S))
        os.kill(pids[victim], signal.SIGKILL)
    return {
        "text": str(first),
        "rank": first.rank if isinstance(first, PeerLost) else None,
        "pid": first.pid if isinstance(first, PeerLost) else None,
        "victims_pid": pids[victim],
        "same": str(errors[1]) == str(first),
    }


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        (EVEN, 1),
        (THREE_AND_ONE, 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(EVEN, 2), (THREE_AND_ONE, 2), ("aabbcc", 5)]),
    ],
)
def test_a_killed_rank_is_named_on_all_others_at_once(layout: str, victim: int) -> None:
    found = run_ranks(loses, len(layout), layout, victim, "kill", collect_errors=True)
    assert isinstance(found.pop(victim), RankError)
    for each in found:
        assert not isinstance(each, RankError), each.text
        assert each["same"]
    if layout.count(layout[victim]) > 1:  # its node mates knew the process, and told the others
        assert {(each["rank"], each["pid"]) for each in found} == {(victim, found[0]["victims_pid"])}
    else:
        assert all("connection to another node ended" in each["text"] for each in found), found


def test_a_stopped_rank_raises_on_all_others_at_the_time_out() -> None:
    found = run_ranks(loses, 4, EVEN, 3, "stop", collect_errors=True)
    found.pop(3)
    for each in found:
        assert not isinstance(each, RankError), each.text


def test_a_rank_that_leaves_raises_on_all_others() -> None:
    run_ranks(loses, 4, EVEN, 1, "leave")


def come_and_go(rank: int, world_size: int, layout: str) -> list[tuple[int, int]]:
    found = []
    for _ in range(3):
        group = make(layout)
        dist.all_reduce(torch.ones(1000), group=group, async_op=True).wait()
        dist.barrier(group=group)
        dist.destroy_process_group(group)
        try:
            group.allreduce([torch.ones(1)])
        except WorldError as error:
            assert "was shut down" in str(error)
        else:
            raise AssertionError("a group that was destroyed takes no calls")
        del group
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        dist.barrier()
    return found


def test_groups_come_and_go_and_leave_no_thread_or_connection() -> None:
    for found in run_ranks(come_and_go, 3, ONE_AND_TWO):
        assert found[0] == found[2]
