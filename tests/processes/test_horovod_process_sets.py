"""Process sets among real ranks: given to ``init``, added and removed later, and collectives inside of them."""

from __future__ import annotations

import os

import pytest
import torch

import guozhuang.compat.horovod.torch as hvd
from guozhuang.compat.horovod.common.process_sets import global_process_set
from guozhuang.errors import MismatchError
from tests.processes.horovod_cases import as_tests, of_rank
from tests.processes.horovod_verbs import check_verbs


def case_members(rank: int, size: int) -> None:
    every = hvd.global_process_set
    assert every is global_process_set
    assert (every.process_set_id, every.ranks, every.size(), every.rank()) == (0, list(range(size)), size, rank)
    assert every.included() is True
    chosen = [1, size - 1] if size > 2 else [1]
    made = hvd.add_process_set(chosen[::-1])
    assert isinstance(made, hvd.ProcessSet)
    assert (made.process_set_id, made.ranks, made.size()) == (1, chosen, len(chosen))
    assert made.included() is (rank in chosen)
    if made.included():
        assert made.rank() == chosen.index(rank)
    else:
        with pytest.raises(ValueError, match="not a member"):
            made.rank()
    assert str(made) == f"ProcessSet(process_set_id=1, ranks={chosen}, mpi_comm=None)"
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: list(range(size)), 1: chosen}
    assert hvd.remove_process_set(made) is True
    assert made.process_set_id is None
    assert (made.size(), made.included()) == (None, None)
    assert hvd.remove_process_set(made) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: list(range(size))}


def case_that_cannot_be(rank: int, size: int) -> None:
    first = hvd.add_process_set(hvd.ProcessSet([1]))
    assert first.process_set_id == 2  # they count up
    with pytest.raises(ValueError, match="exists"):
        hvd.add_process_set([1])
    with pytest.raises(ValueError, match="exists"):
        hvd.add_process_set(range(size))  # the global one
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(first)
    with pytest.raises(ValueError, match="does not exist"):
        hvd.add_process_set([0, size])
    with pytest.raises(ValueError, match="twice"):
        hvd.add_process_set([0, 0])
    with pytest.raises(ValueError, match="at least one"):
        hvd.add_process_set([])
    with pytest.raises(TypeError, match="integer"):
        hvd.add_process_set([0.5])
    with pytest.raises(ValueError, match=r"objects of hvd\.ProcessSet, not of list"):
        hvd.init(process_sets=[[0]])
    loose = hvd.ProcessSet([0, 1])
    assert (loose.process_set_id, loose.size(), loose.rank(), loose.included()) == (None, None, None, None)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(2), process_set=loose)
    if rank != 1:
        with pytest.raises(ValueError, match="not a member"):
            hvd.allreduce(torch.ones(2), process_set=first)
        with pytest.raises(ValueError, match="not a member"):
            hvd.barrier(process_set=first)
    assert hvd.remove_process_set(first)


def case_collectives_inside(rank: int, size: int) -> None:
    """Every collective among ranks 1 and up; root_rank is a rank among all."""
    chosen = list(range(1, size))
    some = hvd.add_process_set(chosen)
    if rank in chosen:
        check_verbs(chosen, rank, process_set=some)
        tensors = {each: of_rank(each, 2 * len(chosen), 3) for each in chosen}
        mine, stacked = tensors[rank], torch.stack(list(tensors.values()))
        place = chosen.index(rank)
        with pytest.raises(ValueError, match="root_rank"):
            hvd.broadcast(mine, 0, process_set=some)
        expected = torch.cat([tensors[each].split(2)[place] for each in chosen])
        found, received = hvd.alltoall(mine, [2] * len(chosen), process_set=some)
        assert torch.equal(found, expected) and received.tolist() == [2] * len(chosen)
        total = hvd.sparse_allreduce_async(mine.to_sparse(1), "sparse", hvd.Average, process_set=some)()
        torch.testing.assert_close(total.to_dense(), stacked.mean(0))
        last = chosen[-1]
        assert hvd.broadcast_object({"from": rank}, last, process_set=some) == {"from": last}
        assert hvd.allgather_object(rank, process_set=some) == chosen
        hvd.barrier(process_set=some)
        with pytest.raises(NotImplementedError):
            hvd.allreduce(mine, op=hvd.Adasum, process_set=some)
    # The others did none of it, and unnamed operations of all ranks still find each other.
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == size
    assert hvd.remove_process_set(some)


