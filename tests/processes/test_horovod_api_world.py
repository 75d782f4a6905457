"""Entering and leaving the Horovod world, the timeline, and ranks that are lost."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import guozhuang
import guozhuang.compat.horovod.torch as hvd
from guozhuang.compat.horovod.common.util import env
from guozhuang.errors import UsageError
from tests.processes.cases import names_of_cases
from tests.processes.horovod_cases import check, run_cases
from tests.processes.horovod_verbs import check_verbs
from tests.ranks import RankError, run_ranks
from tests.waiting import LIMIT_S

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
        hvd.global_process_set.size,
        hvd.global_process_set.rank,
        hvd.global_process_set.included,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=text):
            call()
    hvd.shutdown()


def alone(rank: int, size: int) -> None:
    """Without any launcher a process is rank 0 of 1, and collectives work."""
    # One that Guozhuang does not know would start many of them, each for itself.
    with env(HOROVOD_RANK="1", HOROVOD_SIZE="2"), pytest.raises(UsageError, match="say rank 1 of 2"):
        hvd.init()
    assert not hvd.is_initialized() and not dist.is_initialized()
    hvd.init()
    with pytest.raises(ValueError, match="Set HOROVOD_TIMELINE=DYNAMIC"):
        hvd.start_timeline("never.json")
    hvd.stop_timeline()
    assert [getattr(hvd, name)() for name in ASKING] == [0, 1, 0, 1, 0, 1]
    check_verbs([0], 0)
    assert hvd.broadcast_object("x") == "x" and hvd.allgather_object("x") == ["x"]
    assert hvd.join() == 0
    hvd.barrier()
    hvd.shutdown()


def test_alone():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    run_ranks(alone, 1, init=False, env=dict.fromkeys(names))


def case_again_and_again(rank: int, size: int) -> None:
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
        waiting.join(LIMIT_S)
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


def case_inside_another_world(rank: int, size: int) -> None:
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


def case_timeline(rank: int, size: int) -> None:
    path = folder() / "timeline.json"
    with env(HOROVOD_TIMELINE=str(path)):
        hvd.init()
    for _ in range(3):
        hvd.allreduce(torch.ones(8), name="traced tensor")
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(8), name="after the first")
    hvd.start_timeline(f"{path}.second", mark_cycles=True)
    hvd.allreduce(torch.ones(8), name="later tensor")
    hvd.allgather(torch.ones(8), name="gathered")
    hvd.barrier()
    hvd.stop_timeline()
    hvd.barrier()
    text = path.read_text()
    assert json.loads(text)
    assert "allreduce.traced tensor" in text and "later tensor" not in text and "after" not in text
    for word in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "start_time_since_epoch_in_micros"):
        assert word in text
    assert "CYCLE_START" not in text
    events = json.loads(text)
    [track] = [
        e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "allreduce.traced tensor"
    ]
    spans = [event for event in events if event["pid"] == track and event["ph"] == "X"]
    assert [event["name"] for event in spans] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 3
    for negotiated, carried_out in zip(spans[::2], spans[1::2], strict=True):
        assert negotiated["ts"] + negotiated["dur"] <= carried_out["ts"] + 1 and carried_out["dur"] > 0
    text = path.with_name("timeline.json.second").read_text()
    assert json.loads(text)
    assert "allreduce.later tensor" in text and "allgather.gathered" in text and "CYCLE_START" in text
    assert sorted(each.name for each in path.parent.iterdir()) == ["timeline.json", "timeline.json.second"]
    hvd.shutdown()


def case_timeline_that_is_allowed(rank: int, size: int) -> None:
    path = folder() / "later.json"
    with env(HOROVOD_TIMELINE="DYNAMIC"):
        hvd.init()
    hvd.allreduce(torch.ones(1), name="before")
    if rank == 0:
        with pytest.raises(OSError):
            hvd.start_timeline(f"{path}.is/in/no/folder")
    hvd.start_timeline(str(path))
    hvd.allreduce(torch.ones(1), name="after")
    hvd.shutdown()  # completes the file
    if rank == 0:
        text = path.read_text()
        assert json.loads(text) and "after" in text and "before" not in text


def case_timeline_that_cannot_be_written(rank: int, size: int) -> None:
    """Rank 0 is told by ``init``, which leaves nothing behind, and the others in what they wait for."""
    with env(HOROVOD_TIMELINE=str(folder() / "is/in/no/folder")):
        if rank == 0:
            with pytest.raises(
                ValueError, match=r"HOROVOD_TIMELINE.* No such file .*got '.*/is/in/no/folder'.*Fix: make"
            ):
                hvd.init()
            assert not hvd.is_initialized() and not dist.is_initialized()
        else:
            hvd.init()
            with pytest.raises(hvd.HorovodInternalError, match="shut down by rank 0"):
                hvd.barrier()
            hvd.shutdown()


def folder() -> Path:
    """One that the ranks share."""
    return Path(os.environ["FOLDER"])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    env = {"FOLDER": str(tmp_path_factory.mktemp("shared"))}
    return run_ranks(run_cases, 2, __name__, names_of_cases(globals()), False, hvd.__name__, init=False, env=env)


@pytest.mark.parametrize("name", names_of_cases(globals()))
def test_worlds(outcome, name):
    check(outcome, name)


def on_a_group_of_the_script(rank: int, size: int) -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.shutdown()
    assert dist.is_initialized()


def test_on_a_group_of_the_script():
    run_ranks(on_a_group_of_the_script, 2)


def one_dies(rank: int, size: int, path: str) -> str:
    """Rank 1 dies when the others have all that it sent; they leave when both have heard of it."""
    store = dist.FileStore(path)
    hvd.init()
    hvd.allreduce(torch.ones(1))
    normalized = hvd.SyncBatchNorm(2)(torch.randn(3, 2, requires_grad=True))
    store.set(f"normalized {rank}", "")
    if rank == 1:
        store.wait(["normalized 0", "normalized 2"])
        os._exit(7)
    found = one_hears(rank, normalized)
    store.set(f"heard {rank}", "")
    store.wait(["heard 0", "heard 2"])
    return found


def one_hears(rank: int, normalized: torch.Tensor) -> str:
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


def test_a_rank_that_is_lost(tmp_path: Path):
    outcome = run_ranks(one_dies, 3, str(tmp_path / "store"), init=False, collect_errors=True, timeout_s=LIMIT_S)
    assert isinstance(outcome[1], RankError) and outcome[1].exit_code == 7, outcome[1]
    for rank in (0, 2):
        assert isinstance(outcome[rank], str) and "rank 1" in outcome[rank], outcome[rank]


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
