"""The group "shm" beside gloo: its events in torch.profiler, tensors that it refuses, and a monitored barrier that fails."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.masked import masked_tensor

from tests.processes.shm_ranks import is_ahead
from tests.ranks import run_ranks
from tests.waiting import EXPIRES_S, until

# What torch.profiler shows of it under the backend's name, and one call. Gloo shows a reduce_scatter as the all_reduce that it
# makes of it, and is not asked for that.
CALLS: dict[str, Callable[[Any, int], object]] = {
    "all_reduce": lambda group, n: dist.all_reduce(torch.ones(3, 4), group=group),
    "broadcast": lambda group, n: dist.broadcast(torch.ones(5), 0, group=group),
    "reduce": lambda group, n: dist.reduce(torch.ones(6), 0, group=group),
    "all_gather": lambda group, n: dist.all_gather([torch.ones(2) for _ in range(n)], torch.ones(2), group=group),
    "gather": lambda group, n: dist.gather(
        torch.ones(7), [torch.ones(7) for _ in range(n)] if dist.get_rank() == 0 else None, 0, group=group
    ),
    "scatter": lambda group, n: dist.scatter(
        torch.ones(8), [torch.ones(8) for _ in range(n)] if dist.get_rank() == 0 else None, 0, group=group
    ),
    "all_to_all": lambda group, n: dist.all_to_all_single(torch.ones(n, 2), torch.ones(n, 2), group=group),
    "barrier": lambda group, n: dist.barrier(group=group),
    "send": lambda group, n: (
        dist.send(torch.ones(9), 1, group=group) if dist.get_rank() == 0 else dist.recv(torch.ones(9), 0, group=group)
    ),
}


def events(rank: int, n: int) -> None:
    """The events of a group have the names and shapes of gloo's; that of an asynchronous call lasts until the call's end."""
    gloo, shm, found = dist.group.WORLD, dist.new_group(backend="shm"), {}
    for group in (gloo, shm):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            for call in CALLS.values():
                if rank < 2 or call is not CALLS["send"]:
                    call(group, n)
        name = dist.get_backend(group)
        found[name] = [
            (event.name.partition(":")[2], event.input_shapes)
            for event in profile.events() or []
            if event.name.startswith(f"{name}:")
        ]
    assert found["shm"] == found["gloo"]
    assert len(found["shm"]) == len(CALLS) - (rank >= 2)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["something else was done"])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work = dist.all_reduce(torch.ones(10), group=shm, async_op=True)
        assert work is not None
        if rank == 0:
            with torch.profiler.record_function("something else"):
                torch.ones(10).sum()
            store.set("something else was done", "")
        work.wait()
    if rank == 0:
        event, other = (
            next(event for event in profile.events() or [] if event.name == name)
            for name in ("shm:all_reduce", "something else")
        )
        assert event.is_async
        assert event.time_range.start <= other.time_range.start
        assert event.time_range.end >= other.time_range.end, "rank 1 came only after that"


def tensors(n: int) -> dict[str, Tensor]:
    """Tensors of all kinds that have no memory of a CPU, or not one range of it."""
    plain = torch.ones(4)
    return {
        "DTensor": distribute_tensor(plain, init_device_mesh("cpu", (n,)), [Replicate()]),
        "FakeTensor": FakeTensorMode().from_tensor(plain),
        "functional": torch._to_functional_tensor(plain),
        "masked": masked_tensor(plain, plain > 0),
        "meta": plain.to("meta"),
        "CSR": torch.eye(4).to_sparse_csr(),
        "jagged": torch.nested.nested_tensor([plain, plain], layout=torch.jagged),
        "zeros": torch._efficientzerotensor(4),
    }


def refusals(rank: int, n: int) -> None:
    """A tensor without memory is refused by one error on all ranks, and the group goes on; what is on its way is waited for."""
    group: Any = dist.new_group(backend="shm")
    for kind, tensor in tensors(n).items():
        for call in (
            lambda given: dist.all_reduce(given, group=group),
            lambda given: dist.broadcast(given, 0, group=group),
            lambda given: group.allgather([[torch.ones(4) for _ in range(n)]], [given]).wait(),
            lambda given: dist.send(given, (rank + 1) % n, group=group),
        ):
            with pytest.raises(RuntimeError, match=rf"\[rank {rank}\].*Fix") as caught:
                call(tensor)
            assert isinstance(caught.value, ValueError), kind
            assert isinstance(caught.value, NotImplementedError) or kind == "meta"
    with pytest.raises(NotImplementedError, match="to_local"):
        dist.all_reduce(tensors(n)["DTensor"], group=group)
    on_its_way = functional.all_reduce(torch.ones(4), "sum", group)
    dist.all_reduce(on_its_way, group=group)
    assert (on_its_way + 0).tolist() == [n * n] * 4


def monitored(rank: int, n: int) -> None:
    """A monitored barrier names the missing ranks in PyTorch's words, on rank 0 and on the others."""
    for wait_all_ranks in (False, True):
        group: Any = dist.new_group(backend="shm")
        if rank == 0:
            until(lambda group=group: is_ahead(group, 2))  # so that rank 1 alone is missing
        if rank != 1:
            with pytest.raises(RuntimeError, match="timed out") as caught:
                group.monitored_barrier(datetime.timedelta(seconds=EXPIRES_S), wait_all_ranks=wait_all_ranks)
            text = str(caught.value)
            assert f"Rank 1 failed to pass monitoredBarrier in {EXPIRES_S * 1e3:g} ms" in text or rank != 0
            assert f"Rank {rank} successfully reached monitoredBarrier" in text or rank == 0
            assert "rank 1 (pid" in text
        dist.barrier()
    with pytest.raises(RuntimeError, match=f"Rank {rank} timed out in monitoredBarrier"):
        group.monitored_barrier(datetime.timedelta(0))


def beside_gloo(rank: int, n: int) -> None:
    events(rank, n)
    refusals(rank, n)
    monitored(rank, n)


def test_shm_beside_gloo() -> None:
    run_ranks(beside_gloo, 3)
