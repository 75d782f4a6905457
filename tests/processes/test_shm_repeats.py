"""Small synchronous calls that come again run without being prepared anew: each still gives what its own arguments ask for."""

import datetime
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang.errors import MismatchError, PeerLost
from guozhuang.groups.agreement import store_of
from guozhuang.groups.shared_memory.program import Status
from tests.processes.shm_ranks import is_ahead, run_shm_ranks
from tests.waiting import EXPIRES_S, LIMIT_S, until


def stored(group: Any) -> list[int]:
    """Have the table of a group count what it finds; return the list that grows."""
    found: list[int] = []
    table = group._repeats

    class Counting:
        def find(self, kind: int, turn: int, args: tuple[Any, ...]) -> Any:
            job = table.find(kind, turn, args)
            if job is not None:
                found.append(kind)
            return job

        def put(self, *given: Any) -> bool:
            return bool(table.put(*given))

    group._repeats = Counting()
    return found


def every_kind(rank: int, n: int) -> None:
    """Again and again with the same tensors: results are right, also of other operations, dtypes and layouts of one memory."""
    found = stored(dist.group.WORLD)
    whole, part = torch.empty(4 * n), torch.empty(4)
    for i in range(24):
        whole.fill_(rank + i)
        dist.all_reduce(whole)
        assert whole.tolist() == [float(sum(range(n)) + n * i)] * (4 * n), i
        whole.fill_(rank + i)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX)
        assert whole.tolist() == [float(n - 1 + i)] * (4 * n), i
        root = i % n
        whole.fill_(rank + i)
        dist.broadcast(whole, root)
        assert whole.tolist() == [float(root + i)] * (4 * n), i
        part.fill_(rank + i)
        dist.all_gather_single(whole, part)
        assert whole.view(n, 4).tolist() == [[float(r + i)] * 4 for r in range(n)], i
        dist.reduce_scatter_single(part, whole)
        assert part.tolist() == [float(n * (rank + i))] * 4, i
        numbers = whole.view(torch.int32)  # the same address and number of elements
        numbers.fill_(i)
        dist.all_reduce(numbers)
        assert numbers.tolist() == [n * i] * (4 * n), i
        part.fill_(rank)
        inside = whole.view(n, 4)[rank]  # the rank's own part of the result
        inside.fill_(rank - i)
        dist.all_gather_single(whole, inside)
        assert whole.view(n, 4).tolist() == [[float(r - i)] * 4 for r in range(n)], i
        if i % 3 == 1:  # lets the other area's turn come
            dist.all_reduce(part, async_op=True).wait()  # type: ignore[union-attr]
        dist.barrier()
        assert dist.group.WORLD._get_sequence_number_for_group() == 8 * (i + 1) + (i + 2) // 3  # type: ignore[union-attr]
    assert {0, 1, 2, 3, 4} == set(found)
    assert len(found) > 24 * 8 // 2


def same_place_another_tensor(rank: int, n: int) -> None:
    """What lies at one address, in as many elements, is not always the same tensor."""
    found = stored(dist.group.WORLD)
    memory = torch.zeros(64)
    for _ in range(6):
        dist.all_reduce(memory[:16])
    assert found
    makers: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda of: of[:32:2],
        lambda of: of[:16].view(4, 4).t(),
        lambda of: torch._neg_view(of[:16]),
        lambda of: of.view(torch.complex64)[:16].conj().imag,
        lambda of: torch.nn.Parameter(of[:16], requires_grad=False),
        lambda of: of[:16],
    ]
    for number, make in enumerate(makers):
        memory.copy_(torch.arange(64.0) + rank)
        expected = sum(make(torch.arange(64.0) + r).detach() for r in range(n))
        tensor = make(memory)
        dist.all_reduce(tensor)
        assert torch.equal(tensor.detach(), torch.as_tensor(expected)), (number, tensor, expected)


