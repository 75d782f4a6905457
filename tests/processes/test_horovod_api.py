"""Horovod's interface among real ranks: who am I, and all-reduce in every form, against plain torch expressions."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import guozhuang.compat.horovod.torch as hvd
from tests.processes.horovod_cases import GLOO, PLAIN, USUAL, as_tests, of_all, of_rank
from tests.processes.horovod_verbs import check_verbs
from tests.waiting import LIMIT_S, until


def case_who_am_i(rank: int, size: int) -> None:
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.mpi_ops.is_homogeneous()
    assert not hasattr(hvd, "is_homogeneous")
    hvd.init()  # changes nothing
    assert hvd.size() == size


def case_what_is_built(rank: int, size: int) -> None:
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.ddl_built() or hvd.ccl_built())
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert isinstance(hvd.nccl_built(), int)
    assert (hvd.nccl_built() > 2000) == torch.distributed.is_nccl_available()
    with pytest.raises(ValueError, match="MPI"):
        hvd.mpi_threads_supported()


def case_every_reduction(rank: int, size: int) -> None:
    """By the words of this interface; the arithmetic of every dtype is the engine's, see test_named.py."""
    tensors = of_all(size, 5, 2)
    stacked, before = torch.stack(tensors), tensors[rank].clone()
    results = {hvd.Average: stacked.mean(0), hvd.Min: stacked.amin(0), hvd.Max: stacked.amax(0)}
    for op, expected in {**results, hvd.Product: stacked.prod(0)}.items():
        torch.testing.assert_close(hvd.allreduce(tensors[rank], op=op), expected)
        assert torch.equal(tensors[rank], before)
    expected = stacked.mul(0.5).sum(0).mul(3.0)
    found = hvd.allreduce(tensors[rank], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(found, expected)
    numbers = torch.stack(of_all(size, 30, dtype=torch.int64))
    scaled = (numbers.double() * 0.7).trunc().sum(0).long()
    assert torch.equal(hvd.allreduce(numbers[rank], op=hvd.Sum, prescale_factor=0.7), scaled)
    halves = [torch.full((4,), 30000.0 + each, dtype=torch.float16) for each in range(size)]
    found = hvd.allreduce(halves[rank], op=hvd.Sum, prescale_factor=1 / 64)
    torch.testing.assert_close(found, torch.stack([h.float() / 64 for h in halves]).sum(0).half(), rtol=2e-3, atol=0.5)


def case_every_form_of_every_collective(rank: int, size: int) -> None:
    check_verbs(range(size), rank)


def case_handles(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(of_rank(rank, 8), op=hvd.Sum)
    assert isinstance(handle, int)
    until(lambda: hvd.poll(handle), LIMIT_S)
    torch.testing.assert_close(hvd.synchronize(handle), torch.stack(of_all(size, 8)).sum(0))
    assert hvd.synchronize(handle) is None  # known no more
    assert hvd.synchronize(123456789) is None
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(handle)


def case_unnamed_and_named_mixed(rank: int, size: int) -> None:
    """See [Note: unnamed operations]: named ones in any number between unnamed ones."""
    early = hvd.allreduce_async(torch.ones(2), name="early", op=hvd.Sum) if rank == 0 else None
    unnamed = hvd.allreduce_async(torch.ones(2) * 2, op=hvd.Sum)
    late = early if early is not None else hvd.allreduce_async(torch.ones(2), name="early", op=hvd.Sum)
    assert hvd.synchronize(unnamed)[0] == 2 * size
    assert hvd.synchronize(late)[0] == size


def case_a_name_that_is_under_way(rank: int, size: int) -> None:
    # The other ranks come later, so that the first one is under way for certain.
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        with pytest.raises(ValueError, match="twice"):
            hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    assert torch.equal(hvd.synchronize(handle), torch.full((2,), float(size)))
    assert hvd.allreduce(torch.ones(1), name="twice", op=hvd.Sum).item() == size  # free again


def case_what_differs_between_ranks(rank: int, size: int) -> None:
    """All ranks hear of it and go on; every property is compared by the engine, see test_named_mismatches.py."""
    rows, columns = torch.ones(4 + (rank == 1), 2), torch.ones(size, 2 + (rank == 1))
    numbers = torch.ones(3, dtype=torch.float32 if rank == 0 else torch.int32)
    wrong: dict[str, Callable[[], object]] = {
        "data types": lambda: hvd.allreduce(numbers),
        "allreduce tensor shapes": lambda: hvd.allreduce(rows),
        "reduce operations": lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if rank else hvd.Max),
        "prescale": lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + rank),
        "postscale": lambda: hvd.allreduce(torch.ones(2), postscale_factor=1.0 + rank),
        "group sizes": lambda: hvd.grouped_allreduce([torch.ones(2)] * (2 + (rank == 1))),
        "allgather tensor shapes": lambda: hvd.allgather(columns),
        "broadcast tensor shapes": lambda: hvd.broadcast(rows, 0),
        "broadcast root ranks": lambda: hvd.broadcast(torch.ones(2), min(rank, 1)),
        "alltoall tensor shapes": lambda: hvd.alltoall(columns),
        "reducescatter tensor shapes": lambda: hvd.reducescatter(rows),
    }
    for text, call in wrong.items():
        with pytest.raises(hvd.HorovodInternalError, match=f"(?s)^Mismatched {text}.*rank 0.*rank 1") as raised:
            call()
        assert isinstance(raised.value, RuntimeError)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == size
    good = [hvd.allreduce_async(torch.ones(3), name=f"good.{n}", op=hvd.Sum) for n in range(3)]
    bad = hvd.allreduce_async(torch.ones(3 + rank), name="bad")
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
        hvd.synchronize(bad)
    assert hvd.synchronize(bad) is None
    assert all(torch.equal(hvd.synchronize(each), torch.full((3,), float(size))) for each in good)
    for _ in range(3):  # a name can be used again, and what was remembered under it is not taken for what comes now
        assert hvd.allreduce(torch.ones(1), name="bad", op=hvd.Sum).item() == size
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched allreduce tensor shapes"):
        hvd.allreduce(torch.ones(3 + (rank == 0)), name="bad")


