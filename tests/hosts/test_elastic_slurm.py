"""``srun guozhuang run train.py``: an agent per node finds the others by itself; one per rank is told what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.hosts import slurm
from tests.hosts.slurm import Cluster
from tests.launching import ROOT

pytestmark = [pytest.mark.needs_root, pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "it can")]

SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print(os.environ["RANK"], os.environ["GROUP_RANK"], int(one), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2, cpus=4) as found:
        (found.folder / "train.py").write_text(SCRIPT)
        yield found


def srun(cluster: Cluster, *options: str, ranks: int = 1) -> tuple[int, str]:
    command = [
        "srun",
        *options,
        sys.executable,
        "-m",
        "guozhuang",
        "run",
        "-np",
        str(ranks),
        str(cluster.folder / "train.py"),
    ]
    env = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "PATH": os.environ["PATH"]}
    done = cluster.run(command, env)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_an_agent_per_node(cluster: Cluster) -> None:
    code, out = srun(cluster, "-N2", "--ntasks-per-node=1", ranks=2)
    assert code == 0, out
    found = sorted(line.partition("] ")[2] for line in out.splitlines() if line.startswith("["))
    assert found == ["0 0 4", "1 0 4", "2 1 4", "3 1 4"], out


@pytest.mark.slow
def test_an_agent_per_rank_is_told_what_to_do(cluster: Cluster) -> None:
    code, out = srun(cluster, "-N1", "-n2")
    assert code == 2
    assert "--ntasks-per-node=1" in out and "`srun python train.py`" in out
