"""Bagua's collectives and communicators among ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import guozhuang.compat.bagua.torch_api as bagua
from guozhuang.compat.bagua.torch_api.communication import (
    CommMember,
    _get_default_group,
    _rank_not_in_group,
    communicator,
    from_torch_group,
    new_group,
)
from guozhuang.compat.bagua.torch_api.communicators import VERBS
from guozhuang.errors import UsageError

from .ranks import run_threads


def _given(rank: int, num: int) -> Tensor:
    return torch.arange(num, dtype=torch.float32) + 100 * rank


def _all(size: int, num: int) -> Tensor:
    return torch.stack([_given(rank, num) for rank in range(size)])


def _combined(rank: int, size: int) -> None:
    bagua.init_process_group()
    pair = torch.tensor([[1, 2], [3, 4]][rank % 2])
    total = torch.empty(2, dtype=torch.int64)
    bagua.allreduce(pair, total)
    assert total.tolist() == [4, 6]
    generator = torch.Generator().manual_seed(rank)
    values = torch.rand(100, generator=generator)
    summed, mean = torch.empty(100), torch.empty(100)
    bagua.allreduce(values, summed)
    bagua.allreduce(values, mean, op=bagua.ReduceOp.AVG)
    assert torch.equal(mean, summed / size)
    bagua.allreduce_inplace(values, op=bagua.ReduceOp.MAX)
    assert bool((values <= summed).all())
    of_torch = torch.tensor([rank + 1])
    bagua.allreduce_inplace(of_torch, dist.ReduceOp.MIN)  # by its name: its number is that of Bagua's MAX
    assert of_torch.item() == 1
    whole = torch.tensor([7]) * (rank + 1)
    bagua.allreduce_inplace(whole, op=bagua.ReduceOp.AVG)
    assert whole.item() == 10 and whole.dtype == torch.int64


def test_all_reduce() -> None:
    run_threads(_combined, 2)


def _every_verb(rank: int, size: int) -> None:
    bagua.init_process_group()
    mine, everyones = _given(rank, 6), _all(size, 6)
    for shape in ((size, 6), (size * 6,)):
        joined = torch.zeros(shape)
        bagua.allgather(mine, joined)
        assert torch.equal(joined.view(size, 6), everyones)
    across = torch.zeros(6, size).t()  # not contiguous
    bagua.allgather(mine, across)
    assert torch.equal(across, everyones)
    place = torch.zeros(size, 6)
    place[rank] = mine
    bagua.allgather_inplace(place)
    assert torch.equal(place, everyones)

    last = size - 1
    for at_root in (False, True):
        joined = torch.full((size * 6,), -1.0)
        if at_root:
            joined.view(size, 6)[rank] = mine
            bagua.gather_inplace(joined, 6, last)
        else:
            bagua.gather(mine, joined, last)
        if rank == last:
            assert torch.equal(joined.view(size, 6), everyones)
    part, whole = torch.zeros(6), everyones.clone() if rank == last else torch.zeros(size, 6)
    bagua.scatter(whole, part, last)
    assert torch.equal(part, everyones[rank])
    bagua.scatter_inplace(whole, 6, last)
    assert torch.equal(whole[rank], everyones[rank])

    large = _given(rank, 2 * size)
    expected = _all(size, 2 * size).sum(0).view(size, 2)[rank]
    out = torch.zeros(2)
    bagua.reduce_scatter(large, out)
    assert torch.equal(out, expected)
    bagua.reduce_scatter(large, out, op=bagua.ReduceOp.AVG)
    assert torch.equal(out, expected / size)
    bagua.reduce_scatter_inplace(large)
    assert torch.equal(large.view(size, 2)[rank], expected)

    exchanged, expected = torch.zeros(2 * size), _all(size, 2 * size).view(size, size, 2)[:, rank].reshape(-1)
    bagua.alltoall(_given(rank, 2 * size), exchanged)
    assert torch.equal(exchanged, expected)
    same = _given(rank, 2 * size)
    bagua.alltoall_inplace(same)
    assert torch.equal(same, expected)

    reduced, before = torch.full((6,), -1.0), mine.clone()
    bagua.reduce(mine, reduced, 0)
    assert torch.equal(reduced, everyones.sum(0) if rank == 0 else torch.full((6,), -1.0))
    bagua.reduce_inplace(mine, 0, op=bagua.ReduceOp.AVG)
    assert torch.equal(mine, everyones.sum(0) / size if rank == 0 else before)
    bagua.broadcast(before, src=last)
    assert torch.equal(before, everyones[last])
    if rank == 0 and size > 1:
        bagua.send(torch.tensor([5]), last)
    elif rank == last and size > 1:
        received = torch.zeros(1, dtype=torch.int64)
        bagua.recv(received, 0)
        assert received.item() == 5
    bagua.barrier()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_against_what_it_means(size: int) -> None:
    run_threads(_every_verb, size)


def _parts_of_two(rank: int, size: int) -> None:
    bagua.init_process_group()
    counts, begins = [2] * size, list(range(0, 2 * size + 1, 2))  # one more place than ranks
    sent, expected = _given(rank, 2 * size), _all(size, 2 * size).view(size, size, 2)[:, rank].reshape(-1)
    got = torch.zeros(2 * size)
    bagua.alltoall_v(sent, counts, begins, got, counts, begins)
    assert torch.equal(got, expected)
    bagua.alltoall_v_inplace(sent, counts, begins)
    assert torch.equal(sent, expected)
    # Rank r sends r + 1 elements to each, from a tensor in which other elements stand between them.
    sent, got = torch.arange(4.0 * size) + 100 * rank, torch.full((4 * size,), -1.0)
    places = [4 * other for other in range(size)]
    bagua.alltoall_v(sent, [rank + 1] * size, places, got, [other + 1 for other in range(size)], places)
    for other in range(size):
        row = torch.full((4,), -1.0)
        row[: other + 1] = torch.arange(4.0 * rank, 4 * rank + other + 1) + 100 * other
        assert torch.equal(got.view(size, 4)[other], row)


@pytest.mark.parametrize("size", [1, 3])
def test_parts_of_any_sizes(size: int) -> None:
    run_threads(_parts_of_two, size)


def _odd_ranks(rank: int, size: int) -> None:
    bagua.init_process_group()
    group = new_group([3, 1])
    assert (group.ranks, group.group_name) == ([1, 3], "1")
    assert new_group().group_name == "2"
    comm = group.get_global_communicator()
    tensor = torch.tensor([float(rank)])
    bagua.allreduce_inplace(tensor, comm=comm)
    bagua.barrier(comm)
    if rank % 2:
        assert tensor.item() == 4 and (comm.rank(), comm.nranks()) == (rank // 2, 2)
        bagua.broadcast(tensor.fill_(rank), src=1, comm=comm)  # a rank in the communicator
        assert tensor.item() == 3
        assert not _rank_not_in_group(group)
    else:
        assert tensor.item() == rank and comm is CommMember.NON_COMM_MEMBER
        assert communicator(comm) is None and _rank_not_in_group(group)
    made = dist.new_group([0, 1])
    if rank < 2:
        found = from_torch_group(made)
        here = found.get_global_communicator()
        assert (here.rank(), here.nranks()) == (rank, 2) and found is from_torch_group(made)


def test_groups_of_some_ranks() -> None:
    run_threads(_odd_ranks, 4)


def _of_two_nodes(rank: int, size: int) -> list[Any]:
    bagua.init_process_group()
    group = _get_default_group()
    group._nodes = ["a", "a", "b", "b", "b"]
    intra, inter = group.get_intra_node_communicator(), group.get_inter_node_communicator()
    found = []
    for comm in (intra, inter):
        tensor = torch.tensor([10**rank])
        bagua.allreduce_inplace(tensor, comm=comm)
        found.append(tensor.item())
    return found


def test_communicators_of_a_node_and_between_nodes() -> None:
    assert run_threads(_of_two_nodes, 5) == [
        [11, 101],
        [11, 10],
        [11100, 101],
        [11100, 1000],
        [11100, 10000],
    ]


def _refused(rank: int, size: int) -> None:
    with pytest.raises(RuntimeError, match="call init_process_group"):
        bagua.barrier()
    for numbers in ({"rank": 1 - rank}, {"world_size": 3}, {"local_world_size": 7}):
        with pytest.raises(UsageError, match="the launcher's"):
            bagua.init_process_group(**numbers)
    bagua.init_process_group(rank=rank, world_size=size)
    with pytest.raises(RuntimeError, match="trying to initialize the default process group twice!"):
        bagua.init_process_group()
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(RuntimeError, match="unsupported tensor dtype float64"):
        bagua.allreduce_inplace(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(AssertionError, match="dense"):
        bagua.broadcast(torch.zeros(2, 2).to_sparse())
    wrong: list[tuple[Any, ...]] = [
        (bagua.allreduce, one, two),
        (bagua.allgather, two, two),
        (bagua.reduce_scatter, torch.zeros(3), two),
        (bagua.alltoall_inplace, torch.zeros(3)),
        (bagua.gather_inplace, torch.zeros(3), 1, 0),
        (bagua.alltoall_v_inplace, two, [1, 2], [0, 1]),
        (bagua.alltoall_v_inplace, two, [1], [0]),
        (bagua.broadcast, one, 2),
        (bagua.communication.broadcast_coalesced, [one], 2),
        (bagua.communication.allreduce_coalesced_inplace, [one], 4),
        (bagua.communication.broadcast_object, None, 2),
        (bagua.allreduce_inplace, one, dist.ReduceOp.PREMUL_SUM),
        (bagua.send, one, -1),
        (bagua.recv, one, rank),
        (bagua.barrier, "everybody"),
        (new_group, [0, 2]),
        (new_group, [0, 0]),
    ]
    for call, *args in wrong:
        with pytest.raises(UsageError):
            call(*args)


def test_bad_calls_are_refused_before_anything_is_sent() -> None:
    run_threads(_refused, 2)


def test_ranks_are_known_before_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (bagua.get_rank, bagua.get_world_size, bagua.get_local_rank, bagua.get_local_size)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert [get() for get in asked] == [0, 1, 0, 1]
    for number, name in enumerate(names, 3):
        monkeypatch.setenv(name, str(number))
    assert [get() for get in asked] == [3, 4, 5, 6]
    sampler = bagua.contrib.LoadBalancingDistributedSampler(range(8), lambda number: number)
    assert (sampler.rank, sampler.num_replicas) == (3, 4)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UsageError, match="RANK"):
        bagua.get_rank()
    assert bagua.env.get_default_bucket_size() == 10 << 20
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "0")
    with pytest.raises(UsageError, match="BAGUA_DEFAULT_BUCKET_SIZE"):
        bagua.env.get_default_bucket_size()


@pytest.mark.parametrize(("rank", "size", "local_size"), [(-1, 2, 1), (2, 2, 1), (0, -1, 1), (0, 2, -1), (0, 2, 3)])
def test_a_store_needs_all_numbers(rank: int, size: int, local_size: int) -> None:
    with pytest.raises(AssertionError, match=r"with a store|local_world_size"):
        bagua.init_process_group(dist.HashStore(), rank, size, local_size)


def _objects_and_lists(rank: int, size: int) -> None:
    bagua.init_process_group()
    settings = {"lr": 0.02, "weight_decay": 1e-4, "momentum": 0.9}
    assert bagua.communication.broadcast_object(settings if rank == 1 else None, 1) == settings
    comm = new_group([0, 2]).get_global_communicator()
    got = bagua.communication.broadcast_object({"of": rank}, 1, comm)
    assert got == {"of": rank if rank == 1 else 2}  # rank 1 of the communicator is rank 2; others get theirs back
    tensors = [_given(rank, 3).view(3, 1), torch.tensor([rank]), _given(rank, 2)]
    bagua.communication.broadcast_coalesced(tensors, 2)
    assert torch.equal(tensors[0], _given(2, 3).view(3, 1)) and tensors[1].item() == 2
    tensors = [_given(rank, 3), torch.tensor([rank])]
    bagua.communication.allreduce_coalesced_inplace(tensors, bagua.ReduceOp.AVG)
    torch.testing.assert_close(tensors[0], _all(size, 3).mean(0))
    assert tensors[1].item() == 1
    kept = torch.tensor([rank])
    bagua.communication.allreduce_coalesced_inplace([kept], comm=comm)
    assert kept.item() == (1 if rank == 1 else 2)


def test_objects_and_lists_of_tensors() -> None:
    run_threads(_objects_and_lists, 3)


def _groups_and_gradients(rank: int, size: int) -> None:
    bagua.init_process_group()
    group = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(AssertionError, match="bagua_patch"):
            _ = group.bagua_pg
        assert group.bagua_patch() is group and group.bagua_pg.ranks == [0, 1]
        assert group.bagua_get_global_communicator().nranks() == 2
        assert group.bagua_get_intra_node_communicator().nranks() == 2
    x = torch.full((2,), float(rank), requires_grad=True)
    total = bagua.data_parallel.functional.all_reduce(x)
    assert total.tolist() == [3.0, 3.0] and x.tolist() == [rank, rank]
    (total * (rank + 1)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6.0, 6.0]
    most = bagua.data_parallel.functional.all_reduce(x.detach(), dist.ReduceOp.MAX)
    assert most.tolist() == [2.0, 2.0]
    with pytest.raises(UsageError, match="SUM or MAX"):
        bagua.data_parallel.functional.all_reduce(x, dist.ReduceOp.MIN)


def test_patched_groups_and_gradients_of_all_reduce() -> None:
    run_threads(_groups_and_gradients, 3)


def test_verbs_stand_in_both_modules() -> None:
    assert VERBS.keys() >= {"allreduce", "alltoall_v_inplace", "broadcast_coalesced", "scatter"}
    for name in ("get_backend", "new_group", "ReduceOp", "CommMember", "broadcast_object", *VERBS):
        assert hasattr(bagua.communication, name)
        assert getattr(bagua, name, None) in (None, getattr(bagua.communication, name))


def test_helpers() -> None:
    from guozhuang import SyncBatchNorm
    from guozhuang.compat.bagua.torch_api.contrib import sync_batchnorm

    assert sync_batchnorm.SyncBatchNorm is SyncBatchNorm
    some = [torch.ones(2, 3), torch.zeros(4)]
    flat = bagua.utils.flatten(some)
    assert flat.shape == (10,) and all(map(torch.equal, bagua.utils.unflatten(flat, some), some))
    bagua.utils.apply_flattened_call(some, lambda flat: flat.add_(1))
    assert (some[0] == 2).all() and (some[1] == 1).all()
    bagua.utils.apply_flattened_call(some, lambda flat, factor: flat.mul_(factor), (3,))
    assert (some[0] == 6).all() and (some[1] == 3).all()
    with pytest.raises(NotImplementedError, match="bagua_core"):
        bagua.get_backend("model")
    assert 0 < bagua.env.find_free_network_port() < 65536


def _means_of_lists(rank: int, size: int) -> None:
    some = [torch.full((2,), float(rank)), torch.ones(1)]
    bagua.utils.apply_flattened_call(some, dist.all_reduce)
    assert some[0].tolist() == [1.0, 1.0] and some[1].item() == 1.0


def test_a_flattened_all_reduce_is_a_mean() -> None:
    run_threads(_means_of_lists, 3)


def test_tensors_with_names() -> None:
    p: Any = torch.nn.Parameter(torch.arange(4.0))
    assert not p.is_bagua_tensor()
    with pytest.raises(AssertionError, match="needs getter_closure"):
        p.ensure_bagua_tensor(setter_closure=lambda p, t: None)
    named = p.ensure_bagua_tensor(
        "weight", "net", lambda p: p.bagua_ensure_grad().grad, lambda p, t: setattr(p, "grad", t)
    )
    assert named is p and p.is_bagua_tensor() and (p.bagua_tensor_name, p.bagua_module_name) == ("weight", "net")
    assert p.ensure_bagua_tensor().bagua_tensor_name == "weight"  # names stay
    with pytest.raises(AssertionError, match="cannot be renamed"):
        p.ensure_bagua_tensor("other")
    p.ensure_bagua_tensor("weight", None, lambda p: p.bagua_ensure_grad().grad, lambda p, t: setattr(p, "grad", t))
    assert p.bagua_getter_closure().tolist() == [0.0] * 4 and p.bagua_backend_tensor() is p.grad
    flat = torch.arange(8.0)
    p.bagua_set_storage(flat.untyped_storage(), 2)
    assert p.grad.tolist() == [2.0, 3.0, 4.0, 5.0] and p.grad.data_ptr() == flat[2:].data_ptr()
    p.bagua_setter_closure(torch.ones(4))
    assert p.grad.sum() == 4
    view = p.to_bagua_tensor("view")
    assert view.data_ptr() == p.data_ptr() and view.bagua_tensor_name == "view" and view.bagua_backend_tensor() is view
    view.bagua_set_storage(flat.untyped_storage(), 4)
    assert view.tolist() == [4.0, 5.0, 6.0, 7.0]
    with pytest.raises(UsageError, match="setter_closure"):
        view.bagua_setter_closure(flat)
    with pytest.raises(NotImplementedError, match="parameter"):
        view.bagua_ensure_grad()
    for name in ("bagua_mark_communication_ready", "bagua_mark_communication_ready_without_synchronization"):
        with pytest.raises(NotImplementedError, match="bagua_core"):
            getattr(p, name)()


def _verbs_of_communicators(rank: int, size: int) -> None:
    bagua.init_process_group()
    comm = _get_default_group().get_global_communicator()
    total = torch.empty(2)
    comm.allreduce(torch.full((2,), rank + 1.0), total, bagua.ReduceOp.SUM)
    assert total.tolist() == [6.0, 6.0]
    comm.broadcast(total.fill_(rank), 2)
    assert total.tolist() == [2.0, 2.0]
    with pytest.raises(AttributeError, match="new_group"):
        comm.new_group()


def test_communicators_have_all_verbs() -> None:
    run_threads(_verbs_of_communicators, 3)