def case_what_cannot_be_sent(rank: int, size: int) -> None:
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        with pytest.raises(ValueError, match="contiguous"):
            call(torch.zeros(4, 4).t()[:, :2])
        with pytest.raises(ValueError, match=r"dtype.*complex64"):
            call(torch.zeros(3, dtype=torch.complex64))
        with pytest.raises(ValueError, match="op"):
            call(torch.zeros(3), op=17)
        with pytest.raises(ValueError, match="average"):
            call(torch.zeros(3), average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match=r"takes tensors.*'int'"):
            call(3)
        with pytest.raises(ValueError, match=r"op is none of the reductions .got 'sum'"):
            call(torch.zeros(3), op="sum")
        with pytest.raises(ValueError, match=r"prescale_factor is a number .got 'a'"):
            call(torch.zeros(3), prescale_factor="a")
        with pytest.raises(ValueError, match=r"process_set is no object.*of int .got 3"):
            call(torch.zeros(3), process_set=3)
    with pytest.raises(ValueError, match=r"postscale_factor is a number .got 'a'"):
        hvd.reducescatter(torch.zeros(3), postscale_factor="a")
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        with pytest.raises(ValueError, match=f"dense.*{layout}"):
            hvd.allreduce_async(torch.zeros(2, 2).to_sparse(layout=layout))
    with pytest.raises(ValueError, match="list"):
        hvd.grouped_allreduce([])
    with pytest.raises(ValueError, match="contiguous"):
        hvd.grouped_allreduce([torch.zeros(2), torch.zeros(4, 4).t()])
    if rank == 0:  # what one rank may not submit is not counted there
        with pytest.raises(ValueError, match="contiguous"):
            hvd.allreduce(torch.zeros(4, 4).t())
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def case_deprecated_average(rank: int, size: int) -> None:
    for average, expected in ((True, (size - 1) / 2), (False, sum(range(size)))):
        with pytest.warns(DeprecationWarning, match="average") as record:
            found = hvd.allreduce(torch.tensor([float(rank)]), average=average)
        assert found.item() == expected
        assert record[0].filename == __file__  # where the argument is
    now = [hvd.allreduce_, hvd.grouped_allreduce, hvd.grouped_allreduce_]
    later = [hvd.allreduce_async, hvd.allreduce_async_, hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_]
    for call in now + later:
        tensor = torch.ones(1)
        with pytest.warns(DeprecationWarning, match="average") as record:
            found = call([tensor] if "grouped" in call.__name__ else tensor, average=False)
        assert [each.filename for each in record] == [__file__]
        found = hvd.synchronize(found) if call in later else found
        assert (found[0] if "grouped" in call.__name__ else found).item() == size
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.allreduce(torch.ones(1))


