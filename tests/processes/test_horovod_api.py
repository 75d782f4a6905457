"""Horovod's interface among real ranks: who am I, and all-reduce in every form, against plain torch expressions."""

from __future__ import annotations

import threading
import time
import warnings

import pytest
import torch

import guozhuang.compat.horovod.torch as hvd
from tests.processes.horovod_cases import check, of_all, of_rank, run_cases

DTYPES = [
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


def who_am_i(rank: int, size: int) -> None:
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.mpi_ops.is_homogeneous()
    assert not hasattr(hvd, "is_homogeneous")
    hvd.init()  # changes nothing
    assert hvd.size() == size


def what_is_built(rank: int, size: int) -> None:
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.ddl_built() or hvd.ccl_built())
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert isinstance(hvd.nccl_built(), int)
    assert (hvd.nccl_built() > 2000) == torch.distributed.is_nccl_available()
    with pytest.raises(ValueError, match="MPI"):
        hvd.mpi_threads_supported()


def sum_and_average_of_every_dtype(rank: int, size: int) -> None:
    for dtype in DTYPES:
        tensors = of_all(size, 17, 3, dtype=dtype)
        before = tensors[rank].clone()
        total = torch.stack([each.double() for each in tensors]).sum(0)
        summed = hvd.allreduce(tensors[rank], op=hvd.Sum)
        assert summed.dtype == dtype and torch.equal(tensors[rank], before)
        torch.testing.assert_close(summed.double(), total, rtol=0, atol=0)
        mean = total / size
        expected = mean if dtype.is_floating_point else mean.trunc()
        close = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-14}.get(dtype, 0.0)
        for found in (hvd.allreduce(tensors[rank]), hvd.allreduce(tensors[rank], op=hvd.Average)):
            torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)


def minimum_maximum_product(rank: int, size: int) -> None:
    for dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
        stacked = torch.stack(of_all(size, 5, 2, dtype=dtype))
        mine = stacked[rank].clone()
        assert torch.equal(hvd.allreduce(mine, op=hvd.Min), stacked.amin(0))
        assert torch.equal(hvd.allreduce(mine, op=hvd.Max), stacked.amax(0))
        torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Product), stacked.prod(0).to(dtype))


def truth_values(rank: int, size: int) -> None:
    stacked = torch.stack(of_all(size, 40, dtype=torch.bool))
    assert torch.equal(hvd.allreduce(stacked[rank], op=hvd.Max), stacked.any(0))
    assert torch.equal(hvd.allreduce(stacked[rank], op=hvd.Min), stacked.all(0))


def scalars_and_nothing(rank: int, size: int) -> None:
    assert hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum).item() == sum(range(size))
    assert hvd.allreduce(torch.zeros(0, 3)).shape == (0, 3)


