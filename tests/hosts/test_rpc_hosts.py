"""Scripts for torch.distributed.rpc over two hosts: where their ranks meet, what crosses the link, and a server that is killed.

TensorPipe passes tensors through memory where two processes are on one machine, which it knows by the kernel's boot id. So
each host of the test has a boot id of its own, and tensors cross the link as between machines.
"""

from __future__ import annotations

import re
import secrets
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.hosts import network
from tests.hosts.network import Hosts, Running
from tests.hosts.sshd import Sshd, missing, none_left
from tests.launching import ROOT, environment
from tests.processes.test_rpc_scripts import learnt

_LACKS = network.missing() or missing()
pytestmark = [
    pytest.mark.waits,
    pytest.mark.needs_root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_LACKS), reason=_LACKS or "it can"),
]

STEPS = 40
NUM_WEIGHTS = 20 * 64 + 64 + 64 * 2 + 2  # of examples/rpc_batched.py

# The trainers and the server of examples/rpc_batched.py, which each rank chooses by its role, or else by its rank. The address
# of the store is a word of the command line, in which MASTER stands for MASTER_ADDR; "told": the launcher's store.
BATCHED = """
import os, sys, types
import torch
from torch.distributed import rpc
from examples.rpc_batched import SERVER, serve

where, steps = sys.argv[1], int(sys.argv[2])
rank, size, role = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["ROLE_NAME"]
is_server = rank == size - 1 if role == "default" else role == "ps"
number = rank if role == "default" else int(os.environ["ROLE_RANK"])
own = {} if where == "told" else {"init_method": where.replace("MASTER", os.environ["MASTER_ADDR"])}
torch.set_num_threads(1)
rpc.init_rpc(
    SERVER if is_server else f"trainer{number + 1}", rank=rank, world_size=size,
    rpc_backend_options=rpc.TensorPipeRpcBackendOptions(**own),
)
if is_server:
    print(f"server: process {os.getpid()}", flush=True)
    serve(types.SimpleNamespace(world_size=size, steps=steps, warmup_steps=1, batch_size=64, hidden=64, lr=0.5))
rpc.shutdown()
"""
# Begins the command of each rank: the program after it sees the boot id in the file boot.HOST.
WITH_OWN_BOOT_ID = (
    *("--no-python", "unshare", "--mount", "sh", "-c"),
    'mount --bind boot.$(hostname) /proc/sys/kernel/random/boot_id; exec "$@"',
    "sh",
)
TRAIN = (sys.executable, "-u", "train.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "work"
    found.mkdir()
    (found / "train.py").write_text(BATCHED)
    for host in range(2):
        (found / f"boot.h{host}").write_text(f"{uuid.uuid4()}\n")
    return found


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Hosts, Sshd]]:
    with Hosts(2) as hosts, Sshd(tmp_path, hosts, 2) as sshd:
        yield hosts, sshd


def over_ssh(two: tuple[Hosts, Sshd], folder: Path, where: str, *program: str) -> list[Running]:
    """The launcher on host 0, with these hosts and their numbers of ranks (``-H``)."""
    hosts, sshd = two
    options = ["--ssh-config", str(sshd.config), "-H", where, *WITH_OWN_BOOT_ID, *program]
    words = [sys.executable, "-m", "guozhuang", "run", *options]
    return [hosts.run(0, words, environment(), folder / "said0", cwd=folder)]


def by_hand(two: tuple[Hosts, Sshd], folder: Path, roles: bool, secret: str, *program: str) -> list[Running]:
    """An agent on each host: the trainers' on host 0, the server's on host 1."""
    hosts, _ = two
    begun = []
    for host, (number, role) in enumerate([("2", "trainer"), ("1", "ps")]):
        options = ["--nnodes", "2", "--node-rank", str(host), "--master-addr", hosts.address(0), "-np", number]
        options += ["--role", role] if roles else []
        words = [sys.executable, "-m", "guozhuang", "run", *options, *WITH_OWN_BOOT_ID, *program]
        env = environment(GUOZHUANG_SECRET=secret) if secret else environment()
        begun.append(hosts.run(host, words, env, folder / f"said{host}", cwd=folder))
    return begun


