"""Parts of the world as Horovod worlds of their own, where ranks are, and rounds of an elastic run as ``init`` sees them."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import guozhuang
import guozhuang.compat.horovod.torch as hvd
from guozhuang.compat.horovod.common import basics, elastic_variables
from guozhuang.compat.horovod.common.util import env
from guozhuang.compat.horovod.runner.elastic import worker
from guozhuang.errors import WorldError
from guozhuang.world import session
from tests.ranks import run_ranks

ASKING = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


class FakeCommunicator:
    """What of mpi4py's communicators is used."""

    def __init__(self, members: list[int]) -> None:
        self.members = members

    def Get_size(self) -> int:
        return len(self.members)

    def Get_group(self) -> list[int]:
        return self.members


def with_fake_mpi(size: int) -> None:
    mpi: Any = types.ModuleType("mpi4py.MPI")
    mpi.COMM_WORLD = FakeCommunicator(list(range(size)))
    mpi.Group = types.SimpleNamespace(
        Translate_ranks=lambda group, ranks, world: [world.index(group[r]) for r in ranks]
    )
    sys.modules["mpi4py"], sys.modules["mpi4py.MPI"] = types.ModuleType("mpi4py"), mpi


def parts_of_the_world(rank: int, size: int) -> None:
    """Each half is a world of its own; as a list, then as a communicator."""
    with_fake_mpi(size)
    half = [0, 1, 2] if rank < 3 else [3, 4]
    with pytest.raises(ValueError, match="left out"):
        hvd.init(comm=half, process_sets=[hvd.ProcessSet(FakeCommunicator([2, 3]))])
    assert not hvd.is_initialized() and not dist.is_initialized()
    for comm in (half, FakeCommunicator(half)):
        sets = hvd.ProcessSet([1])
        hvd.init(comm=comm, process_sets=[sets])
        place = half.index(rank)
        assert (hvd.rank(), hvd.size()) == (place, len(half))
        assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (place, len(half), 0, 1)
        assert hvd.global_process_set.ranks == list(range(len(half)))
        assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item() == sum(half)
        assert hvd.broadcast(torch.tensor([rank]), len(half) - 1).item() == half[-1]
        assert sets.included() == (place == 1)
        hvd.init(comm=comm)
        with pytest.raises(ValueError, match="called before"):
            hvd.init(comm=[0, 4])
        hvd.shutdown()
    hvd.init(comm=[])  # everybody
    assert hvd.size() == size
    hvd.shutdown()
    named = hvd.ProcessSet(FakeCommunicator([4, 2]))
    hvd.init(process_sets=[named])
    assert named.ranks == [2, 4] and named.mpi_comm is not None
    hvd.shutdown()
    for wrong, text in (([0, 99], "does not exist"), ([0, 0], "twice"), ([size - 1, *range(size - 1)], "rising")):
        with pytest.raises(ValueError, match=text):
            hvd.init(comm=wrong)
        assert not hvd.is_initialized()


def test_parts_of_the_world():
    run_ranks(parts_of_the_world, 5, init=False)


def worlds_that_overlap(rank: int, size: int) -> None:
    text = r"rank 0 gave \[0, 1\], rank 1 gave \[1, 2\]"
    with pytest.raises(ValueError, match=text):
        hvd.init(comm=[[0, 1], [1, 2], [1, 2]][rank])
    assert not hvd.is_initialized()


def one_is_left_out(rank: int, size: int) -> str:
    try:
        hvd.init(comm=[0, 2])
        told = f"{hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item()}"
    except ValueError as error:
        told = str(error)
    hvd.shutdown()
    on_two_nodes(rank)
    worlds_that_overlap(rank, size)
    groups_of_parts(rank)
    in_rounds(rank, size)
    return told


def on_two_nodes(rank: int) -> None:
    """Rank 0 is alone on its node; on the other one the launcher counts the ranks the other way round."""
    node, local_rank, local_size = [(1, 0, 1), (0, 1, 2), (0, 0, 2)][rank]
    told = {"GROUP_WORLD_SIZE": 2, "GROUP_RANK": node, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    with env(**{name: f"{value}" for name, value in told.items()}):
        hvd.init()
        found = tuple(getattr(hvd, name)() for name in ASKING[2:])
        assert found == [(0, 1, 1, 2), (1, 2, 0, 1), (0, 2, 0, 2)][rank]
        assert not hvd.mpi_ops.is_homogeneous()
        hvd.shutdown()


def groups_of_parts(rank: int) -> None:
    """The group of ``comm`` ends with the Horovod world, also where that could not be entered."""
    guozhuang.init()
    before = dict(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        hvd.init(comm=[rank])
        assert hvd.size() == 1 and len(dist.distributed_c10d._world.pg_map) > len(before)
        hvd.shutdown()
        assert dist.distributed_c10d._world.pg_map == before
    for name in ("NamedEngine", "_places"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="cannot be entered"):
            patch.setattr(basics, name, cannot)
            hvd.init(comm=[rank])
        assert dist.distributed_c10d._world.pg_map == before
        assert not hvd.is_initialized()
    guozhuang.shutdown()


def cannot(*_: object) -> None:
    raise RuntimeError("it cannot be entered")


class Rounds:
    """A worker of an elastic driver that begins a round whenever one is wanted; in the first two somebody is lost."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.world_timeout_s = 20.0
        self.current, self.has_entered = None, False
        self.num_joined = 0
        self.aborts: list[Callable[[], object]] = []

    def join(self) -> None:
        assert not hvd.is_initialized() and not dist.is_initialized(), "nothing is left of the round before"
        self.num_joined += 1
        os.environ.update(HOROVOD_RANK=f"{self.rank}", HOROVOD_SIZE=f"{self.size}")

    def breaks(self, abort: Callable[[], object]) -> None:
        self.aborts.append(abort)

    def has_lost(self, wait_s: float) -> bool:
        return False

    def told(self, *given: Any) -> Any:
        """In the place of ``basics._places``, which is a collective."""
        if self.num_joined == 1:
            raise hvd.HorovodInternalError("a rank is lost")
        return real_places(*given)

    def registered(self, *given: Any) -> None:
        if self.num_joined == 2:
            raise WorldError("a rank did not come")
        real_registered(*given)


real_places, real_registered = basics._places, basics.register_all


def in_rounds(rank: int, size: int) -> None:
    """Where a rank is lost before the world is whole the next round is waited for; later the driver can break collectives."""
    rounds = Rounds(rank, size)
    with pytest.MonkeyPatch.context() as patch, env(HOROVOD_RANK="7", HOROVOD_SIZE="9"):  # of a round before
        patch.setattr(elastic_variables, "driver", lambda: object())
        patch.setattr(worker, "membership", lambda: rounds)
        patch.setattr(basics, "_places", rounds.told)
        patch.setattr(basics, "register_all", rounds.registered)
        hvd.init()
        assert rounds.num_joined == 3 == len(rounds.aborts) and rounds.has_entered
        assert session._session.timeout_s == rounds.world_timeout_s
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        with pytest.raises(hvd.HorovodInternalError, match="driver of the elastic job has lost a worker"):
            handle = hvd.allreduce_async(torch.ones(1), name=f"waits.{rank}")
            if rank == 0:
                rounds.aborts[-1]()
            hvd.synchronize(handle)
        hvd.shutdown()


def test_one_is_left_out():
    first, second, third = run_ranks(one_is_left_out, 3, init=False)
    assert (first, third) == ("2", "2")
    assert "does not name the process" in second and "[0, 2]" in second