def factors_before_and_after(rank: int, size: int) -> None:
    tensors = of_all(size, 11)
    expected = torch.stack(tensors).mul(0.5).sum(0).mul(3.0)
    found = hvd.allreduce(tensors[rank], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(found, expected)
    found = hvd.allreduce(tensors[rank], prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(found, expected / size)
    for dtype in (torch.int32, torch.int64):
        numbers = of_all(size, 30, dtype=dtype)
        scaled = torch.stack([(each.double() * 0.7).trunc() for each in numbers]).sum(0)
        found = hvd.allreduce(numbers[rank], op=hvd.Sum, prescale_factor=0.7)
        assert torch.equal(found, scaled.to(dtype))
        total = torch.stack(numbers).sum(0).double()
        found = hvd.allreduce(numbers[rank], op=hvd.Sum, postscale_factor=0.7)
        assert torch.equal(found, (total * 0.7).trunc().to(dtype))
    halves = [torch.full((4,), 30000.0 + each, dtype=torch.float16) for each in range(size)]
    found = hvd.allreduce(halves[rank], op=hvd.Sum, prescale_factor=1 / 64)
    torch.testing.assert_close(found, torch.stack([h.float() / 64 for h in halves]).sum(0).half(), rtol=2e-3, atol=0.5)


def in_place(rank: int, size: int) -> None:
    tensor = of_rank(rank, 6)
    result = hvd.allreduce_(tensor, op=hvd.Sum)
    assert result is tensor
    torch.testing.assert_close(tensor, torch.stack(of_all(size, 6)).sum(0))
    weight = torch.nn.Parameter(of_rank(rank, 6))  # a leaf that requires a gradient
    assert hvd.synchronize(hvd.allreduce_async_(weight, op=hvd.Sum)) is weight
    torch.testing.assert_close(weight.detach(), tensor)


def handles(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(of_rank(rank, 8), op=hvd.Sum)
    assert isinstance(handle, int)
    deadline = time.monotonic() + 20
    while not hvd.poll(handle):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    torch.testing.assert_close(hvd.synchronize(handle), torch.stack(of_all(size, 8)).sum(0))
    assert hvd.synchronize(handle) is None  # known no more
    assert hvd.synchronize(123456789) is None
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(handle)


def any_order_by_name(rank: int, size: int) -> None:
    names = [f"tensor.{number}" for number in range(20)]
    order = names if rank % 2 == 0 else names[::-1]
    handles = {name: hvd.allreduce_async(torch.full((3,), float(int(name[7:]) + rank)), name=name) for name in order}
    for name in names:
        expected = int(name[7:]) + (size - 1) / 2
        torch.testing.assert_close(hvd.synchronize(handles[name]), torch.full((3,), expected))


def from_several_threads(rank: int, size: int) -> None:
    results: dict[str, torch.Tensor] = {}

    def reduce(name: str) -> None:
        results[name] = hvd.allreduce(torch.ones(4), name=name, op=hvd.Sum)

    names = ["one", "two", "three"]
    threads = [threading.Thread(target=reduce, args=(n,)) for n in (names if rank else names[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(torch.equal(results[name], torch.full((4,), float(size))) for name in names)


def unnamed_and_named_mixed(rank: int, size: int) -> None:
    """See [Note: unnamed operations]: named ones in any number between unnamed ones."""
    early = hvd.allreduce_async(torch.ones(2), name="early", op=hvd.Sum) if rank == 0 else None
    unnamed = hvd.allreduce_async(torch.ones(2) * 2, op=hvd.Sum)
    late = early if early is not None else hvd.allreduce_async(torch.ones(2), name="early", op=hvd.Sum)
    assert hvd.synchronize(unnamed)[0] == 2 * size
    assert hvd.synchronize(late)[0] == size


def a_name_that_is_under_way(rank: int, size: int) -> None:
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


def what_cannot_be_sent(rank: int, size: int) -> None:
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


def deprecated_average(rank: int, size: int) -> None:
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


def groups(rank: int, size: int) -> None:
    shapes = [(3,), (2, 5), (1,), (4, 4, 2)]
    everyone = [of_all(size, *shape) for shape in shapes]
    mine = [each[rank].clone() for each in everyone]
    sums = [torch.stack(each).sum(0) for each in everyone]
    for found in (
        hvd.grouped_allreduce(mine, op=hvd.Sum),
        hvd.grouped_allreduce(mine, name="a group", op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum)),
    ):
        assert isinstance(found, list)
        for one, expected in zip(found, sums, strict=True):
            torch.testing.assert_close(one, expected)
    means = hvd.grouped_allreduce(mine, prescale_factor=2.0, postscale_factor=0.5)
    for one, expected in zip(means, sums, strict=True):
        torch.testing.assert_close(one, expected / size)
    copies = [each.clone() for each in mine]
    found = hvd.grouped_allreduce_(copies, op=hvd.Sum)
    assert all(one is copy for one, copy in zip(found, copies, strict=True))
    others = [each.clone() for each in mine]
    found = hvd.synchronize(hvd.grouped_allreduce_async_(others, op=hvd.Sum))
    for one, other, expected in zip(found, others, sums, strict=True):
        assert one is other
        torch.testing.assert_close(other, expected)
    with pytest.warns(DeprecationWarning):
        torch.testing.assert_close(hvd.grouped_allreduce(mine, average=True)[0], sums[0] / size)
    assert hvd.grouped_allreduce([torch.ones(2)], op=hvd.Sum)[0][0] == size  # a group of one


def compressed(rank: int, size: int) -> None:
    tensors = of_all(size, 50)
    found = hvd.allreduce(tensors[rank], compression=hvd.Compression.fp16)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack(tensors).mean(0), rtol=1e-3, atol=1e-3)
    numbers = of_all(size, 50, dtype=torch.int64)
    found = hvd.allreduce(numbers[rank], compression=hvd.Compression.fp16, op=hvd.Sum)
    assert torch.equal(found, torch.stack(numbers).sum(0))
    both = hvd.grouped_allreduce([tensors[rank], numbers[rank]], compression=hvd.Compression.fp16, op=hvd.Sum)
    assert [each.dtype for each in both] == [torch.float32, torch.int64]


def gradients(rank: int, size: int) -> None:
    """The gradient of an all-reduce is the all-reduce of the gradients, with the same operation and factors."""
    for op in (hvd.Sum, hvd.Average):
        for factors in ({}, {"prescale_factor": 0.5, "postscale_factor": 3.0}):
            tensor = of_rank(rank, 4, 3).requires_grad_()
            weights = of_all(size, 4, 3)
            (hvd.allreduce(tensor, op=op, **factors) * weights[rank]).sum().backward()
            expected = torch.stack(weights).sum(0) * (1 if op == hvd.Sum else 1 / size) * (1.5 if factors else 1)
            torch.testing.assert_close(tensor.grad, expected)
    tensors = [of_rank(rank, 3).requires_grad_(), of_rank(rank, 2, 2).requires_grad_()]
    first, second = hvd.grouped_allreduce(tensors)
    (first.sum() * (rank + 1) + second.sum() * 2).backward()
    torch.testing.assert_close(tensors[0].grad, torch.full((3,), (size + 1) / 2))
    torch.testing.assert_close(tensors[1].grad, torch.full((2, 2), 2.0))
    half = of_rank(rank, 3).requires_grad_()
    hvd.allreduce(half, compression=hvd.Compression.fp16).sum().backward()
    torch.testing.assert_close(half.grad, torch.ones(3))
    twice = of_rank(rank, 3).requires_grad_()  # the gradient of a gradient
    (first,) = torch.autograd.grad(hvd.allreduce(twice, op=hvd.Sum).square().sum(), twice, create_graph=True)
    first.sum().backward()
    torch.testing.assert_close(twice.grad, torch.full((3,), 2.0 * size * size))


def adaptive_sums(rank: int, size: int) -> None:
    """Orthogonal tensors are added, parallel ones averaged; tensor by tensor also in a group."""
    one = torch.zeros(size)
    one[rank] = rank + 1.0
    same = torch.full((5,), 2.0)
    torch.testing.assert_close(hvd.allreduce(one, op=hvd.Adasum), torch.arange(1.0, size + 1))
    torch.testing.assert_close(hvd.allreduce(same, op=hvd.Adasum), same)
    found = hvd.grouped_allreduce([one, same], op=hvd.Adasum)
    torch.testing.assert_close(found[0], torch.arange(1.0, size + 1))
    torch.testing.assert_close(found[1], same)


CASES = [
    who_am_i,
    what_is_built,
    sum_and_average_of_every_dtype,
    minimum_maximum_product,
    truth_values,
    scalars_and_nothing,
    factors_before_and_after,
    in_place,
    handles,
    any_order_by_name,
    from_several_threads,
    unnamed_and_named_mixed,
    a_name_that_is_under_way,
    what_cannot_be_sent,
    deprecated_average,
    groups,
    compressed,
    gradients,
    adaptive_sums,
]


@pytest.fixture(scope="module", params=[2, 3, 4])
def outcome(request):
    return run_cases(request.param, CASES)


# As it comes; and with everything that makes it faster switched off, in the rhythm of a clock.
OTHERWISE = {
    "gloo": {"GUOZHUANG_BACKEND": "gloo"},
    "plain": {
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_CYCLE_TIME": "1",
        "HOROVOD_DISABLE_GROUP_FUSION": "1",
    },
}


@pytest.fixture(scope="module", params=OTHERWISE)
def otherwise(request):
    return run_cases(2, CASES, env=OTHERWISE[request.param])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_ranks(outcome, case):
    check(outcome, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_ranks_otherwise(otherwise, case):
    check(otherwise, case)