def case_members_that_are_no_neighbours(rank: int, size: int) -> None:
    chosen = [0, size - 1]
    some = hvd.add_process_set(chosen) if size > 2 else hvd.global_process_set
    if rank in chosen:
        check_verbs(chosen, rank, process_set=some)
        tensor = torch.ones(4, requires_grad=True)
        (hvd.alltoall(tensor, [2, 2], process_set=some)[0] * (rank + 1.0)).sum().backward()
        torch.testing.assert_close(tensor.grad, torch.tensor([1.0, 1.0, size, size]))
    hvd.barrier()
    assert hvd.remove_process_set(some) is (size > 2)


def case_two_sets_at_once(rank: int, size: int) -> None:
    """The same names in different sets are different operations, also at the same moment."""
    first, second = hvd.add_process_set([0]), hvd.add_process_set(range(1, size))
    mine = first if rank == 0 else second
    inside = hvd.allreduce_async(torch.tensor([float(rank)]), name="same", op=hvd.Sum, process_set=mine)
    among_all = hvd.allreduce_async(torch.tensor([float(rank)]), name="same", op=hvd.Sum)
    assert hvd.synchronize(among_all).item() == sum(range(size))
    assert hvd.synchronize(inside).item() == (0 if rank == 0 else sum(range(1, size)))
    assert hvd.remove_process_set(second)
    assert hvd.remove_process_set(first)


def case_that_differ_between_ranks(rank: int, size: int) -> None:
    with pytest.raises(MismatchError, match=r"(?s)ranks \[0\].*ranks \[1\]"):
        hvd.add_process_set([0] if rank == 0 else [1])
    one, other = hvd.add_process_set([0]), hvd.add_process_set([1])
    with pytest.raises(MismatchError, match="the channel to remove"):
        hvd.remove_process_set(one if rank == 0 else other)
    assert hvd.remove_process_set(one) and hvd.remove_process_set(other)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: list(range(size))}
    assert hvd.remove_process_set(hvd.add_process_set([0]))


def given_static_sets(rank: int, size: int) -> None:
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(list(range(1, size, 2)))
    for wrong in ([even, hvd.ProcessSet(range(0, size, 2))], [hvd.ProcessSet(range(size))]):
        with pytest.raises(ValueError, match="is a duplicate"):
            hvd.init(process_sets=wrong)
        assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="dynamic"):
        hvd.init(process_sets="static")
    hvd.init(process_sets=[even, odd])
    assert (even.process_set_id, odd.process_set_id) == (1, 2)
    mine = even if even.included() else odd
    found = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=mine)
    assert found.item() == sum(range(rank % 2, size, 2))
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
        hvd.add_process_set([0])
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
        hvd.remove_process_set(even)
    again = hvd.ProcessSet(range(0, size, 2))
    for _ in range(2):
        hvd.init(process_sets=[again])  # finds the set of these ranks
        assert again.process_set_id == 1
    with pytest.raises(ValueError, match="called before"):
        hvd.init(process_sets=[hvd.ProcessSet([1, 2])])
    hvd.init(process_sets="dynamic")
    assert hvd.add_process_set([0]).process_set_id == 3
    hvd.shutdown()
    assert (even.process_set_id, again.process_set_id) == (None, None)
    assert hvd.global_process_set.process_set_id == 0
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.global_process_set.size()


def given_dynamic_by_word(rank: int, size: int) -> None:
    hvd.init(process_sets="dynamic")
    assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1"  # for worlds to come, too
    hvd.shutdown()
    hvd.init()
    case_members(rank, size)
    hvd.shutdown()


DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
test_ranks = as_tests(globals(), {"2": DYNAMIC, "3": DYNAMIC, "4": DYNAMIC})
test_given_to_init = as_tests(globals(), {"3": {}}, enters=False, prefix="given_")