def large(rank: int, n: int) -> None:
    """Calls whose programs depend on where the tensors of all ranks lie, also while one rank's change and its own do not."""
    group: Any = dist.group.WORLD
    found, num, ran = stored(group), 40_000 * n, [0, 0]
    run = group._link._engine.run

    class Counting:
        def run(self, *given: Any) -> Any:
            outcome = run(*given)
            if len(given) > 5 and given[5] is not None:
                ran[outcome[0] == Status.UNEXPECTED] += 1
            return outcome

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    engine, group._link._engine = group._link._engine, Counting()

    def place(kind: int) -> torch.Tensor:
        return (torch.empty(num) if kind % 2 else group.empty(num)).fill_(rank)

    kept = [place(0), place(1)]
    changing = [place(0), place(1)]
    part, ours = torch.empty(num // n), group.empty(num // n)
    for i in range(40):
        if rank == 0 and i % 7 == 6:  # often at the address of what was freed
            del changing[i % 2]
            changing.insert(i % 2, place(i % 2 if i < 30 else 1 + i))
        for tensor in (*kept, *(changing if rank == 0 else kept)):
            for root in range(n):
                tensor.fill_(rank + i)
                dist.broadcast(tensor, root)
                assert tensor.eq(root + i).all(), (i, root)
            tensor.fill_(rank + i)
            dist.all_reduce(tensor)
            assert tensor.eq(sum(range(n)) + n * i).all(), i
            for piece in (part, ours):
                tensor.view(n, -1).copy_(torch.arange(float(n)).view(n, 1) + rank + i)
                dist.reduce_scatter_single(piece, tensor)
                assert piece.eq(n * rank + sum(range(n)) + n * i).all(), i
                dist.all_gather_single(tensor, piece)
                assert tensor.view(n, -1).eq(n * torch.arange(n).view(n, 1) + sum(range(n)) + n * i).all(), i
    assert {0, 1, 2, 3} == set(found)
    assert ran[0] > 500 and ran[1] > (100 if rank else 5), ran


def all_to_all(rank: int, n: int) -> str:
    """Sizes change between two other ranks while this one's stay, and at last no longer fit each other."""
    for unit in (1, 20_000):  # through the rings; read from the peers
        given, taken, *others = (torch.empty(8 * unit) for _ in range(5))
        for i in range(30):
            rows = torch.full((n, n), 2)
            if i % 5 > 2:
                rows[n - 2, n - 1], rows[n - 1, n - 2] = 1, 3
            gives, takes = (rows[rank] * unit).tolist(), (rows[:, rank] * unit).tolist()
            source = others[i % 3] if rank == n - 1 and i > 15 else given  # only this rank's addresses change
            for r, part in enumerate(source[: sum(gives)].split(gives)):
                part.fill_(100 * i + 10 * rank + r)
            dist.all_to_all_single(taken[: sum(takes)], source[: sum(gives)], takes, gives)
            for r, part in enumerate(taken[: sum(takes)].split(takes)):
                assert part.eq(100 * i + 10 * r + rank).all(), (i, r)
    with pytest.raises(MismatchError, match="ranks differ in the sizes of an all_to_all") as caught:
        gives = [2 * unit] * (n - 1) + [(3 if rank == n - 2 else 2) * unit]
        dist.all_to_all_single(taken[: 2 * n * unit], given[: sum(gives)], [2 * unit] * n, gives)
    return str(caught.value)


def differ(rank: int, n: int) -> str:
    tensor = torch.ones(8)
    for _ in range(6):
        dist.all_reduce(tensor)
    with pytest.raises(MismatchError) as caught:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)
        dist.barrier() if rank else dist.all_reduce(tensor)
    return str(caught.value)


def loses(rank: int, n: int) -> None:
    tensor = torch.ones(8)
    for _ in range(6):
        dist.all_reduce(tensor)
    if rank == n - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        dist.all_reduce(tensor)
    assert caught.value.rank == n - 1 and "all_reduce of 8 float32" in str(caught.value)
    with pytest.raises(PeerLost):
        dist.all_reduce(tensor)


