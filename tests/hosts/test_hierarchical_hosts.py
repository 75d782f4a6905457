"""The group over several nodes, on hosts with a network between them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.network import Hosts, missing, run_everywhere
from tests.hosts.worker import BUCKET_BYTES
from tests.launching import environment
from tests.waiting import EXPIRES_S, LIMIT_S, NEVER_S

pytestmark = [pytest.mark.needs_root, pytest.mark.skipif(bool(missing()), reason=missing() or "it can")]

WORKER = [sys.executable, "-m", "tests.hosts.worker"]
slow = pytest.mark.slow
LAYOUTS = (pytest.param([2, 2], marks=slow), pytest.param([3, 1], marks=slow), pytest.param([1, 2], marks=slow))


def found(printed: str) -> dict[str, Any]:
    lines = [line for line in printed.splitlines() if line.startswith("FOUND ")]
    assert lines, printed
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return answer


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_link_carries_a_bucket_once_per_node(layout: list[int]) -> None:
    with Hosts(len(layout)) as hosts:
        flat = [found(out) for out in run_everywhere(hosts, layout, [*WORKER, "link_bytes", "gloo"], {
            **environment(), "GLOO_SOCKET_IFNAME": "eth0"})]  # fmt: skip
        ours = [found(out) for out in run_everywhere(hosts, layout, [*WORKER, "link_bytes", "shm"], environment())]
    assert {each["kind"] for each in ours} == {"HierarchicalGroup"}
    num_nodes = len(layout)
    bucket_once = 2 * (num_nodes - 1) / num_nodes * BUCKET_BYTES
    for each in ours:
        assert each["sent"]["all_reduce"] == pytest.approx(bucket_once, rel=0.15)
    assert ours[0]["sent"]["broadcast"] == pytest.approx((num_nodes - 1) * BUCKET_BYTES, rel=0.15)
    assert ours[-1]["sent"]["broadcast"] < 0.05 * BUCKET_BYTES
    # Gloo's ring over all ranks crosses the link with 2 (ranks - 1) / ranks of the bucket.
    num_ranks = sum(layout)
    assert flat[0]["sent"]["all_reduce"] > 0.9 * 2 * (num_ranks - 1) / num_ranks * BUCKET_BYTES


@pytest.mark.parametrize(
    ("layout", "victim"),
    [pytest.param([2, 2], 1, marks=slow), ([2, 2], 2), pytest.param([3, 1], 3, marks=slow)],
    ids=str,
)
@pytest.mark.slow
def test_a_rank_killed_on_one_host_is_known_on_the_other_at_once(
    layout: list[int], victim: int, tmp_path: Path
) -> None:
    with Hosts(len(layout), rate="1gbit") as hosts:
        command = [*WORKER, "lose", str(victim), "kill", str(NEVER_S), str(tmp_path)]
        printed = run_everywhere(hosts, layout, command, environment(), expect_failure=True)
    answers = [found(out) for rank, out in enumerate(printed) if rank != victim]
    if layout == [3, 1]:  # alone on its host, it had nobody who knew its process
        assert all("connection to another node ended" in each["text"] for each in answers), answers
    else:
        assert {(each["rank"], each["pid"]) for each in answers} == {(victim, answers[0]["victims_pid"])}


@pytest.mark.slow
def test_a_cut_cable_raises_everywhere_at_the_time_out(tmp_path: Path) -> None:
    with Hosts(2, rate="1gbit") as hosts:
        processes = []
        for rank in range(4):
            own = {
                "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [*WORKER, "lose", "-1", "cut", str(40 * EXPIRES_S), str(tmp_path)]
            processes.append(hosts.start(rank // 2, command, environment() | own))
        for process in processes:
            assert process.stdout is not None
            while (line := process.stdout.readline()).strip() != "READY":
                assert line, "a rank ended before it was ready"
        hosts.cut(1)
        # The store is on host 0: what host 1 asks it while it looks for words gets no answer.
        answers = [found(process.communicate(timeout=LIMIT_S)[0]) for process in processes]
    for each in answers:
        # Some waited for the other host, some for a rank of their own that waited and gave up a moment earlier.
        assert "did not come within" in each["text"] or "gave this group up" in each["text"], each


@slow
def test_gz_init_over_two_hosts_is_gloo_unless_asked() -> None:
    with Hosts(2) as hosts:
        env = environment() | {"GLOO_SOCKET_IFNAME": "eth0"}
        answers = [found(out) for out in run_everywhere(hosts, [1, 2], [*WORKER, "default"], env)]
        assert answers == [{"num_nodes": 2, "backend": "gloo", "sum": 3.0}] * 3
        asked = environment() | {"GUOZHUANG_BACKEND": "shm"}
        answers = [found(out) for out in run_everywhere(hosts, [1, 2], [*WORKER, "default"], asked)]
        assert answers == [{"num_nodes": 2, "backend": "shm", "sum": 3.0}] * 3
