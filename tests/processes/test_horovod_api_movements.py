"""Horovod's interface among real ranks: what moves tensors and does not add them up, and reduce-scatter."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import guozhuang.compat.horovod.torch as hvd
from guozhuang.compat.horovod.torch import submitting
from guozhuang.gradients.named import Handle, NamedChannel
from tests.processes.horovod_cases import GLOO, USUAL, as_tests, of_all, of_rank
from tests.waiting import until


def case_gather_different_rows(rank: int, size: int) -> None:
    parts = [of_rank(each, each * 2 + 1, 3) for each in range(size)]
    assert torch.equal(hvd.allgather(parts[rank], name="rows"), torch.cat(parts))
    parts = [of_rank(each, 0 if each == 0 else each, 3) for each in range(size)]  # none on rank 0; the same name again
    assert torch.equal(hvd.allgather(parts[rank], name="rows"), torch.cat(parts))


def case_a_gradient_that_fails(rank: int, size: int) -> None:
    """What had begun before is waited for."""
    tensor = of_rank(rank, 2).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submitting, "reducing", fails)
        with pytest.raises(hvd.HorovodInternalError, match="lost"):
            hvd.allgather(tensor).sum().backward()
    number = hvd.allreduce_async(torch.ones(1))
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(number - 1)
    hvd.synchronize(number)


def fails(*args: object, **kwargs: object) -> None:
    raise hvd.HorovodInternalError("a peer is lost")


def case_gather_of_scalars(rank: int, size: int) -> None:
    for call in (hvd.allgather, hvd.reducescatter):
        with pytest.raises(hvd.HorovodInternalError, match="rank-zero"):
            call(torch.tensor(1.0))
    with pytest.raises(hvd.HorovodInternalError, match="rank-zero"):
        hvd.alltoall(torch.tensor(1.0))


def case_broadcasts(rank: int, size: int) -> None:
    for root in range(size):
        assert torch.equal(hvd.broadcast(of_rank(rank, 3), root), of_rank(root, 3))
    assert hvd.broadcast(torch.tensor(float(rank)), size - 1).item() == size - 1
    for wrong in (-1, size):
        with pytest.raises(ValueError, match="root_rank"):
            hvd.broadcast(torch.zeros(1), wrong)


def case_broadcast_gradients(rank: int, size: int) -> None:
    for root in (0, size - 1):
        tensor = of_rank(rank, 5).requires_grad_()
        (hvd.broadcast(tensor, root) * torch.inf).sum().backward()
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.full((5,), torch.inf) if rank == root else torch.zeros(5))
        # The gradient of a gradient, to which every rank contributes.
        (first,) = torch.autograd.grad(hvd.broadcast(tensor, root).square().sum(), tensor, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), tensor)
        torch.testing.assert_close(second, torch.full((5,), 2.0 / size if rank == root else 0.0))


def case_all_to_all_evenly(rank: int, size: int) -> None:
    pair = hvd.synchronize(hvd.alltoall_async(of_rank(rank, size)))
    assert pair[1].tolist() == [1] * size and pair[1].dtype == torch.int32


def case_all_to_all_by_splits(rank: int, size: int) -> None:
    """Rank s sends s + d rows to rank d; some rows go nowhere."""
    splits = [[s + d for d in range(size)] for s in range(size)]
    tensors = [of_rank(s, sum(splits[s]) + 1, 2) for s in range(size)]
    expected = torch.cat([tensors[s][: sum(splits[s])].split(splits[s])[rank] for s in range(size)])
    received = [splits[s][rank] for s in range(size)]
    for given in (splits[rank], tuple(splits[rank]), torch.tensor(splits[rank], dtype=torch.int32)):
        found, told = hvd.alltoall(tensors[rank], given)
        assert torch.equal(found, expected)
        assert told.tolist() == received and told.dtype == torch.int32
    found, told = hvd.synchronize(hvd.alltoall_async(tensors[rank], splits[rank], name="by splits"))
    assert torch.equal(found, expected) and told.tolist() == received
    # Everything to the next rank.
    to_next = [3 if d == (rank + 1) % size else 0 for d in range(size)]
    found, told = hvd.alltoall(of_rank(rank, 3), to_next)
    assert torch.equal(found, of_rank((rank - 1) % size, 3))


def case_all_to_all_gradients(rank: int, size: int) -> None:
    splits = [rank + d for d in range(size)]
    tensor = of_rank(rank, sum(splits) + 2, 3).requires_grad_()
    found, _ = hvd.alltoall(tensor, splits)
    (found * (rank + 1)).sum().backward()
    expected = torch.cat([torch.full((splits[d], 3), d + 1.0) for d in range(size)] + [torch.zeros(2, 3)])
    torch.testing.assert_close(tensor.grad, expected)


def case_all_to_all_that_cannot_be(rank: int, size: int) -> None:
    tensor = torch.zeros(size * 2, 2)
    wrong = {
        "whole numbers": torch.ones(size),
        "whole numbers, one": [1.0] * size,
        "an entry for each": [1] * (size + 1),
        "negative": [-1] + [1] * (size - 1),
        "sum to": [3] * size,
    }
    for text, splits in wrong.items():
        for call in (hvd.alltoall, hvd.alltoall_async):
            with pytest.raises(ValueError, match=text):
                call(tensor, splits)
    with pytest.raises(ValueError, match="does not divide"):
        hvd.alltoall(torch.zeros(size + 1))


def case_reduce_and_scatter(rank: int, size: int) -> None:
    tensors = of_all(size, size, 2)
    expected = torch.stack(tensors).sum(0)[rank : rank + 1]
    found = hvd.reducescatter(tensors[rank], op=hvd.Sum, compression=hvd.Compression.fp16)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    mean = hvd.grouped_reducescatter([tensors[rank]], compression=hvd.Compression.fp16)[0]
    torch.testing.assert_close(mean, expected / size, rtol=1e-3, atol=1e-3)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(NotImplementedError, match="Average or Sum"):  # a RuntimeError, as Horovod raises
            hvd.reducescatter(tensors[rank], op=op)


def case_sparse_tensors(rank: int, size: int) -> None:
    dense = [of_rank(each, 6, 3) * (torch.arange(6).unsqueeze(1) % (each + 1) == 0) for each in range(size)]
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        handle = hvd.sparse_allreduce_async(dense[rank].to_sparse(1), name=f"rows.{op}", op=op)
        assert callable(handle) and not isinstance(handle, int)
        found = handle()
        assert found.is_sparse and found.shape == (6, 3)
        torch.testing.assert_close(found.to_dense(), torch.stack(dense).sum(0) / divisor)
    found = hvd.sparse_allreduce_async(dense[rank].to_sparse(), name="cells", op=hvd.Sum)()
    torch.testing.assert_close(found.to_dense(), torch.stack(dense).sum(0))
    mine = dense[0] if rank == 0 else torch.zeros(6, 3)  # nothing stored on the others
    found = hvd.sparse_allreduce_async(mine.to_sparse(1), "one only", hvd.Sum)()
    torch.testing.assert_close(found.to_dense(), dense[0])
    with pytest.raises(ValueError, match="Average or Sum"):
        hvd.sparse_allreduce_async(dense[rank].to_sparse(), "wrong", hvd.Max)
    for wrong in (dense[rank], dense[rank].to_sparse_csr()):
        with pytest.raises(ValueError, match="sparse COO"):
            hvd.sparse_allreduce_async(wrong, "wrong")


def case_sparse_integers(rank: int, size: int) -> None:
    """As dense ones: averaged in float64, which holds what float32 does not, and cut towards zero."""
    big = 2**40 + 1
    mine = torch.tensor([big * size, -1 if rank == 0 else 0, 0, 7 * size]).to_sparse()
    found = hvd.sparse_allreduce_async(mine, "integers", hvd.Average)()
    assert found.dtype == torch.int64
    assert found.to_dense().tolist() == [big * size, 0, 0, 7 * size]


def case_sparse_tensors_that_differ(rank: int, size: int) -> None:
    """Every rank hears of it, and the same name works afterwards."""
    shapes = [(20,) if each == size - 1 else (4,) for each in range(size)]
    mine = torch.ones(shapes[rank]).to_sparse()
    text = rf"^Mismatched allreduce tensor shapes: rank 0 has \(4,\), and rank {size - 1} has \(20,\)"
    with pytest.raises(hvd.HorovodInternalError, match=text):
        hvd.sparse_allreduce_async(mine, "differs", hvd.Sum)()
    wrong = [
        torch.ones(4, 3 if rank else 2).to_sparse(1),
        torch.ones(2, 2).to_sparse(1 if rank else 2),
        torch.ones(4, dtype=torch.float64 if rank else torch.float32).to_sparse(),
    ]
    for each in wrong:
        with pytest.raises(hvd.HorovodInternalError, match=r"^Mismatched"):
            hvd.sparse_allreduce_async(each, "differs", hvd.Sum)()
    same = torch.ones(4).to_sparse()
    assert hvd.sparse_allreduce_async(same, "differs", hvd.Sum)().to_dense().tolist() == [size] * 4


def case_barriers(rank: int, size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"comes/{rank}", "")
    if rank == size - 1:  # it comes when the others are there already, or were and have gone on
        until(lambda: store.check([f"comes/{other}" for other in range(size)]))
    came = time.monotonic()  # the ranks of a machine have the same clock
    assert hvd.barrier() is None
    left = time.monotonic()
    assert max(hvd.allgather_object(came)) <= left


def case_joins(rank: int, size: int) -> None:
    """Who has joined feeds zeros, and an average divides by all; the last to join is told to all."""
    for step in range(rank):  # rank r has r batches
        present = [each for each in range(size) if each > step]
        found = hvd.allreduce(torch.tensor([float(rank + 1)]), name=f"step.{step}")
        torch.testing.assert_close(found, torch.tensor([sum(each + 1.0 for each in present) / size]))
        found = hvd.allreduce(torch.tensor([rank + 1]), name=f"sum.{step}", op=hvd.Sum)
        assert found.item() == sum(each + 1 for each in present)
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size  # unnamed ones begin again together


def case_other_collectives_after_join(rank: int, size: int) -> None:
    if rank > 0:
        with pytest.raises(hvd.HorovodInternalError, match="not supported with Join at this time"):
            hvd.allgather(torch.ones(2), name="gather")
        assert hvd.allreduce(torch.ones(1), name="still", op=hvd.Sum).item() == size - 1
    devices: list[int | None] = []
    join = NamedChannel.join

    def joined(channel: NamedChannel, device: int | None) -> Handle:
        devices.append(device)
        return join(channel, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NamedChannel, "join", joined)
        hvd.join(device=-1)
        patch.setattr(torch.accelerator, "device_count", lambda: 0)
        hvd.join(device=5)
        patch.setattr(torch.accelerator, "device_count", lambda: 2)
        for wrong in (-2, 2):
            with pytest.raises(ValueError, match="there are 2"):
                hvd.join(device=wrong)
        assert 0 <= hvd.join(device=1) < size
    assert devices == [None, None, 1]


test_ranks = as_tests(globals(), USUAL | {"2 over gloo": GLOO})
