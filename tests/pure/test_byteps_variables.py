"""What DMLC_* and BYTEPS_* say of a process and of a ``bpslaunch``, from a dict."""

from __future__ import annotations

from typing import Any

import pytest

from guozhuang.compat.byteps import bpslaunch, variables
from guozhuang.errors import UsageError
from guozhuang.launch.request import launched_role, members_of
from guozhuang.net.meeting_point import MeetingPoint
from guozhuang.world.discovery import discover


def process(**changes: str | None) -> dict[str, str]:
    """Process 1 of 2 on worker 1 of 3, as somebody exports it by hand."""
    told: dict[str, str | None] = {
        "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "3", "DMLC_WORKER_ID": "1", "DMLC_PS_ROOT_URI": "10.0.0.7",
        "DMLC_PS_ROOT_PORT": "1234", "BYTEPS_LOCAL_RANK": "1", "BYTEPS_LOCAL_SIZE": "2",
    }  # fmt: skip
    return {name: value for name, value in (told | changes).items() if value is not None}


def test_the_place_of_a_process_started_by_hand() -> None:
    found = discover(process())
    assert (found.rank, found.size, found.local_rank, found.local_size) == (3, 6, 1, 2)
    assert (found.node_rank, found.num_nodes, found.launcher) == (1, 3, "environment")
    point = found.meeting_point
    assert isinstance(point, MeetingPoint) and (point.host, point.port) == ("10.0.0.7", 1234)
    assert not point.is_kept_by_launcher and "DMLC_PS_ROOT_PORT" in point.port_option
    assert discover(process(BYTEPS_GLOBAL_RANK="5")).rank == 5, "as resume gives it"
    assert discover(process(GUOZHUANG_SECRET="ab" * 16)).meeting_point.secret == b"\xab" * 16  # type: ignore[union-attr]
    alone = process(DMLC_NUM_WORKER="1", DMLC_WORKER_ID="0", BYTEPS_LOCAL_SIZE="1", BYTEPS_LOCAL_RANK="0")
    assert discover({k: v for k, v in alone.items() if "ROOT" not in k}).size == 1
    ours = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "5",
    }
    assert discover(process() | ours).size == 2, "a launcher of ours says it too, and comes first"
    assert discover(process(OMPI_COMM_WORLD_SIZE="9", OMPI_COMM_WORLD_RANK="8")).rank == 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        *(({name: None}, f"{name} is not set") for name in process() if name != "DMLC_ROLE"),
        ({"DMLC_WORKER_ID": "3"}, r"DMLC_WORKER_ID must be below DMLC_NUM_WORKER=3"),
        ({"BYTEPS_LOCAL_RANK": "2"}, r"BYTEPS_LOCAL_RANK must be below BYTEPS_LOCAL_SIZE=2"),
        ({"DMLC_NUM_WORKER": "0"}, "DMLC_NUM_WORKER must be at least 1"),
        ({"DMLC_NUM_WORKER": "two"}, "DMLC_NUM_WORKER must be a whole number"),
        ({"BYTEPS_GLOBAL_RANK": "6"}, "BYTEPS_GLOBAL_RANK must be below .*=6"),
        ({"BYTEPS_GLOBAL_RANK": "2"}, "BYTEPS_GLOBAL_RANK=2 is not process BYTEPS_LOCAL_RANK=1 of any 2 in a row"),
        ({"DMLC_PS_ROOT_PORT": "99999"}, "DMLC_PS_ROOT_PORT must be below"),
        ({"DMLC_ROLE": "server"}, "DMLC_ROLE=server: this process is no worker"),
    ],
)
def test_what_is_missing_or_cannot_be(changes: dict[str, str | None], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        discover(process(**changes))


def launch(**changes: str | None) -> dict[str, str]:
    told: dict[str, str | None] = {
        "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_WORKER_ID": "1",
        "DMLC_PS_ROOT_URI": "10.0.0.7", "DMLC_PS_ROOT_PORT": "1234",
    }  # fmt: skip
    return {name: value for name, value in (told | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "--nnodes 4 --node-rank 2 --master-addr 10.0.0.7 --master-port 1234 --nproc-per-node 1 --no-python x"),
        (
            {"NVIDIA_VISIBLE_DEVICES": "0,3,4", "DMLC_INTERFACE": "eth1"},
            "--nnodes 4 --node-rank 2 --master-addr 10.0.0.7 --master-port 1234 --interface eth1 --nproc-per-node 3 "
            "--no-python x",
        ),
        ({"DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0"}, "--standalone --nproc-per-node 1 --no-python x"),
        (
            {"DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0", "BYTEPS_FORCE_DISTRIBUTED": "1"},
            "--nnodes 3 --node-rank 1 --master-addr 10.0.0.7 --master-port 1234 --nproc-per-node 1 --no-python x",
        ),
    ],
)
def test_a_worker_is_a_node_of_guozhuang_run(changes: dict[str, str], words: str) -> None:
    assert bpslaunch.words_for(launched_role(launch(**changes)), ["x"]) == words.split()


@pytest.mark.parametrize(("role", "has"), [("worker", (True, 0)), ("server", (False, 1)), ("scheduler", (False, 0))])
def test_who_meets_at_the_scheduler(role: str, has: tuple[bool, int]) -> None:
    members = members_of(launched_role(launch(DMLC_ROLE=role)), "")
    assert members is not None and members.names == ["scheduler", "worker 0", "worker 1", "server 0"]
    assert (members.has_ranks, members.num_servers) == has
    assert members.takes_next == (role == "server") and members.first_free == 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        *(({name: None}, f"{name} is not set|DMLC_ROLE says") for name in launch()),
        ({"DMLC_ROLE": "boss"}, "DMLC_ROLE says what bpslaunch starts.*boss"),
        ({"DMLC_WORKER_ID": "2"}, "DMLC_WORKER_ID must be below DMLC_NUM_WORKER=2"),
        ({"DMLC_NUM_SERVER": "-1"}, "DMLC_NUM_SERVER must be at least 0"),
        ({"BYTEPS_GLOBAL_RANK": "7"}, "BYTEPS_GLOBAL_RANK says another rank"),
    ],
)
def test_what_a_launcher_misses(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        launched_role(launch(**changes))


def test_what_means_nothing_is_named_in_one_line_and_rdma_in_another() -> None:
    asked = {"BYTEPS_NUMA_ON": "1", "BYTEPS_KEY_HASH_FN": "djb2", "PS_VERBOSE": "2", "BYTEPS_PCIE_SWITCH_SIZE": "8"}
    silent = {
        "BYTEPS_ENABLE_GDB": "0",
        "DMLC_ENABLE_RDMA": "0",
        "BYTEPS_TRACE_ON": "",
        "BYTEPS_ENABLE_ASYNC": "1",
        "PATH": "x",
    }
    assert variables.without_meaning(launch(**silent)) == []
    [nothing] = variables.without_meaning(launch(**silent, **asked))
    assert nothing.endswith(": " + ", ".join(sorted(asked)))
    [rdma] = variables.without_meaning({"DMLC_ENABLE_RDMA": "ibverbs", "BYTEPS_RDMA_START_DEPTH": "1"})
    assert rdma == (
        "BYTEPS_RDMA_START_DEPTH, DMLC_ENABLE_RDMA: bytes travel by gloo, shared memory or NCCL; RDMA is NCCL's own choice "
        "(NCCL_IB_DISABLE)"
    )
    with pytest.raises(
        UsageError, match="start the script under gdb yourself; the launcher shows tracebacks and stacks"
    ):
        variables.without_meaning({"BYTEPS_ENABLE_GDB": "1"})
