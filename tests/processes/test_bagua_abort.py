"""A communicator that one rank aborts: whoever waits in it goes on, on shared memory and on gloo."""

from __future__ import annotations

import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import guozhuang.compat.bagua.torch_api as bagua
from guozhuang.compat.bagua.torch_api.communication import _get_default_group, new_group
from guozhuang.errors import PeerLost, WorldError
from tests.ranks import run_ranks

AFTER_S = 0.5


def _every_rank_aborts(rank: int, size: int, method: str) -> tuple[float, bool]:
    """Rank r calls r + 1 collectives, of which all but the first wait for rank 0."""
    bagua.init_process_group()
    group = _get_default_group() if method == "allreduce_inplace" else new_group()
    comm = group.get_global_communicator()
    assert (comm.device_id(), comm.cuda_stream) == (bagua.get_local_rank(), 0)
    data = torch.full((10,), float(rank))
    data.ensure_bagua_tensor("data")
    comm.barrier()
    timer = threading.Timer(AFTER_S, comm.abort)
    timer.start()
    began_s = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank that learns of it by another one
        for _ in range(rank + 1):
            getattr(comm, method)(data.bagua_backend_tensor())  # type: ignore[attr-defined]
    took_s = time.monotonic() - began_s
    timer.join()
    assert comm.check_abort()
    bagua.allreduce_inplace(data, comm=comm)  # returns at once, as do these
    bagua.communication.broadcast_coalesced([data], comm=comm)
    assert bagua.communication.broadcast_object(rank, comm=comm) == rank
    total = torch.ones(1)
    dist.all_reduce(total)  # the default group goes on
    assert total.item() == size
    return took_s, bool((data == sum(range(size))).all())


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("method", ["allreduce_inplace", pytest.param("broadcast", marks=pytest.mark.slow)])
def test_abort_frees_waiting_ranks(backend: str, method: str) -> None:
    found = run_ranks(_every_rank_aborts, 3, method, backend=backend)
    assert found[0][1] or method == "broadcast"


def _one_rank_aborts(rank: int, size: int) -> str:
    bagua.init_process_group()
    comm = new_group([1, 2]).get_global_communicator()
    if rank == 0:
        return ""
    comm.barrier()
    if rank == 1:
        time.sleep(AFTER_S)
        comm.abort()
        comm.abort()
        return "aborted"
    assert not comm.check_abort()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            bagua.recv(torch.zeros(2), 0, comm)
    assert comm.check_abort() and len(seen) == 1 and seen[0].filename == __file__
    return str(seen[0].message)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_waits_for_one_that_aborts_is_told(backend: str) -> None:
    assert "rank 0 aborted a communicator" in run_ranks(_one_rank_aborts, 3, backend=backend)[2]


def _ranks_that_wait_for_others(rank: int, size: int, method: str) -> float:
    """Rank 0 aborts; others wait for their neighbours, and live on until all ranks have gone on."""
    bagua.init_process_group()
    comm = new_group().get_global_communicator()
    comm.barrier()
    began_s = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 0:
            time.sleep(AFTER_S)
            comm.abort()
        elif method == "recv":
            comm.recv(torch.zeros(2), rank - 1)
        else:
            comm.allreduce_inplace(torch.zeros(1000))
    took_s = time.monotonic() - began_s
    dist.barrier()
    return took_s


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("method", ["recv", pytest.param("allreduce_inplace", marks=pytest.mark.slow)])
def test_ranks_that_wait_for_other_ranks_go_on_too(backend: str, method: str) -> None:
    assert max(run_ranks(_ranks_that_wait_for_others, 4, method, backend=backend)) < AFTER_S + 8


def _one_rank_leaves(rank: int, size: int) -> None:
    bagua.init_process_group()
    comm = _get_default_group().get_global_communicator()
    comm.barrier()
    if rank == 1:
        return
    with pytest.raises((PeerLost, WorldError, RuntimeError)):
        comm.allreduce_inplace(torch.zeros(3))
    assert not comm.check_abort()


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_lost_rank_is_no_abort(backend: str) -> None:
    run_ranks(_one_rank_leaves, 2, backend=backend)