def case_groups(rank: int, size: int) -> None:
    shapes = [(3,), (2, 5), (1,), (4, 4, 2)]
    everyone = [of_all(size, *shape) for shape in shapes]
    mine = [each[rank].clone() for each in everyone]
    sums = [torch.stack(each).sum(0) for each in everyone]
    for one, expected in zip(hvd.grouped_allreduce(mine, name="a group", op=hvd.Sum), sums, strict=True):
        torch.testing.assert_close(one, expected)
    with pytest.warns(DeprecationWarning):
        torch.testing.assert_close(hvd.grouped_allreduce(mine, average=True)[0], sums[0] / size)
    assert hvd.grouped_allreduce([torch.ones(2)], op=hvd.Sum)[0][0] == size  # a group of one


def case_compressed(rank: int, size: int) -> None:
    tensors = of_all(size, 50)
    found = hvd.allreduce(tensors[rank], compression=hvd.Compression.fp16)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack(tensors).mean(0), rtol=1e-3, atol=1e-3)
    numbers = of_all(size, 50, dtype=torch.int64)
    found = hvd.allreduce(numbers[rank], compression=hvd.Compression.fp16, op=hvd.Sum)
    assert torch.equal(found, torch.stack(numbers).sum(0))
    both = hvd.grouped_allreduce([tensors[rank], numbers[rank]], compression=hvd.Compression.fp16, op=hvd.Sum)
    assert [each.dtype for each in both] == [torch.float32, torch.int64]


def case_gradients(rank: int, size: int) -> None:
    """The gradient of a compressed all-reduce, and the gradient of a gradient."""
    half = of_rank(rank, 3).requires_grad_()
    hvd.allreduce(half, compression=hvd.Compression.fp16).sum().backward()
    torch.testing.assert_close(half.grad, torch.ones(3))
    twice = of_rank(rank, 3).requires_grad_()  # the gradient of a gradient
    (first,) = torch.autograd.grad(hvd.allreduce(twice, op=hvd.Sum).square().sum(), twice, create_graph=True)
    first.sum().backward()
    torch.testing.assert_close(twice.grad, torch.full((3,), 2.0 * size * size))


def case_adaptive_sums(rank: int, size: int) -> None:
    """Orthogonal tensors are added, parallel ones averaged; tensor by tensor also in a group."""
    one = torch.zeros(size)
    one[rank] = rank + 1.0
    same = torch.full((5,), 2.0)
    torch.testing.assert_close(hvd.allreduce(one, op=hvd.Adasum), torch.arange(1.0, size + 1))
    torch.testing.assert_close(hvd.allreduce(same, op=hvd.Adasum), same)
    found = hvd.grouped_allreduce([one, same], op=hvd.Adasum)
    torch.testing.assert_close(found[0], torch.arange(1.0, size + 1))
    torch.testing.assert_close(found[1], same)


test_ranks = as_tests(globals(), USUAL | {"2 over gloo": GLOO, "2, plain": PLAIN}, slow=())
