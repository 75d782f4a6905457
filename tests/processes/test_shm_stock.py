"""PyTorch's own machinery on the "shm" backend, unchanged: the same numbers as on gloo."""

import contextlib
import copy
import datetime
import gc
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from guozhuang.groups.shared_memory import SharedMemoryGroup, engine
from tests.processes.cases import said
from tests.processes.shm_ranks import held, run_shm_ranks
from tests.waiting import LIMIT_S


def on_both(rank: int, n: int, case: Callable[[int, int], list[float]], folder: str) -> tuple[list[float], list[float]]:
    """What the case returns on the default group, "shm", and then on gloo."""
    assert dist.get_backend() == "shm"
    torch.manual_seed(0)
    ours = case(rank, n)
    dist.destroy_process_group()
    gc.collect()
    assert not any("memfd" in each or "thread" in each for each in held()), held()
    limit = datetime.timedelta(seconds=LIMIT_S)
    store = dist.FileStore(f"{folder}/gloo", n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    torch.manual_seed(0)
    theirs = case(rank, n)
    dist.barrier()
    return ours, theirs


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(network: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_steps: int = 3) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = network(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(rank: int, n: int) -> list[float]:
    network = DistributedDataParallel(model(), bucket_cap_mb=0.1)
    losses = trained(network, torch.optim.SGD(network.parameters(), lr=0.1), rank)
    unused = DistributedDataParallel(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), find_unused_parameters=True)
    unused.module.forward = lambda x: unused.module[0](x)
    unused(torch.ones(1, 2)).sum().backward()
    with network.join() if n > 1 else contextlib.nullcontext():
        for step in range(1 + rank):  # uneven numbers of batches
            network(batch(rank, step)).sum().backward()
    return losses + [p.sum().item() for p in network.parameters()]


def power_sgd(rank: int, n: int) -> list[float]:
    """A hook of PyTorch whose callbacks reduce, and wait for it. One bucket: the order of several is up to the threads."""
    network = DistributedDataParallel(model(), bucket_cap_mb=100)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    network.register_comm_hook(state, powerSGD_hook)
    losses = trained(network, torch.optim.SGD(network.parameters(), lr=0.1), rank, num_steps=6)
    return losses + [p.sum().item() for p in network.parameters()]


def zero_redundancy(rank: int, n: int) -> list[float]:
    network = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.Adam, lr=0.01)
    losses = trained(network, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == 6
    return losses + [p.sum().item() for p in network.parameters()]


def fsdp2(rank: int, n: int) -> list[float]:
    network = model()
    for layer in network:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(network)
    losses = trained(network, torch.optim.AdamW(network.parameters(), lr=0.01), rank)
    return losses + [p.full_tensor().sum().item() for p in network.parameters()]


def tensor_parallel(rank: int, n: int) -> list[float]:
    mesh = init_device_mesh("cpu", (n,))
    whole = model()
    network = parallelize_module(copy.deepcopy(whole), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(network(batch(0, 0)), whole(batch(0, 0)))
    losses = trained(network, torch.optim.SGD(network.parameters(), lr=0.1), rank=0)
    matrix = torch.arange(24.0).view(4, 6)
    sharded = distribute_tensor(matrix, mesh, [Shard(0)])
    other = sharded.redistribute(mesh, [Shard(1)])
    assert torch.equal(other.redistribute(mesh, [Replicate()]).to_local(), matrix)
    assert torch.equal((sharded @ sharded.t()).full_tensor(), matrix @ matrix.t())
    return losses


def mesh_of_two_axes(rank: int, n: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicate", "shard"))
    network = model()
    fully_shard(network, mesh=mesh)
    losses = trained(network, torch.optim.SGD(network.parameters(), lr=0.1), rank)
    for axis in ("replicate", "shard"):
        group = mesh.get_group(axis)
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(dist.get_process_group_ranks(group))
        assert dist.get_backend(group) == dist.get_backend()
    return losses


def checkpoint(rank: int, n: int) -> list[float]:
    network = model()
    fully_shard(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    trained(network, optimizer, rank)
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    weights, state = get_state_dict(network, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folders[0])
    wanted = trained(network, optimizer, rank)
    fresh = model()
    fully_shard(fresh)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.01)
    weights, state = get_state_dict(fresh, optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folders[0])
    set_state_dict(fresh, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert trained(fresh, optimizer, rank) == wanted
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])
    return wanted


def objects(rank: int, n: int) -> None:
    found: list[object] = [None] * n
    dist.all_gather_object(found, {"rank": rank, "text": "x" * (rank * 100_000)})
    assert [each["rank"] for each in found] == list(range(n)) and len(found[-1]["text"]) == (n - 1) * 100_000
    told = ["from the root", 7] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, src=1)
    assert told == ["from the root", 7]
    gathered = [None] * n if rank == 0 else None
    dist.gather_object(rank, gathered)
    assert rank or gathered == list(range(n))
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(n)] if rank == 0 else None)
    assert mine == [f"for {rank}"]


