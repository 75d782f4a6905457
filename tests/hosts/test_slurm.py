"""``srun python train.py`` under a real Slurm, on one machine that plays two nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from guozhuang.world import machine
from tests.hosts import slurm
from tests.hosts.member import members
from tests.hosts.slurm import Cluster, finish
from tests.launching import environment
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.needs_root, pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "it can")]

MEMBER = f"{sys.executable} -m tests.hosts.member"
ENV = environment(OMP_NUM_THREADS="1", GUOZHUANG_SECRET="")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with mock.patch.dict(os.environ, ENV, clear=True), Cluster(nodes=2, cpus=4) as found:
        yield found


def sums(found: list[dict[str, Any]]) -> list[float]:
    return [each["sum"] for each in found]


def test_a_step_over_two_nodes(cluster: Cluster) -> None:
    """Three tasks on two nodes, as Slurm laid them out; they meet at a port that Slurm reserved for them."""
    done = cluster.run(["srun", "-N2", "-n3", "--ntasks-per-node=2", "--resv-ports=2", *MEMBER.split()])
    assert done.returncode == 0, done.stdout
    found = members(done.stdout)
    assert [
        (e["rank"], e["size"], e["node_rank"], e["num_nodes"], e["local_rank"], e["local_size"]) for e in found
    ] == [(0, 3, 0, 2, 0, 2), (1, 3, 0, 2, 1, 2), (2, 3, 1, 2, 0, 1)], done.stdout
    assert {each["launcher"] for each in found} == {"slurm"}
    assert sums(found) == [6, 6, 6]
    assert all(address.startswith("127.") for each in found for address in each["listens"])
    assert f"127.0.0.1:{found[0]['ports'][0]}" in found[0]["listens"]
    assert 12000 <= found[0]["ports"][0] < 12200
    assert ["guozhuang door" in each["doors"] for each in found] == [True, False, False]


@pytest.mark.parametrize(("each", "threads"), [(1, 1), (4, min(machine.usable_cores(), 4))])
def test_a_task_computes_with_the_cpus_it_was_given(cluster: Cluster, each: int, threads: int) -> None:
    """This Slurm binds nothing, so a task may run on all cores of the machine; it takes as many as it asked for."""
    done = cluster.run(["srun", "-N1", "-n1", f"-c{each}", "env", "-u", "OMP_NUM_THREADS", *MEMBER.split()])
    assert done.returncode == 0, done.stdout
    assert [each["threads"] for each in members(done.stdout)] == [threads], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("job", ["het", "one kind"])
def test_a_step_of_two_parts(cluster: Cluster, job: str) -> None:
    """``srun ... : ...``: each part has an srun of its own. In a job of two parts, and inside a plain one."""
    whole = [] if job == "het" else ["salloc", "--quiet", "-N2", "-n4", "--ntasks-per-node=2"]
    done = cluster.run([*whole, "srun", "-N1", "-n1", *MEMBER.split(), ":", "-N1", "-n2", *MEMBER.split()])
    assert done.returncode == 0, done.stdout
    found = members(done.stdout)
    assert [(e["rank"], e["node_rank"], e["num_nodes"], e["local_rank"], e["local_size"]) for e in found] == [
        (0, 0, 2, 0, 1),
        (1, 1, 2, 0, 2),
        (2, 1, 2, 1, 2),
    ], done.stdout
    assert sums(found) == [6, 6, 6]


@pytest.mark.slow
def test_two_steps_of_one_job_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """The second step's ranks come in another order: each step meets among itself."""
    step = f"srun --exact --mem=0 -n2 -N1 {MEMBER}"
    printed = cluster.batch(
        f"GZ_TEST_RUN=first {step} late 1 {tmp_path}/0 &\nGZ_TEST_RUN=second {step} late 0 {tmp_path}/1 &\nwait",
        "-N1",
        "-n4",
    )
    found = members(printed)
    assert [(each["runs"], each["rank"], each["sum"]) for each in found] == [
        (["first"], 0, 3), (["first"], 1, 3), (["second"], 0, 3), (["second"], 1, 3),
    ], printed  # fmt: skip
    assert found[0]["ports"] != found[2]["ports"]


@pytest.mark.slow
def test_two_jobs_on_one_node_with_ranks_that_start_late(cluster: Cluster, tmp_path: Path) -> None:
    """What breaks the widely copied helper: a late rank takes rank 0's own port for taken, or a neighbour's for free."""
    srun = ["srun", "-N1", "-w", "n0", "-n2", *MEMBER.split(), "late"]
    jobs = [
        cluster.start([*srun, str(late), str(tmp_path / str(late))], {"GZ_TEST_RUN": f"{late} is late"})
        for late in (0, 1)
    ]
    ends = [finish(job, LIMIT_S) for job in jobs]
    printed = "".join(end.stdout for end in ends)
    assert [end.returncode for end in ends] == [0, 0], printed
    found = members(printed)
    assert [(each["runs"], each["rank"], each["sum"]) for each in found] == [
        (["0 is late"], 0, 3), (["0 is late"], 1, 3), (["1 is late"], 0, 3), (["1 is late"], 1, 3),
    ], printed  # fmt: skip
    assert found[1]["has_waited"], "rank 1 waited for rank 0"
    assert found[2]["has_waited"], "rank 0 waited for rank 1"


@pytest.mark.slow
def test_the_first_ports_taken_by_strangers(cluster: Cluster) -> None:
    """One accepts and is silent, one talks nonsense: rank 0 takes the third, and rank 1 finds it there."""
    done = cluster.run(["srun", "-N1", "-n2", *MEMBER.split(), "strangers"])
    assert done.returncode == 0, done.stdout
    found = members(done.stdout)
    assert sums(found) == [3, 3]
    assert f"127.0.0.1:{found[0]['ports'][2]}" in found[0]["listens"]
    assert f"port {found[0]['ports'][0]} is taken here" in done.stdout


def test_the_batch_script_outside_of_srun(cluster: Cluster) -> None:
    printed = cluster.batch(MEMBER, "-N2", "-n4")
    [found] = members(printed)
    assert (found["launcher"], found["size"], found["sum"]) == ("alone", 1, 1)
    assert printed.count("Start the script with `srun python ...`") == 1
    assert "4 tasks (SLURM_NTASKS)" in printed
