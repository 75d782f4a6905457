"""Entering and leaving the Horovod world, parts of it, the timeline, and ranks that are lost."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import guozhuang
import guozhuang.compat.horovod.torch as hvd
from guozhuang.compat.horovod.common import basics
from guozhuang.compat.horovod.common.util import env
from tests.ranks import RankError, run_ranks

ASKING = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


def test_nothing_works_before_init():
    assert not hvd.is_initialized()
    text = r"Horovod has not been initialized; use hvd.init\(\)."
    for name in ASKING:
        with pytest.raises(ValueError, match=text):
            getattr(hvd, name)()
    calls = [
        hvd.mpi_ops.is_homogeneous,
        hvd.mpi_threads_supported,
        hvd.join,
        hvd.barrier,
        hvd.stop_timeline,
        lambda: hvd.start_timeline("x"),
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.allgather_async(torch.ones(1)),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.remove_process_set(hvd.global_process_set),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=text):
            call()
    hvd.shutdown()


def alone(rank: int, size: int) -> None:
    """Without any launcher a process is rank 0 of 1, and collectives work."""
    hvd.init()
    assert [getattr(hvd, name)() for name in ASKING] == [0, 1, 0, 1, 0, 1]
    assert torch.equal(hvd.allreduce(torch.arange(3), op=hvd.Sum), torch.arange(3))
    assert torch.equal(hvd.allgather(torch.arange(3)), torch.arange(3))
    assert torch.equal(hvd.broadcast(torch.arange(3), 0), torch.arange(3))
    assert torch.equal(hvd.alltoall(torch.arange(3)), torch.arange(3))
    assert torch.equal(hvd.reducescatter(torch.arange(3)), torch.arange(3))
    assert hvd.broadcast_object("x") == "x" and hvd.allgather_object("x") == ["x"]
    assert hvd.join() == 0
    hvd.barrier()
    hvd.shutdown()


def test_alone():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    run_ranks(alone, 1, init=False, env=dict.fromkeys(names))


def again_and_again(rank: int, size: int) -> None:
    """Ranks count unnamed operations differently at the end of a world, and begin again with the next one."""
    ended: list[int] = []
    for turn in range(3):
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
        assert handle > max(ended, default=0)  # numbers go on
        for old in ended[:1]:  # one of the world before, while others are under way
            with pytest.raises(hvd.HorovodInternalError, match="shut down"):
                hvd.synchronize(old)
            assert hvd.synchronize(old) is None
        assert hvd.synchronize(handle).item() == size
        done = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
        hvd.barrier()
        # What the ranks leave under way: nothing on rank 0.
        ended = [hvd.allreduce_async(torch.ones(1)) for _ in range(rank * (turn + 2))]
        told: list[str] = []
        waiting = threading.Thread(target=waits, args=(ended[-1:], told))
        waiting.start()
        hvd.shutdown()
        waiting.join(20)
        assert not waiting.is_alive() and len(told) == rank
        assert all("shut down" in text for text in told)
        assert not hvd.is_initialized() and not dist.is_initialized()
        assert hvd.synchronize(done).item() == size  # it was there before
        with pytest.raises(ValueError, match="not been initialized"):
            hvd.rank()


def waits(handles: list[int], told: list[str]) -> None:
    for handle in handles:
        try:
            told.append(f"{hvd.synchronize(handle)}")
        except hvd.HorovodInternalError as error:
            told.append(str(error))


def test_init_after_shutdown():
    run_ranks(again_and_again, 2, init=False)


def inside_another_world(rank: int, size: int) -> None:
    """A world that was there before stays when Horovod leaves it."""
    guozhuang.init()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    total = torch.ones(1)
    dist.all_reduce(total)  # the script's own collectives do not meet ours
    assert total.item() == size
    hvd.shutdown()
    assert dist.is_initialized()
    dist.all_reduce(total)
    guozhuang.shutdown()
    # One that ends without being asked takes Horovod's along, whoever entered it first.
    for enter in (guozhuang.init, lambda: None):
        enter()
        hvd.init()
        assert hvd.is_initialized()
        guozhuang.shutdown()
        assert not hvd.is_initialized() and not dist.is_initialized()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    dist.barrier()
    dist.destroy_process_group()  # what was entered before is left by the next init
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.shutdown()
    assert not dist.is_initialized()


def test_inside_another_world():
    run_ranks(inside_another_world, 2, init=False)


def on_a_group_of_the_script(rank: int, size: int) -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.shutdown()
    assert dist.is_initialized()


def test_on_a_group_of_the_script():
    run_ranks(on_a_group_of_the_script, 2)


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


def one_is_left_out(rank: int, size: int) -> str:
    try:
        hvd.init(comm=[0, 2])
        told = f"{hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item()}"
    except ValueError as error:
        told = str(error)
    hvd.shutdown()
    on_two_nodes(rank)
    groups_of_parts(rank)
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
    for name in ("Engine", "_told"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="cannot be entered"):
            patch.setattr(basics, name, cannot)
            hvd.init(comm=[rank])
        assert dist.distributed_c10d._world.pg_map == before
        assert not hvd.is_initialized()
    guozhuang.shutdown()


def cannot(*_: object) -> None:
    raise RuntimeError("it cannot be entered")


def test_one_is_left_out():
    first, second, third = run_ranks(one_is_left_out, 3, init=False)
    assert (first, third) == ("2", "2")
    assert "does not name the process" in second and "[0, 2]" in second


def traced(rank: int, size: int, path: str) -> None:
    hvd.init()
    for _ in range(3):
        hvd.allreduce(torch.ones(8), name="traced tensor")
    hvd.stop_timeline()
    hvd.start_timeline(path + ".second", mark_cycles=True)
    hvd.allreduce(torch.ones(8), name="later tensor")
    hvd.allgather(torch.ones(8), name="gathered")
    hvd.barrier()
    hvd.stop_timeline()
    hvd.shutdown()


def test_timeline(tmp_path: Path):
    path = tmp_path / "timeline.json"
    run_ranks(traced, 2, str(path), init=False, env={"HOROVOD_TIMELINE": str(path)})
    text = path.read_text()
    assert json.loads(text)
    assert "allreduce.traced tensor" in text and "later tensor" not in text
    for word in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "start_time_since_epoch_in_micros"):
        assert word in text
    assert "CYCLE_START" not in text
    text = (tmp_path / "timeline.json.second").read_text()
    assert json.loads(text)
    assert "allreduce.later tensor" in text and "allgather.gathered" in text and "CYCLE_START" in text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["timeline.json", "timeline.json.second"]


def traced_later(rank: int, size: int, path: str) -> bool:
    hvd.init()
    hvd.allreduce(torch.ones(1), name="before")
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(1), name="after")
    hvd.shutdown()  # completes the file
    return "before" in Path(path).read_text() if rank == 0 else False


def test_timeline_later(tmp_path: Path):
    path = tmp_path / "later.json"
    assert run_ranks(traced_later, 2, str(path), init=False, env={"HOROVOD_TIMELINE": "DYNAMIC"}) == [False, False]
    assert json.loads(path.read_text())


def not_traced(rank: int, size: int) -> None:
    hvd.init()
    with pytest.raises(ValueError, match="Set HOROVOD_TIMELINE=DYNAMIC"):
        hvd.start_timeline("never.json")
    hvd.stop_timeline()
    hvd.shutdown()


def test_timeline_that_was_not_allowed():
    run_ranks(not_traced, 1, init=False)


def one_dies(rank: int, size: int) -> str:
    hvd.init()
    hvd.allreduce(torch.ones(1))
    normalized = hvd.SyncBatchNorm(2)(torch.randn(3, 2, requires_grad=True))
    if rank == 1:
        os._exit(7)
    try:
        if rank == 0:
            hvd.allreduce(torch.ones(1), name="waits")
        else:  # the other half of what rank 1 has begun
            normalized.sum().backward()
    except hvd.HorovodInternalError as error:
        try:
            hvd.allreduce(torch.ones(1), name="later")
        except hvd.HorovodInternalError:
            return str(error)
        return "a later one went well"
    return "no error"


def test_a_rank_that_is_lost():
    began = time.monotonic()
    outcome = run_ranks(one_dies, 3, init=False, collect_errors=True)
    assert isinstance(outcome[1], RankError) and outcome[1].exit_code == 7
    assert "rank 1" in outcome[0] and "rank 1" in outcome[2]
    assert time.monotonic() - began < 30


def one_leaves(rank: int, size: int) -> str:
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if rank == 1:
        hvd.shutdown()
        return "left"
    with pytest.raises(hvd.HorovodInternalError, match="shut down") as raised:
        hvd.allreduce(torch.ones(1), name="waits")
    hvd.shutdown()
    return str(raised.value)


def test_a_rank_that_leaves():
    outcome = run_ranks(one_leaves, 2, init=False)
    assert "rank 1" in outcome[0]


def one_does_not_come(rank: int, size: int, path: str) -> str:
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if rank == 1:
        deadline = time.monotonic() + 30
        while not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(1), name="too late")
        return ""
    with pytest.raises(hvd.HorovodInternalError) as raised:
        hvd.allreduce(torch.ones(1), name="lonely")
    Path(path).touch()
    return str(raised.value)


def test_a_rank_that_does_not_come(tmp_path: Path):
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    outcome = run_ranks(one_does_not_come, 2, str(tmp_path / "told"), init=False, env=env)
    assert "allreduce.lonely" in outcome[0] and "missing: rank 1" in outcome[0]


def tuned(rank: int, size: int) -> None:
    hvd.init()
    for step in range(40):
        for handle in [hvd.allreduce_async(torch.ones(1000), name=f"{n}", op=hvd.Sum) for n in range(4)]:
            assert hvd.synchronize(handle)[0] == size, step
    hvd.shutdown()


def test_autotune(tmp_path: Path):
    """Every rank takes the knobs that rank 0 tries, and results stay right."""
    if importlib.util.find_spec("sklearn") is None:  # not imported here: that changes the environment
        pytest.skip("scikit-learn is not installed: pip install guozhuang[horovod]")
    path = tmp_path / "tuning.csv"
    env = {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": str(path),
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "2",
        "HOROVOD_FUSION_THRESHOLD": "4096",
    }
    run_ranks(tuned, 2, init=False, env=env)
    header, *lines = path.read_text().splitlines()
    assert header.startswith(
        "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms"
    )
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    assert len(rows) == 5  # as it was, two points, the cache off, the best
    assert {row["tensor_fusion_threshold"] for row in rows} == {"4096"}  # chosen by the user
    assert [row["cycle_time_ms"] for row in rows[:3]] == ["0", "5", "50"]
    assert [row["cache_enabled"] for row in rows[:4]] == ["1", "1", "1", "0"]
