"""``srun python train.py`` under a real Slurm whose nodes are hosts with a network between them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.hosts import network, slurm
from tests.hosts.member import members
from tests.hosts.network import Hosts
from tests.hosts.slurm import Cluster
from tests.launching import ROOT, environment

WHY_NOT = slurm.missing() or network.missing()
pytestmark = [pytest.mark.needs_root, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can")]

MEMBER = [sys.executable, "-m", "tests.hosts.member"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Iterator[Cluster]:
    with Cluster(nodes=2, cpus=2, hosts=hosts) as found:
        yield found


@pytest.mark.parametrize("on", [0, 1], ids=["srun on rank 0's node", "srun on the other node"])
@pytest.mark.slow
def test_ranks_meet_at_a_door_on_the_network(on: int, cluster: Cluster, hosts: Hosts) -> None:
    """Node names lead to 127.0.1.1 on their own node, as Debian has it; rank 0 listens where the others come from."""
    unset = [word for name in os.environ.keys() - environment().keys() for word in ("-u", name)]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = cluster.run(["env", *unset, "srun", "-N2", "-n3", *MEMBER], env, on=on)
    assert done.returncode == 0, f"{done.stdout}\n{cluster.logs()}"
    found = members(done.stdout)
    assert [(e["rank"], e["node_rank"], e["num_nodes"], e["local_rank"], e["local_size"]) for e in found] == [
        (0, 0, 2, 0, 2),
        (1, 0, 2, 1, 2),
        (2, 1, 2, 0, 1),
    ], done.stdout
    assert [each["sum"] for each in found] == [6, 6, 6]
    assert {each["interface"] for each in found} == {"eth0"}
    outside = [
        each
        for each in found[0]["listens"]
        if not each.startswith("127.") and each.endswith(f":{found[0]['ports'][0]}")
    ]
    assert outside == [f"{hosts.address(0)}:{found[0]['ports'][0]}"]
    assert not [each for member in found for each in member["listens"] if each.startswith("0.0.0.0")]


@pytest.mark.slow
def test_rank_0_on_another_node_than_the_first(cluster: Cluster, hosts: Hosts) -> None:
    """A host file decides; srun runs on the first node, so that neither of the usual guesses is right."""
    unset = [word for name in os.environ.keys() - environment().keys() for word in ("-u", name)]
    (cluster.folder / "hostfile").write_text("h1\nh0\n")
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLURM_HOSTFILE": str(cluster.folder / "hostfile")}
    done = cluster.run(["env", *unset, "srun", "-N2", "-n2", "--distribution=arbitrary", *MEMBER], env)
    assert done.returncode == 0, f"{done.stdout}\n{cluster.logs()}"
    found = members(done.stdout)
    assert [(e["rank"], e["node_rank"], e["sum"]) for e in found] == [(0, 1, 3), (1, 0, 3)], done.stdout
    assert any(each.startswith(hosts.address(1)) for each in found[0]["listens"])
