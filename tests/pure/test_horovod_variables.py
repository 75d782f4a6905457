"""HOROVOD_*: what is read, what is refused, and what means nothing here."""

from __future__ import annotations

import logging
import os

import pytest

from guozhuang.compat.horovod.common import variables as horovod_variables
from guozhuang.compat.horovod.common.variables import HorovodVariables, read, without_meaning
from guozhuang.errors import UsageError


def test_nothing_is_set() -> None:
    assert read({}) == HorovodVariables()
    assert read({"HOROVOD_CYCLE_TIME": " ", "HOROVOD_AUTOTUNE": "", "RANK": "3"}) == HorovodVariables()


def test_every_variable_is_read() -> None:
    found = read(
        {
            "HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "2.5", "HOROVOD_CACHE_CAPACITY": " 7 ",
            "HOROVOD_DISABLE_GROUP_FUSION": "1", "HOROVOD_DYNAMIC_PROCESS_SETS": "True", "HOROVOD_TIMELINE": "DYNAMIC",
            "HOROVOD_TIMELINE_MARK_CYCLES": "0", "HOROVOD_STALL_CHECK_DISABLE": "no", "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.5", "HOROVOD_LOG_LEVEL": "DEBUG", "HOROVOD_AUTOTUNE": "2",
            "HOROVOD_AUTOTUNE_LOG": "a b.csv", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "1", "HOROVOD_ELASTIC": "1",
            "HOROVOD_ELASTIC_TIMEOUT": "60", "HOROVOD_START_TIMEOUT": "70", "HOROVOD_HOSTNAME": "node-1", "HOROVOD_RANK": "3",
            "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_RANK": "1",
            "HOROVOD_CROSS_SIZE": "2", "HOROVOD_THREAD_AFFINITY": "0,1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "65535",
        }
    )  # fmt: skip
    assert found == HorovodVariables(
        fusion_threshold=0, cycle_time=2.5, cache_capacity=7, disable_group_fusion=True, dynamic_process_sets=True,
        timeline="DYNAMIC", timeline_mark_cycles=False, stall_check_disable=False, stall_check_time_seconds=5.0,
        stall_shutdown_time_seconds=0.5, log_level="debug", autotune=True, autotune_log="a b.csv",
        autotune_gaussian_process_noise=1.0, elastic=True, elastic_timeout=60.0, start_timeout=70.0, hostname="node-1",
        rank=3, size=4, local_rank=1, local_size=2, cross_rank=1, cross_size=2, thread_affinity="0,1",
        gloo_rendezvous_port=65535,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("FUSION_THRESHOLD", "64MB", "a whole number of at least 0"),
        ("FUSION_THRESHOLD", "-1", "a whole number of at least 0"),
        ("CACHE_CAPACITY", "1.5", "a whole number of at least 0"),
        ("CYCLE_TIME", "fast", "a number of at least 0"),
        ("CYCLE_TIME", "inf", "a number of at least 0"),
        ("CYCLE_TIME", "nan", "a number of at least 0"),
        ("STALL_CHECK_TIME_SECONDS", "-3", "a number of at least 0"),
        ("AUTOTUNE", "maybe", "1 or 0"),
        ("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "1.1", "a number from 0 to 1"),
        ("LOG_LEVEL", "chatty", "one of trace, debug, info, warning, error, fatal"),
        ("SIZE", "0", "a whole number of at least 1"),
        ("GLOO_RENDEZVOUS_PORT", "65536", "a whole number from 1 to 65535"),
    ],
)
def test_what_cannot_be_is_refused(name: str, value: str, allowed: str) -> None:
    with pytest.raises(UsageError) as caught:
        read({f"HOROVOD_{name}": value})
    assert f"HOROVOD_{name} must be {allowed} (got {value!r})" in str(caught.value)


def test_what_means_nothing_is_named() -> None:
    environ = {
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_TORUS_ALLREDUCE": "0", "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_THREAD_AFFINITY": "0", "HOROVOD_BATCH_D2D_MEMCOPIES": "1",
        "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CYCLE_TIME": "1", "HOROVOD_LOG_HIDE_TIME": "0",
    }  # fmt: skip
    assert without_meaning(read(environ)) == [
        "HOROVOD_LOG_HIDE_TIME", "HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_THREAD_AFFINITY", "HOROVOD_CONTROLLER",
        "HOROVOD_GPU_OPERATIONS",
    ]  # fmt: skip
    assert without_meaning(read({"HOROVOD_LOG_HIDE_TIME": "1", "HOROVOD_GLOO_IFACE": "eth0"})) == []


def test_what_horovodrun_alone_heeds_is_named_elsewhere() -> None:
    told = {"HOROVOD_START_TIMEOUT": "5", "HOROVOD_HOSTNAME": "a", "HOROVOD_CROSS_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
    place = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}
    assert without_meaning(read(told | place)) == []
    assert sorted(without_meaning(read(told))) == sorted(told)
    elastic = {"HOROVOD_ELASTIC_TIMEOUT": "9", **place}
    assert without_meaning(read(elastic)) == ["HOROVOD_ELASTIC_TIMEOUT"]
    assert without_meaning(read(elastic | {"HOROVOD_ELASTIC": "1"})) == []


@pytest.mark.parametrize("told", [{}, {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"}, {"HOROVOD_SIZE": "4"}])
def test_the_world_is_as_the_launcher_said(told: dict[str, str]) -> None:
    horovod_variables.check_world(read(told), 1, 4)


@pytest.mark.parametrize(
    ("rank", "size", "words"),
    [("1", "4", "say rank 1 of 4, but this process is rank 0 of 1"), ("", "2", "say rank ? of 2")],
)
def test_a_world_of_another_launcher_is_refused(rank: str, size: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        horovod_variables.check_world(read({"HOROVOD_RANK": rank, "HOROVOD_SIZE": size}), 0, 1)
    assert words in str(caught.value) and "Fix: start it with Guozhuang's horovodrun" in str(caught.value)


def test_rank_0_says_so_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_variables, "_named", set())
    variables = read({"HOROVOD_NUM_NCCL_STREAMS": "4", "HOROVOD_WITH_PYTORCH": "1"})
    with caplog.at_level(logging.WARNING, "guozhuang"):
        horovod_variables.log_what_means_nothing(1, variables)
        horovod_variables.log_what_means_nothing(0, read({"HOROVOD_AUTOTUNE": "1"}))
        assert not caplog.records
        horovod_variables.log_what_means_nothing(0, variables)
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().endswith("HOROVOD_NUM_NCCL_STREAMS, HOROVOD_WITH_PYTORCH")
    # A second init in the same process: what was named already is not named again.
    with caplog.at_level(logging.WARNING, "guozhuang"):
        horovod_variables.log_what_means_nothing(0, variables)
        assert len(caplog.records) == 1
        more = read({"HOROVOD_NUM_NCCL_STREAMS": "4", "HOROVOD_TORUS_ALLREDUCE": "1"})
        horovod_variables.log_what_means_nothing(0, more)
    assert len(caplog.records) == 2 and caplog.records[1].getMessage().endswith(
        "docs/horovod.md): HOROVOD_TORUS_ALLREDUCE"
    )


def test_process_sets_become_dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "0")  # so that it is put back
    horovod_variables.set_dynamic_process_sets()
    assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1" and read().dynamic_process_sets is True
