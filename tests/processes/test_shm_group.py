"""Each collective of the shared-memory group against gloo's result on the same inputs."""

import contextlib
import ctypes
import datetime
import gc
import mmap
import os
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from guozhuang.errors import UsageError
from guozhuang.groups.shared_memory import SharedMemoryGroup
from guozhuang.groups.shared_memory.engine import is_readable
from tests.processes.shm_ranks import held, run_shm_ranks
from tests.waiting import LIMIT_S

# Elements: nothing, one, not a multiple of anything, one shot, just more than one shot, several chunks.
SIZES = (1, 3, 1000, 16_384, 16_385, 300_001)
MOVED = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
COMBINED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


def small_whole_numbers(num: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values whose sums and products are exact in every dtype, so that the order of additions does not matter."""
    return torch.randint(0, 3, (num,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def all_reduces(rank: int, n: int) -> None:
    gloo, shm = dist.new_group(backend="gloo"), dist.group.WORLD
    for dtype in COMBINED:
        for num in SIZES if dtype in (torch.float32, torch.bfloat16) else (1000, 40_000):
            ops = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
            if not dtype.is_floating_point:
                ops += [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
            for op in ops:
                mine = small_whole_numbers(num, dtype, rank)
                theirs = mine.clone()
                dist.all_reduce(theirs, op, group=gloo)
                for kind in ("staged", "in place", "async", "strided"):
                    ours = mine.clone()
                    if kind == "in place":
                        ours = shm.empty(num + 5, dtype)[5:].copy_(mine)
                    if kind == "strided":
                        ours = torch.zeros(num, 2, dtype=dtype)[:, 1].copy_(mine)
                    work = dist.all_reduce(ours, op, async_op=kind == "async")
                    if work is not None:
                        work.wait()
                    assert torch.equal(ours, theirs), (dtype, num, op, kind)


def bits_are_the_same_everywhere(rank: int, n: int) -> None:
    gloo, shm = dist.new_group(backend="gloo"), dist.group.WORLD
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for num in (777, 200_003):
            mine = torch.randn(num, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
            everyone = [torch.empty_like(mine) for _ in range(n)]
            dist.all_gather(everyone, mine, group=gloo)
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            total = everyone[0].to(wide)
            for each in everyone[1:]:  # in rank order, rounded once
                total = total + each.to(wide)
            for average in (False, True):
                wanted = (total * (1.0 / n) if average else total).to(dtype)
                for ours in (mine.clone(), shm.empty(num, dtype).copy_(mine)):
                    dist.all_reduce(ours, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
                    assert torch.equal(ours, wanted), (dtype, num, average)


def roots(rank: int, n: int) -> None:
    gloo, shm = dist.new_group(backend="gloo"), dist.group.WORLD
    for root in range(n):
        for num in SIZES:
            for dtype in MOVED:
                mine = small_whole_numbers(num, dtype, rank + 9 * root)
                theirs, ours = mine.clone(), mine.clone()
                in_place = shm.empty(num, dtype).copy_(mine)
                dist.broadcast(theirs, root, group=gloo)
                for tensor in (ours, in_place):
                    dist.broadcast(tensor, root)
                    assert torch.equal(tensor, theirs), ("broadcast", root, num, dtype)

                theirs = [torch.zeros_like(mine) for _ in range(n)] if rank == root else None
                ours = [torch.zeros_like(mine) for _ in range(n)] if rank == root else None
                dist.gather(mine, theirs, root, group=gloo)
                dist.gather(mine, ours, root)
                assert rank != root or all(map(torch.equal, ours, theirs)), ("gather", root, num, dtype)

                given = [mine + r for r in range(n)] if dtype != torch.bool else [mine] * n
                theirs, ours = torch.zeros_like(mine), torch.zeros_like(mine)
                dist.scatter(theirs, given if rank == root else None, root, group=gloo)
                dist.scatter(ours, given if rank == root else None, root)
                assert torch.equal(ours, theirs), ("scatter", root, num, dtype)
            mine = small_whole_numbers(num, torch.float32, rank)
            theirs = mine.clone()
            dist.reduce(theirs, root, group=gloo)
            for ours in (mine.clone(), shm.empty(num).copy_(mine)):
                dist.reduce(ours, root)
                assert torch.equal(ours, theirs if rank == root else mine), ("reduce", root, num)


def gathers_and_scatters(rank: int, n: int) -> None:
    gloo, shm = dist.new_group(backend="gloo"), dist.group.WORLD
    for num in SIZES:
        for dtype in MOVED:
            mine = small_whole_numbers(num, dtype, rank)
            theirs = [torch.zeros_like(mine) for _ in range(n)]
            dist.all_gather(theirs, mine, group=gloo)
            for given in (mine, shm.empty(num, dtype).copy_(mine)):
                ours, single = [torch.zeros_like(mine) for _ in range(n)], torch.zeros(n * num, dtype=dtype)
                dist.all_gather(ours, given)
                assert all(map(torch.equal, ours, theirs)), ("all_gather", num, dtype)
                dist.all_gather_into_tensor(single, given)
                assert torch.equal(single, torch.cat(theirs)), ("all_gather_into_tensor", num, dtype)
            strided = [torch.zeros(num, 3, dtype=dtype)[:, 1] for _ in range(n)]
            dist.all_gather(strided, mine)
            assert all(map(torch.equal, strided, theirs)), "strided outputs"
            # The input as a part of the output.
            single = torch.zeros(n * num, dtype=dtype)
            single[rank * num : (rank + 1) * num] = mine
            dist.all_gather_into_tensor(single, single[rank * num : (rank + 1) * num])
            assert torch.equal(single, torch.cat(theirs))

        mine = small_whole_numbers(n * num, torch.float32, rank)
        theirs = mine.clone()
        dist.all_reduce(theirs, group=gloo)
        wanted = theirs.view(n, num)[rank]
        for given in (mine, shm.empty(n * num).copy_(mine)):
            ours, single = torch.zeros(num), torch.zeros(num)
            dist.reduce_scatter(ours, list(given.view(n, num).unbind()))
            dist.reduce_scatter_tensor(single, given)
            assert torch.equal(ours, wanted) and torch.equal(single, wanted), ("reduce_scatter", num)
            assert torch.equal(given, mine), "the input changed"
        dist.reduce_scatter_tensor(single, mine, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(single, wanted / n)


def uneven(rank: int, n: int) -> None:
    gloo = dist.new_group(backend="gloo")
    for scale in (1, 5000, 60_000):
        sizes = [scale * (r + 1) for r in range(n)]
        # Lists of different sizes; gloo cannot.
        ours = [torch.zeros(size) for size in sizes]
        dist.all_gather(ours, torch.full((sizes[rank],), float(rank)))
        assert all(torch.equal(each, torch.full_like(each, float(r))) for r, each in enumerate(ours))
        mine = torch.zeros(sizes[rank])
        dist.reduce_scatter(mine, [torch.full((size,), float(rank + r)) for r, size in enumerate(sizes)])
        assert torch.equal(mine, torch.full_like(mine, float(sum(range(n)) + n * rank)))

        gives = [scale * ((rank + 2 * r) % 4) for r in range(n)]  # nothing for some
        takes = [scale * ((r + 2 * rank) % 4) for r in range(n)]
        given = torch.arange(sum(gives) * 2, dtype=torch.float32).view(-1, 2) + 1000 * rank
        theirs, ours = torch.zeros(sum(takes), 2), torch.zeros(sum(takes), 2)
        dist.all_to_all_single(theirs, given, takes, gives, group=gloo)
        dist.all_to_all_single(ours, given, takes, gives)
        assert torch.equal(ours, theirs)
        lists = [torch.zeros(size, 2) for size in takes]
        dist.all_to_all(lists, list(given.split(gives)))
        assert torch.equal(torch.cat(lists), theirs)
        even = torch.arange(n * scale, dtype=torch.int64) + 7 * rank
        theirs, ours = torch.zeros_like(even), torch.zeros_like(even)
        dist.all_to_all_single(theirs, even, group=gloo)
        dist.all_to_all_single(ours, even)
        assert torch.equal(ours, theirs)
        # One rank says the splits, the others leave them out.
        splits = [scale] * n if rank == 0 else None
        dist.all_to_all_single(ours.zero_(), even, splits, splits)
        assert torch.equal(ours, theirs)


def coalesced(rank: int, n: int) -> None:
    tensors = [torch.full((size,), float(rank)) for size in (3, 100, 70_000, 5)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(torch.equal(t, torch.full_like(t, float(sum(range(n))))) for t in tensors)
    inputs = [torch.full((size,), float(rank)) for size in (4, 30_000)]
    outputs = [torch.zeros(n * len(each)) for each in inputs]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, given in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, given)
    manager.wait()
    for output, given in zip(outputs, inputs, strict=True):
        assert torch.equal(output, torch.arange(n, dtype=torch.float32).repeat_interleave(len(given)))
    scattered = [torch.zeros_like(given) for given in inputs]
    with dist._coalescing_manager():
        for output, given in zip(scattered, outputs, strict=True):
            dist.reduce_scatter_tensor(output, given)
    assert all(torch.equal(each, torch.full_like(each, float(n * rank))) for each in scattered)

    gloo = dist.new_group(backend="gloo")
    found = []
    for group in (gloo, dist.group.WORLD):
        lists = [[torch.zeros(size) for size in (2, 30_000)] for _ in range(n)]  # by rank, then by input
        mine = [torch.full((size,), float(10 * rank + i)) for i, size in enumerate((2, 30_000))]
        dist.all_gather_coalesced(lists, mine, group=group)
        found.append(lists)
    for theirs, ours in zip(*found, strict=True):
        assert all(map(torch.equal, theirs, ours))


def overlapping(rank: int, n: int) -> None:
    """Outputs that lie in inputs: at this rank's own piece, at another's, across the border of two."""
    group = dist.group.WORLD
    for num in (500, 400_000):
        values = torch.arange(n * num) % 1000
        for start in (0, num, num // 2):
            for make in (torch.empty, group.empty):
                given = make(n * num).copy_(values + rank)
                dist.reduce_scatter_tensor(given[start : start + num], given)
                wanted = (values * n + sum(range(n)))[rank * num :][:num].float()
                assert torch.equal(given[start : start + num], wanted), ("reduce_scatter", num, start, make)
                output = make(n * num).fill_(-1)
                output[start : start + num] = values[:num] + rank
                dist.all_gather_into_tensor(output, output[start : start + num])
                assert torch.equal(output.view(n, num), torch.stack([values[:num].float() + r for r in range(n)]))
        both = torch.arange(n * num) + 7 * rank
        dist.all_to_all_single(both, both)
        assert torch.equal(both, torch.cat([torch.arange(num) + rank * num + 7 * r for r in range(n)]))


def misaligned(rank: int, n: int) -> None:
    """Elements at odd addresses, as a file format may have them."""
    for num in (100, 100_000):
        memory = bytearray(4 * num + 1)
        tensor = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=num).fill_(rank)
        for _ in range(8):  # also when the same call comes again
            dist.all_reduce(tensor.fill_(rank))
            assert torch.equal(tensor, torch.full((num,), float(sum(range(n)))))
        output = torch.zeros(n * num)
        dist.all_gather_into_tensor(output, tensor)
        dist.reduce_scatter_tensor(tensor.fill_(rank), output)
        assert torch.equal(tensor, torch.full((num,), float(n * sum(range(n)))))


def bound_to_different_cores(rank: int, n: int) -> None:
    """Ranks that count different numbers of cores for themselves still cut tensors in the same chunks."""
    cores = sorted(os.sched_getaffinity(0))
    if rank == 0:
        os.sched_setaffinity(0, cores[:1])
    group = dist.new_group(backend="shm")
    tensor = torch.arange(2_000_000.0) * (rank + 1)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.arange(2_000_000.0) * sum(range(n + 1)))


def waits_in_callbacks(rank: int, n: int) -> None:
    """What is chained to a future may use the group, and wait for what it starts, also in turn."""

    def again(depth: int, future: torch.futures.Future) -> Tensor:
        work = dist.all_reduce(future.value()[0], async_op=True)
        chained = work.get_future().then(lambda f: again(depth - 1, f)) if depth else work.get_future()
        found = chained.wait()
        dist.barrier()
        return found if depth else found[0]

    for depth in (0, 2):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work.get_future().then(lambda f, depth=depth: again(depth, f)).wait().tolist() == [n ** (depth + 2)] * 4
    order: list[int] = []
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(20)]
    futures = [work.get_future().then(lambda _, i=i: order.append(i)) for i, work in enumerate(works)]
    torch.futures.wait_all(futures)
    assert order == list(range(20)) or works[0].is_completed()
    assert threading.active_count() < 12


def lets_go(rank: int, n: int) -> None:
    """Tensors go when their work is done, and a group whose last reference goes on its own thread is given back."""
    tensor = torch.ones(100_000)
    gone = weakref.ref(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    del tensor, work
    assert until(lambda: gone() is None), "kept until the next job"

    before = held()
    limit = datetime.timedelta(seconds=LIMIT_S)
    group = SharedMemoryGroup(dist.PrefixStore("x/", dist.group.WORLD.get_group_store()), rank, n, limit)
    options = dist.AllreduceOptions()
    options.asyncOp = True
    work = group.allreduce([torch.ones(8_000_000)], options)
    del group
    work.wait()
    del work
    assert until(lambda: not held() - before), held() - before


def until(condition) -> bool:
    end = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return condition()


def forks(rank: int, n: int) -> None:
    """A child's calls are refused, do not count as its parent's, and take nothing that was sent to the parent."""
    group = dist.group.WORLD
    assert isinstance(group, SharedMemoryGroup)
    large = group.empty(1_000_000).fill_(rank)
    dist.barrier()
    if rank:  # it is on its way to rank 0 now, which has not taken it
        place = group._resources.arena.locate(large.data_ptr(), large.nbytes)
        assert place is not None
        group._resources.arena.announce(place[0])
    dist.barrier()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            for is_async in (False, True):
                with pytest.raises(UsageError, match="forked"):
                    dist.all_reduce(torch.full((4,), 100.0), async_op=is_async)
            for call in (
                lambda: group.empty(70_000),
                lambda: dist.isend(torch.ones(3), (rank + 1) % n),
                lambda: dist.irecv(torch.ones(3), (rank + 1) % n),
                lambda: dist.irecv(torch.ones(3)),
            ):
                with pytest.raises(UsageError, match="forked"):
                    call()
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [n] * 4
    dist.all_reduce(large)
    assert (large == sum(range(n))).all()
    received = torch.zeros(3)
    sent = dist.isend(torch.full((3,), float(rank)), (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    assert sent is not None and sent.wait() and (received == (rank - 1) % n).all()


def complex_and_sparse(rank: int, n: int) -> None:
    value = torch.full((70_000,), complex(rank, 1))
    dist.all_reduce(value)
    assert torch.equal(value, torch.full_like(value, complex(sum(range(n)), n)))
    gathered = [torch.zeros(5, dtype=torch.complex64) for _ in range(n)]
    dist.all_gather(gathered, torch.full((5,), complex(0, rank)))
    assert [each[0].imag.item() for each in gathered] == list(range(n))
    sparse = torch.sparse_coo_tensor([[rank]], [float(rank + 1)], (n,))
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.arange(1.0, n + 1))
    generator = torch.Generator().manual_seed(rank)
    for rows in (0, 3, 40_000):  # rank 1 has none at all; the last do not fit one shot
        count = 0 if rank == 1 else rows + rank
        indices = torch.randint(0, 50, (2, count), generator=generator)  # some of them twice
        values = torch.randint(-9, 9, (count, 3), generator=generator).double()
        sparse = torch.sparse_coo_tensor(indices, values, (50, 60, 3))
        dense = sparse.to_dense()
        dist.all_reduce(dense)
        work = dist.all_reduce(sparse, async_op=True)
        assert work is not None and work.wait() and torch.equal(sparse.to_dense(), dense)
    with pytest.raises(UsageError, match="sparse"):
        dist.all_reduce(torch.sparse_coo_tensor([[rank]], [1.0], (n,)), dist.ReduceOp.MAX)


def works(rank: int, n: int) -> None:
    """Works end in order, tell their results, and futures carry them."""
    tensors = [torch.full((50_000 + i,), float(rank)) for i in range(8)]
    pending = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    small = torch.ones(1)
    dist.all_reduce(small)  # after those that wait
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in pending)
    assert small.item() == n
    assert all(torch.equal(tensor, torch.full_like(tensor, float(sum(range(n))))) for tensor in tensors)
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait()[0].item() == 2 * n
    assert work.result()[0][0].item() == n
    assert dist.barrier(async_op=True).wait()


def names(rank: int, n: int) -> None:
    group = dist.group.WORLD
    assert dist.get_backend() == "shm" and group.name() == "shm" and group._get_backend_name() == "shm"
    assert (group.rank(), group.size(), dist.get_rank(), dist.get_world_size()) == (rank, n, rank, n)
    assert group.group_name and isinstance(group.group_desc, str)
    assert dist.distributed_c10d._get_object_coll_device(group) == "cpu"
    assert group._get_backend(torch.device("cpu")) is group
    with pytest.raises(RuntimeError, match="CPU tensors"):
        group._get_backend(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="meta"):
        dist.all_reduce(torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="float32"):
        dist.all_reduce(torch.ones(3, dtype=torch.uint16))
    with pytest.raises(ValueError, match="whole numbers"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64), op=dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="for each of the"):
        dist.all_gather([torch.zeros(1)] * (n + 1), torch.zeros(1))
    # Refused before anything was said to the peers: the group still works.
    group.set_timeout(datetime.timedelta(seconds=LIMIT_S))
    assert group.options._timeout == datetime.timedelta(seconds=LIMIT_S)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [n] * 3
    group.monitored_barrier(datetime.timedelta(seconds=LIMIT_S), wait_all_ranks=True)
    asks_for_gloo = not hasattr(dist, "_reconfigure")  # PyTorch before 2.14 asks for the backend's name
    with pytest.raises(ValueError, match="GLOO") if asks_for_gloo else contextlib.nullcontext():
        dist.monitored_barrier()


def in_place_memory(rank: int, n: int) -> None:
    """Tensors of the group keep working when they come and go, in different numbers on different ranks."""
    group = dist.group.WORLD
    kept = [group.empty(1000) for _ in range(rank)]
    for turn in range(20):
        tensor = group.empty(100_000 + turn, torch.float32).fill_(rank)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, float(sum(range(n)))))
        mixed = group.empty(50_000).fill_(rank) if rank % 2 == 0 else torch.full((50_000,), float(rank))
        dist.all_reduce(mixed)  # in place on some ranks only: staged on all
        assert torch.equal(mixed, torch.full_like(mixed, float(sum(range(n)))))
        out = torch.zeros(n * 30_000)
        dist.all_gather_into_tensor(out, group.empty(30_000).fill_(rank))
        assert torch.equal(out, torch.arange(n, dtype=torch.float32).repeat_interleave(30_000))
    assert len(kept) == rank


def point_to_point(rank: int, n: int) -> None:
    """Sends and receives as torch.distributed offers them; what they carry is tested in test_shm_transfers.py."""
    right, left = (rank + 1) % n, (rank - 1) % n
    for num in (1, 1000, 700_001):
        mine, got = torch.full((num,), float(rank)), torch.zeros(num)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, got, left)])
        for work in works:
            assert work.wait() and work.is_completed() and work.is_success()
        assert torch.equal(got, torch.full((num,), float(left)))
        strided = torch.zeros(num, 2)[:, 0]
        if rank == 0:
            for work in (dist.isend(mine, 1, tag=5), dist.isend(mine + 1, 1, tag=6)):
                work.wait()
        elif rank == 1:
            dist.recv(strided, 0, tag=6)
            assert torch.equal(strided, torch.ones(num))
            dist.recv(strided, 0, tag=5)
            assert torch.equal(strided, torch.zeros(num))
        if rank == 0:
            senders = {dist.recv(got) for _ in range(n - 1)}
            assert senders == set(range(1, n))
        else:
            dist.send(mine, 0)
        future = dist.isend(mine, right, tag=9).get_future()
        assert dist.irecv(got, left, tag=9).get_future().wait()[0] is got
        assert future.wait()[0] is mine
        value = torch.full((3,), complex(1, rank))
        if rank == 0:
            dist.send(value, 1)
        elif rank == 1:
            dist.recv(value, 0)
            assert value[0].item() == 1
        dist.barrier()


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "case",
    [
        *(all_reduces, roots, gathers_and_scatters, uneven, coalesced, works, in_place_memory, point_to_point),
        *(overlapping, misaligned),
    ],
    ids=lambda case: case.__name__,
)
def test_equals_gloo(case, num_ranks: int) -> None:
    run_shm_ranks(case, num_ranks)


def one_cannot_read(rank: int, n: int, case) -> None:
    """If one rank cannot read the memory of the others, all copy through the rings."""
    dist.group.WORLD._resources.link.reads = rank != n - 1
    case(rank, n)


@pytest.mark.parametrize("case", [roots, gathers_and_scatters, uneven, overlapping], ids=lambda case: case.__name__)
def test_without_reading_other_processes(case) -> None:
    run_shm_ranks(one_cannot_read, 3, case)


def secret(num: int) -> Tensor:
    """A tensor in memory that the kernel lets nobody else read, as it does with what CUDA has pinned (man 2 memfd_secret)."""
    fd = ctypes.CDLL(None).syscall(447, 0)
    if fd < 0:
        raise OSError("no memfd_secret")
    os.ftruncate(fd, 4 * num)
    with contextlib.closing(os.fdopen(fd, "r+b", 0)):
        return torch.frombuffer(mmap.mmap(fd, 4 * num), dtype=torch.float32)


def not_for_others(rank: int, n: int) -> bool:
    """The kernel refuses to have the memory of one rank's tensors read: its bytes go another way, those of the others too."""
    num = 60_000
    whole, given, kept = torch.empty(num), torch.empty(num // n), torch.empty(num)
    if rank == 1:
        try:
            whole, given = secret(num), secret(num // n)
        except OSError:
            dist.broadcast_object_list([False], 1)
            return False
        assert not is_readable(whole.data_ptr(), 4 * num) and is_readable(kept.data_ptr(), 4 * num)
    there = [True]
    dist.broadcast_object_list(there, 1)
    for i in range(3 if there[0] else 0):
        for root in range(n):
            whole.fill_(rank + i)
            dist.broadcast(whole, root)
            assert whole.eq(root + i).all()
        given.fill_(rank + i)
        for target in (whole, kept):
            dist.all_gather_single(target, given)
            assert target.view(n, -1).eq(torch.arange(n).view(n, 1) + i).all()
        dist.all_to_all_single(kept, whole)
        assert kept.view(n, -1).eq(rank + i).all()
        parts = list(torch.full((num,), rank + i, dtype=torch.float32).split(num // n))
        parts[1] = given  # the first and the last lie as if all were one
        dist.all_to_all(list(kept.view(n, -1)), parts)
        assert kept.view(n, -1).eq(torch.arange(n).view(n, 1) + i).all()
        whole.fill_(rank)
        dist.all_reduce(whole)
        dist.reduce_scatter_single(given, whole)
        assert given.eq(n * sum(range(n))).all()
        if rank == 1:
            dist.send(whole, 0)
        elif rank == 0:
            dist.recv(kept, 1)
            assert kept.eq(sum(range(n))).all()
    return there[0]


def test_memory_that_the_kernel_lets_nobody_read() -> None:
    if not all(run_shm_ranks(not_for_others, 3)):
        pytest.skip("this kernel has no memfd_secret")


@pytest.mark.parametrize("case", [bits_are_the_same_everywhere, complex_and_sparse, uneven], ids=lambda c: c.__name__)
def test_more_ranks_than_cores(case) -> None:
    run_shm_ranks(case, 4)


@pytest.mark.parametrize(
    "case", [bound_to_different_cores, waits_in_callbacks, lets_go, forks], ids=lambda c: c.__name__
)
def test_processes_and_threads(case) -> None:
    run_shm_ranks(case, 2)


def test_names_and_refusals() -> None:
    run_shm_ranks(names, 2)


def test_a_group_of_one() -> None:
    run_shm_ranks(gathers_and_scatters, 1)
    run_shm_ranks(names, 1)