def start(two: tuple[Hosts, Sshd], folder: Path, way: str, *program: str) -> list[Running]:
    if way == "ssh":
        return over_ssh(two, folder, "h0:2,h1:1", *program)
    secret = secrets.token_hex(16) if way == "agents with a secret" else ""
    return by_hand(two, folder, way == "agents by role", secret, *program)


def printed(runs: list[Running]) -> str:
    return "".join(run.text for run in runs)


@pytest.mark.parametrize(
    ("way", "where"),
    [
        pytest.param("ssh", "told", id="ssh-the launcher's store"),
        pytest.param("ssh", "tcp://10.77.0.10:29600", id="ssh-a named host"),
        pytest.param("ssh", "tcp://MASTER:29600", id="ssh-MASTER_ADDR and a port of its own"),
        pytest.param("agents by role", "told", id="agents by role-the launcher's store"),
        pytest.param("agents", "tcp://MASTER:29600", id="agents-MASTER_ADDR and a port of its own"),
        pytest.param(
            "agents with a secret", "tcp://MASTER:29600", id="with a secret-MASTER_ADDR and a port of its own"
        ),
    ],
)
def test_trainers_and_their_server_on_two_hosts(two: tuple[Hosts, Sshd], folder: Path, way: str, where: str) -> None:
    hosts, _ = two
    before = [hosts.sent_bytes(host) for host in range(2)]
    runs = start(two, folder, way, *TRAIN, where, str(STEPS))
    assert [run.wait()[0] for run in runs] == [0] * len(runs), printed(runs)
    assert learnt(printed(runs), {"1", "2"}), printed(runs)
    # Two trainers send gradients in each step, and the server sends them the weights.
    least = 2 * STEPS * 4 * NUM_WEIGHTS
    assert all(hosts.sent_bytes(host) - begin > least for host, begin in enumerate(before))
    assert not none_left(str(folder))


@pytest.mark.parametrize("way", ["ssh", "agents by role"])
def test_a_server_that_is_killed_on_the_other_host(two: tuple[Hosts, Sshd], folder: Path, way: str) -> None:
    runs = start(two, folder, way, *TRAIN, "told", "1000000")
    pid = kill_server(runs)
    assert_named(runs, 2, pid)
    assert not none_left(str(folder))


def test_a_killed_server_that_trainers_ask(two: tuple[Hosts, Sshd], folder: Path) -> None:
    """They raise in their main threads. The server is rank 0, and keeps the store of the script; the launcher is elsewhere."""
    hosts, _ = two
    options = f"--master-addr {hosts.address(1)} --steps 1000000 --rank $RANK --world-size $WORLD_SIZE"
    by_rank = f"exec {sys.executable} {ROOT}/examples/rpc_parameter_server.py {options}"
    runs = over_ssh(two, folder, "h1:1,h0:2", "sh", "-c", by_rank)
    runs[0].says("(?s)under way.*under way")
    listening = [hosts.listening(host) for host in range(2)]
    assert listening[0] == {hosts.address(0)}, "TensorPipe, on the interface that leads to the other host"
    assert hosts.address(1) in listening[1] <= {hosts.address(1), "::"}, "and the store of the script, on every one"
    pid = kill_server(runs)
    assert_named(runs, 0, pid)
    assert not none_left(str(folder))


def kill_server(runs: list[Running]) -> int:
    """Kill the server once both trainers are under way; return its process id."""
    runs[0].says("(?s)under way.*under way")
    (pid,) = map(int, re.findall(r"server: process (\d+)", printed(runs)))
    psutil.Process(pid).kill()
    return pid


def assert_named(runs: list[Running], rank: int, pid: int) -> None:
    """Every launcher ends soon, and the first failure that it reports is the server's."""
    for run in runs:
        code, text = run.wait()
        assert code == 137, text
        named = re.findall(r"rank (\d) failed first: (.*?) \(process (\d+) on host (\w+)\)", text)
        assert named == [(str(rank), "signal 9 (SIGKILL)", str(pid), "h1")], text