def late(rank: int, n: int) -> None:
    """The limit of the group is that of the moment of the call."""
    tensor = torch.ones(8)
    for _ in range(6):
        dist.all_reduce(tensor)
    store = store_of(dist.group.WORLD)
    if rank == 0:
        store.wait(["timed out"])
        return
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds=EXPIRES_S))  # type: ignore[union-attr]
    with pytest.raises(PeerLost, match="timed out"):
        dist.all_reduce(tensor)
    store.set("timed out", "")


def gives_nothing(rank: int, n: int) -> None:
    """A rank that gives empty tensors still hears what its peers have freed; they are not held up by unread messages."""
    group: Any = dist.group.WORLD
    for i in range(250):
        given = group.empty(40_000).fill_(i) if rank == 0 else torch.empty(0)
        taken = [torch.empty(40_000 if r == 0 else 0) for r in range(n)]
        dist.all_gather(taken, given)
        assert taken[0][-1] == i


def counts(rank: int, n: int) -> None:
    """A rank that waits in a repeated call has started it, as the report of a hang says."""
    group: Any = dist.group.WORLD
    tensor, seen, store = torch.ones(8), [], store_of(group)
    for _ in range(6):
        dist.all_reduce(tensor)
    before = group._get_sequence_number_for_group()
    if rank == 0:
        store.wait(["seen"])
        dist.all_reduce(tensor)
        return
    thread = threading.Thread(target=lambda: dist.all_reduce(tensor))
    thread.start()
    until(lambda: is_ahead(group, 1, 0))
    seen.append(group._get_sequence_number_for_group())
    store.set("seen", "")
    thread.join(LIMIT_S)
    assert [*seen, group._get_sequence_number_for_group()] == [before + 1] * 2


def leaves_nothing(rank: int, n: int) -> None:
    """The table keeps neither tensors nor the group."""
    group = dist.new_group()
    tensor = torch.ones(8)
    for _ in range(6):
        dist.all_reduce(tensor, group=group)
    dead = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert dead() is None
    dist.barrier()
    dist.destroy_process_group(group)
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None or not gc.is_tracked(gone())


def from_two_threads(rank: int, n: int) -> None:
    """A call that cannot run at once is queued behind the one that runs, as ever."""
    tensor, other = torch.ones(8), torch.ones(8)
    second: Any = dist.new_group()
    for _ in range(6):
        dist.all_reduce(tensor)
        dist.all_reduce(other, group=second)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                dist.all_reduce(other, op=dist.ReduceOp.MAX, group=second)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for i in range(200):
        works = [dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True) for _ in range(i % 3)]
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        for each in works:
            assert each is not None and each.wait()
    thread.join()
    assert not errors


@pytest.mark.parametrize(
    "fn", [every_kind, same_place_another_tensor, leaves_nothing, from_two_threads, late, large, counts, gives_nothing]
)
def test_repeated_calls(fn: Any) -> None:
    run_shm_ranks(fn, 2)


@pytest.mark.parametrize("fn", [every_kind, large])
def test_three_ranks(fn: Any) -> None:
    run_shm_ranks(fn, 3)


def test_an_all_to_all_that_comes_again_has_the_sizes_of_this_time() -> None:
    for text in run_shm_ranks(all_to_all, 3):
        assert "60000" in text and "40000" in text


def test_ranks_that_differ_in_a_repeated_call_say_so() -> None:
    for text in run_shm_ranks(differ, 2):
        assert "all_reduce of 8 float32, max" in text and "all_reduce of 8 float32, sum" in text


def test_a_rank_lost_in_a_repeated_call_is_named() -> None:
    found = run_shm_ranks(loses, 3, collect_errors=True)
    assert found[:2] == [None, None]