def functional(rank: int, n: int) -> None:
    mine, total, world = torch.full((4, 3), float(rank)), float(sum(range(n))), dist.group.WORLD
    assert torch.equal(funcol.all_reduce(mine, "sum", world), torch.full((4, 3), total))
    gathered = torch.arange(n).repeat_interleave(4).float().view(-1, 1).expand(-1, 3)
    assert torch.equal(funcol.all_gather_tensor(mine, 0, world), gathered)
    assert torch.equal(funcol.reduce_scatter_tensor(gathered.clone(), "sum", 0, world), mine * n)
    assert torch.equal(funcol.broadcast(mine, 1, world), torch.ones(4, 3))
    exchanged = funcol.all_to_all_single(gathered.contiguous(), None, None, world)
    assert torch.equal(exchanged, mine.repeat(n, 1))
    coalesced = funcol.all_reduce_coalesced([mine, mine[0]], "sum", world)
    assert torch.equal(coalesced[1], torch.full((3,), total))
    both = funcol.all_gather_into_tensor_coalesced([mine, mine], world)
    assert torch.equal(both[1], gathered)
    parts = funcol.reduce_scatter_tensor_coalesced([gathered.clone()], "avg", [0], world)
    torch.testing.assert_close(parts[0], mine)


def groups(rank: int, n: int) -> None:
    """Groups of some ranks, made and destroyed, beside each other and beside gloo."""
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = evens if rank % 2 == 0 else odds
    assert dist.get_backend(mine) == "shm"
    for _ in range(20):
        tensor = torch.full((40_000,), float(rank))
        work = dist.all_reduce(tensor, group=mine, async_op=True)
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        work.wait()
        assert tensor[0].item() == (2 if rank % 2 == 0 else 4) and everyone.item() == n
    dist.broadcast(tensor, src=rank % 2 + 2, group=mine)  # the global rank
    assert tensor[0].item() == (2 if rank % 2 == 0 else 4)
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo)
    dist.barrier(mine)
    dist.destroy_process_group(mine)
    mine, _ = dist.new_subgroups(2)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == (1.0 if rank < 2 else 5.0)
    assert dist.new_group([rank], use_local_synchronization=True).size() == 1


def several_devices(rank: int, n: int) -> None:
    assert dist.get_backend_config() == "cpu:shm,cuda:nccl"
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.barrier()
    assert tensor.tolist() == [n] * 3
    subgroup = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=subgroup)
    assert tensor.tolist() == [n * n] * 3


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        (ddp, 2),
        pytest.param(ddp, 3, marks=pytest.mark.slow),
        pytest.param(power_sgd, 2, marks=pytest.mark.slow),
        pytest.param(zero_redundancy, 2, marks=pytest.mark.slow),
        (fsdp2, 2),
        pytest.param(fsdp2, 3, marks=pytest.mark.slow),
        pytest.param(tensor_parallel, 2, marks=pytest.mark.slow),
        pytest.param(mesh_of_two_axes, 4, marks=pytest.mark.slow),
        pytest.param(checkpoint, 2, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_training_is_the_same_as_on_gloo(case, num_ranks: int, tmp_path: Path) -> None:
    for shm, gloo in run_shm_ranks(on_both, num_ranks, case, str(tmp_path)):
        assert shm == pytest.approx(gloo, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("case", "num_ranks"), [pytest.param(objects, 3, marks=pytest.mark.slow), (functional, 2), (groups, 4)]
)
def test_stock_calls(case, num_ranks: int) -> None:
    run_shm_ranks(case, num_ranks)


def test_a_backend_for_each_device() -> None:
    """Without CUDA too: what is for CUDA is made when the first CUDA tensor comes."""
    run_shm_ranks(several_devices, 2, name="cpu:shm,cuda:nccl")


def without_the_c_part(rank: int, n: int) -> None:
    """Where the C part was built on some ranks only, all of them use gloo, and the log says so once."""
    built = engine._engine
    engine._engine = None if rank == 1 else built
    with said() as texts:
        try:
            group = dist.new_group(backend="shm")
        finally:
            engine._engine = built
    assert built is not None and not isinstance(group, SharedMemoryGroup)
    assert [("[1]" in text, "gloo" in text) for text in texts] == ([(True, True)] if rank == 0 else [])
    value = torch.ones(3)
    dist.all_reduce(value, group=group)
    assert value.tolist() == [n] * 3


def test_ranks_without_the_c_part_use_gloo() -> None:
    run_shm_ranks(without_the_c_part, 2, name="gloo")
