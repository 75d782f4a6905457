"""A communicator that one rank aborts: whoever waits in it goes on, on shared memory and on gloo."""

from __future__ import annotations

import os
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist

import guozhuang.compat.bagua.torch_api as bagua
from guozhuang.compat.bagua.torch_api.communication import _get_default_group, new_group
from guozhuang.errors import PeerLost, WorldError
from tests.processes.shm_peers import state_of
from tests.ranks import run_ranks
from tests.waiting import LIMIT_S, NEVER_S, until


def _waits() -> bool:
    """Whether the main thread sleeps in a function of torch.distributed."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None and frame.f_code.co_filename != dist.distributed_c10d.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and state_of(os.getpid()) == "S"


def _watch(rank: int, has_begun: threading.Event) -> threading.Thread:
    """Tell the others, from a thread, when the main thread waits; it sets the event before."""

    def watch() -> None:
        assert has_begun.wait(LIMIT_S)
        until(_waits)
        _store().set(f"waits/{rank}", "")

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _until_wait(ranks: range) -> None:
    until(lambda: _store().check([f"waits/{rank}" for rank in ranks]))


def _every_rank_aborts(rank: int, size: int, method: str) -> bool:
    """Rank r calls r + 1 collectives, of which all but the first wait for rank 0."""
    bagua.init_process_group()
    group = _get_default_group() if method == "allreduce_inplace" else new_group()
    comm = group.get_global_communicator()
    assert (comm.device_id(), comm.cuda_stream) == (bagua.get_local_rank(), 0)
    data = torch.full((10,), float(rank))
    data.ensure_bagua_tensor("data")
    comm.barrier()
    is_second = threading.Event()

    def abort() -> None:
        assert is_second.wait(LIMIT_S)
        _until_wait(range(1, size))
        comm.abort()

    threads = [threading.Thread(target=abort)]
    threads[0].start()
    if rank:
        threads.append(_watch(rank, is_second))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank that learns of it by another one
        for _ in range(rank + 1):
            getattr(comm, method)(data.bagua_backend_tensor())  # type: ignore[attr-defined]
            is_second.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert comm.check_abort()
    bagua.allreduce_inplace(data, comm=comm)  # returns at once, as do these
    bagua.communication.broadcast_coalesced([data], comm=comm)
    assert bagua.communication.broadcast_object(rank, comm=comm) == rank
    total = torch.ones(1)
    dist.all_reduce(total)  # the default group goes on
    assert total.item() == size
    return bool((data == sum(range(size))).all())


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("method", ["allreduce_inplace", pytest.param("broadcast", marks=pytest.mark.slow)])
def test_abort_frees_waiting_ranks(backend: str, method: str) -> None:
    found = run_ranks(_every_rank_aborts, 3, method, backend=backend, group_timeout_s=NEVER_S)
    assert found[0] or method == "broadcast"


def _one_rank_aborts(rank: int, size: int) -> str:
    bagua.init_process_group()
    comm = new_group([1, 2]).get_global_communicator()
    if rank == 0:
        return ""
    comm.barrier()
    if rank == 1:
        _until_wait(range(2, 3))
        comm.abort()
        comm.abort()
        return "aborted"
    assert not comm.check_abort()
    is_here = threading.Event()
    thread = _watch(rank, is_here)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        is_here.set()
        for _ in range(2):
            bagua.recv(torch.zeros(2), 0, comm)
    thread.join(LIMIT_S)
    assert comm.check_abort() and len(seen) == 1 and seen[0].filename == __file__
    return str(seen[0].message)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_waits_for_one_that_aborts_is_told(backend: str) -> None:
    told = run_ranks(_one_rank_aborts, 3, backend=backend, group_timeout_s=NEVER_S)[2]
    assert "rank 0 aborted a communicator" in told


def _ranks_that_wait_for_others(rank: int, size: int, method: str) -> None:
    """Rank 0 aborts; others wait for their neighbours, and live on until all ranks have gone on."""
    bagua.init_process_group()
    comm = new_group().get_global_communicator()
    comm.barrier()
    is_here = threading.Event()
    thread = _watch(rank, is_here) if rank else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_here.set()
        if rank == 0:
            _until_wait(range(1, size))
            comm.abort()
        elif method == "recv":
            comm.recv(torch.zeros(2), rank - 1)
        else:
            comm.allreduce_inplace(torch.zeros(1000))
    if thread is not None:
        thread.join(LIMIT_S)
    dist.barrier()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("method", ["recv", pytest.param("allreduce_inplace", marks=pytest.mark.slow)])
def test_ranks_that_wait_for_other_ranks_go_on_too(backend: str, method: str) -> None:
    run_ranks(_ranks_that_wait_for_others, 4, method, backend=backend, group_timeout_s=NEVER_S)


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
