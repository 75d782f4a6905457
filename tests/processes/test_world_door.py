"""Worlds that meet at a door or at a sequence of ports: real processes with the variables of launchers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guozhuang import world
from guozhuang.errors import WorldError
from guozhuang.net import meet, search
from guozhuang.net.interfaces import own_address
from tests.processes.test_world import LOOPBACK, expires_when, listening
from tests.ranks import free_port, run_ranks
from tests.waiting import LIMIT_S, NEVER_S, until

pytestmark = pytest.mark.waits

ADDRESS = own_address([], [])
SECRET = "5ec4e7" * 8
needs_an_address = pytest.mark.skipif(ADDRESS.startswith("127."), reason="needs an address besides loopback")
NOT_TORCHRUN: dict[str, str | None] = dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
)


def as_kernel(address: str) -> str:
    return "".join(f"{int(part):02X}" for part in reversed(address.split(".")))


def meets(rank: int, world_size: int) -> tuple[world.World, list[str], list[float]]:
    sums = []
    for _ in range(2):
        me = world.init("gloo", timeout_s=LIMIT_S)
        tensor = torch.tensor(float(rank + 1))
        dist.all_reduce(tensor)
        sums.append(float(tensor))
        addresses = listening()
        dist.barrier()
        world.shutdown()
    return me, addresses, sums


@needs_an_address
def test_with_a_secret_the_store_is_behind_a_door() -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as anything may export them, and GUOZHUANG_SECRET."""
    env = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(free_port()), "GUOZHUANG_SECRET": SECRET}
    env |= {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "GLOO_SOCKET_IFNAME": None}  # type: ignore[dict-item]
    for rank, (me, addresses, sums) in enumerate(run_ranks(meets, 2, init=False, env=env)):
        assert (me.rank, me.size, me.local_rank, me.local_size, me.num_nodes) == (rank, 2, rank, 2, 1)
        assert sums == [3, 3]
        # Rank 0's door is all that others can reach.
        assert set(addresses) - LOOPBACK == ({as_kernel(ADDRESS)} if rank == 0 else set())


BARE = {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "GLOO_SOCKET_IFNAME": None}


@needs_an_address
def test_without_a_secret_the_store_listens_at_one_address() -> None:
    """The four variables alone, as Kubernetes or a user exports them."""
    env = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(free_port())} | BARE
    for rank, (me, addresses, sums) in enumerate(run_ranks(meets, 2, init=False, env=env)):
        assert (me.rank, me.num_nodes, sums) == (rank, 1, [3, 3])
        assert set(addresses) - LOOPBACK == ({as_kernel(ADDRESS)} if rank == 0 else set()), "and not at every one"


def is_told_its_own_way(rank: int, world_size: int) -> tuple[world.World, list[str], list[float]]:
    os.environ["MASTER_ADDR"] = "localhost" if rank in (0, 2) else ADDRESS
    return meets(rank, world_size)


@needs_an_address
@pytest.mark.parametrize("secret", [None, SECRET])
def test_rank_0_is_told_localhost_and_the_others_its_address(secret: str | None) -> None:
    """As Kubernetes' operators do; one more on rank 0's node is told as rank 0 is."""
    env = {"MASTER_PORT": str(free_port()), "KUBERNETES_SERVICE_HOST": "10.96.0.1", "GUOZHUANG_SECRET": secret} | BARE
    for rank, (me, addresses, sums) in enumerate(run_ranks(is_told_its_own_way, 3, init=False, env=env)):
        assert (me.rank, me.size, sums) == (rank, 3, [6, 6])
        assert set(addresses) - LOOPBACK == ({as_kernel(ADDRESS)} if rank == 0 else set())


def brings_another_secret(rank: int, world_size: int, folder: str) -> str:
    if rank == 1:
        os.environ["GUOZHUANG_SECRET"] = "ab" * 16
    refused = Path(folder, "refused")
    if rank == 0:
        expires_when(refused.exists)
    with pytest.raises(WorldError) as caught:
        world.init("gloo", timeout_s=NEVER_S)
    if rank == 1:  # who is refused does not wait for the time-out
        refused.touch()
    return str(caught.value)


@needs_an_address
def test_a_wrong_secret_is_refused_and_said_on_both_sides(tmp_path: Path) -> None:
    env = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(free_port()), "GUOZHUANG_SECRET": SECRET}
    waited, refused = run_ranks(brings_another_secret, 2, str(tmp_path), init=False, env=env)
    assert f"1 of 2 ranks did not come within {NEVER_S:g} s: 1" in waited
    assert "refuses this process" in refused and "GUOZHUANG_SECRET" in refused


def as_slurm(rank: int, nodes: str, tasks: str, folder: str, *, late: int, **more: str) -> None:
    node = rank if "," in tasks else 0
    told = {"SLURM_PROCID": rank, "SLURM_LOCALID": 0 if node else rank, "SLURM_NODEID": node}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(SLURM_STEP_NODELIST=nodes, SLURM_STEP_TASKS_PER_NODE=tasks, **more)
    there = Path(folder, "the other one is there")
    if rank == late:
        until(there.exists)
    else:
        tell_when_it_waits(there)


def tell_when_it_waits(path: Path) -> None:
    """Make a file when rank 1 has knocked in vain, or rank 0 waits for others in the roll call."""
    knock, look = search.knock, meet._RollCall._look

    def knocking(*arguments: Any) -> Any:
        try:
            return knock(*arguments)
        except OSError:
            path.touch()
            raise

    def looking(call: Any) -> None:
        path.touch()
        look(call)

    search.knock = knocking
    meet._RollCall._look = looking  # type: ignore[method-assign]


def one_node(rank: int, world_size: int, folder: str) -> tuple[world.World, list[str], list[float]]:
    as_slurm(rank, "n0", "2", folder, late=0)
    return meets(rank, world_size)


def two_nodes(rank: int, world_size: int, folder: str) -> tuple[world.World, list[str], list[float]]:
    as_slurm(rank, "n[0-1]", "1,1", folder, late=1, SLURM_LAUNCH_NODE_IPADDR=ADDRESS)
    return meets(rank, world_size)


STEP = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


def test_a_sequence_on_one_node_is_on_loopback_and_the_store_is_reached_directly(tmp_path: Path) -> None:
    results = run_ranks(one_node, 2, str(tmp_path), init=False, env=NOT_TORCHRUN | STEP)
    for rank, (me, addresses, sums) in enumerate(results):
        assert (me.rank, me.local_rank, me.num_nodes, me.launcher) == (rank, rank, 1, "slurm")
        assert sums == [3, 3]
        assert set(addresses) <= LOOPBACK


@needs_an_address
def test_a_sequence_over_nodes_is_on_the_network(tmp_path: Path) -> None:
    results = run_ranks(two_nodes, 2, str(tmp_path), init=False, env=NOT_TORCHRUN | STEP | {"SLURM_STEP_ID": "1"})
    for rank, (me, addresses, sums) in enumerate(results):
        assert (me.rank, me.local_rank, me.node_rank, me.num_nodes) == (rank, 0, rank, 2)
        assert sums == [3, 3]
        assert set(addresses) - LOOPBACK == ({as_kernel(ADDRESS)} if rank == 0 else set())
