"""Scripts for torch.distributed.rpc run as they are under ``guozhuang run``: their stores, roles, and how they end."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch

from examples import rpc_batched
from tests.launching import ROOT, Launched, guozhuang, write
from tests.ranks import free_port
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.waits

START_S = 3 * LIMIT_S  # imports of torch by five processes, where the machine is busy
EXAMPLES = ROOT / "examples"
BY_HAND = f'exec {sys.executable} {EXAMPLES / "rpc_parameter_server.py"} --rank $RANK --world-size $WORLD_SIZE "$@"'


def parameter_server(*more: object) -> list[object]:
    words = ["run", "-np", 3, "--no-python", "bash", "-c", BY_HAND, "bash", "--master-port", free_port(), *more]
    return [str(word) for word in words]


def batched(*more: object, options: Sequence[object] = ("-np", 1)) -> list[object]:
    return ["run", *options, EXAMPLES / "rpc_batched.py", "--world-size", 3, "--master-port", free_port(), *more]


def losses(printed: str, which: str) -> dict[str, float]:
    return {trainer: float(loss) for trainer, loss in re.findall(rf"trainer (\d): .*{which} loss ([\d.]+)", printed)}


def learnt(printed: str, trainers: set[str]) -> bool:
    """Whether all trainers told a first and a last loss, and the last ones are much smaller."""
    first, last = losses(printed, "first"), losses(printed, "last")
    return first.keys() == last.keys() == trainers and all(last[t] < first[t] / 2 for t in trainers)


@pytest.mark.slow
def test_remote_references_and_distributed_autograd_by_ranks_on_the_command_line(tmp_path: Path) -> None:
    done = guozhuang(*parameter_server(), folder=tmp_path, timeout_s=START_S)
    assert done.returncode == 0 and learnt(done.stdout, {"1", "2"}), done
    assert done.stdout.count("gradients of 0.bias, 0.weight, 2.bias, 2.weight lie on the server") == 2, done


@pytest.mark.slow
def test_batched_updates_with_futures_in_processes_that_the_script_starts(tmp_path: Path) -> None:
    """Two steps of two trainers are those of one process with both batches."""
    done = guozhuang(*batched("--steps", 2, "--warmup-steps", 1), folder=tmp_path, timeout_s=START_S)
    assert done.returncode == 0, done
    generators = [torch.Generator().manual_seed(number) for number in (1, 2)]
    model = rpc_batched.make_model(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        for generator in generators:
            inputs = torch.randn(64, 20, generator=generator)
            labels = (inputs[:, :4].sum(1) > 0).long()
            (torch.nn.functional.cross_entropy(model(inputs), labels) / 2).backward()
        optimizer.step()
    told = float(re.findall(r"weights: (\S+)", done.stdout)[-1])
    assert told == pytest.approx(sum(p.sum().item() for p in model.parameters()), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("-np", 1), id="ours"),
        pytest.param(("-np", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"), id="torch-elastic"),
    ],
)
def test_batched_updates_learn_under_every_agent(options: tuple[object, ...], tmp_path: Path) -> None:
    done = guozhuang(*batched(options=options), folder=tmp_path, timeout_s=START_S)
    assert done.returncode == 0 and learnt(done.stdout, {"1", "2"}), done


@pytest.mark.slow
def test_ddp_and_rpc_mixed(tmp_path: Path) -> None:
    done = guozhuang(
        "run", "-np", 4, EXAMPLES / "rpc_hybrid.py", "--port", free_port(), folder=tmp_path, timeout_s=START_S
    )
    assert done.returncode == 0 and learnt(done.stdout, {"0", "1"}), done
    weights = re.findall(r"weights (\S+)", done.stdout)
    assert len(weights) == 2 and weights[0] == weights[1], done


ADDS = """
import os, sys
import torch
from torch.distributed import rpc

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port, names = sys.argv[1], {"default": "worker", "ps": "server", "trainer": "trainer"}
if port != "told":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
name = names[os.environ["ROLE_NAME"]] + os.environ["ROLE_RANK"]
rpc.init_rpc(name, rank=rank, world_size=size)
others = sorted(each.name for each in rpc.api._get_current_rpc_agent().get_worker_infos())
if rank == 0:
    print(others, rpc.rpc_sync(others[-1], torch.add, args=(torch.ones(2), 1)).tolist(), flush=True)
rpc.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", ["told", "own", "asked"])
def test_a_script_meets_where_it_says(which: str, tmp_path: Path) -> None:
    """At the store that the launcher keeps, at one of its own, or at the port that the launcher was asked for."""
    port = free_port()
    options = ["--master-port", port] if which == "asked" else []
    told = "told" if which == "told" else port
    done = guozhuang("run", "-np", 2, *options, write(tmp_path, ADDS), told, folder=tmp_path, timeout_s=START_S)
    assert done.returncode == 0 and "['worker0', 'worker1'] [2.0, 2.0]" in done.stdout, done


@pytest.mark.slow
def test_roles_by_name(tmp_path: Path) -> None:
    """An agent for the server, an agent for the trainers: ``--role`` reaches the script as torchrun's variables."""
    script, own = write(tmp_path, ADDS), free_port()
    meeting = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port())
    roles = [("--node-rank", 0, "-np", 1, "--role", "ps"), ("--node-rank", 1, "-np", 2, "--role", "trainer")]
    folders = [tmp_path / str(node) for node in range(2)]
    for folder in folders:
        folder.mkdir()
    with (
        Launched("run", *meeting, *roles[0], script, own, folder=folders[0]) as server,
        Launched("run", *meeting, *roles[1], script, own, folder=folders[1]) as trainers,
    ):
        done = [each.wait(START_S) for each in (server, trainers)]
        assert [each.returncode for each in done] == [0, 0], done
        assert "['server0', 'trainer0', 'trainer1'] [2.0, 2.0]" in done[0].stdout, done
        assert not server.left() and not trainers.left()


NESTED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print(f"ranks: {int(one)}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_a_launcher_in_a_rank_meet_at_its_own_store(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, write(tmp_path, NESTED))
    done = guozhuang("run", "-np", 1, "--no-python", sys.executable, *torchrun, folder=tmp_path, timeout_s=START_S)
    assert done.returncode == 0 and done.stdout.count("ranks: 2") == 2, done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "named"),
    [
        pytest.param(parameter_server, r"run: rank 0 failed first: signal 9 \(SIGKILL\)", id="a rank"),
        pytest.param(
            batched, "process 0 terminated with signal SIGKILL", id="a process of a rank", marks=pytest.mark.slow
        ),
    ],
)
def test_a_server_that_is_killed_is_named_and_nothing_is_left(command: object, named: str, tmp_path: Path) -> None:
    assert callable(command)
    with Launched(*command("--steps", 1_000_000), folder=tmp_path) as launched:
        launched.until(lambda: launched.printed.count("under way") == 2, START_S)
        assert open_ports(launched, loopback=True), "TensorPipe listens"
        assert len(open_ports(launched, loopback=False)) <= 1, "the store of the script alone"
        (pid,) = re.findall(r"server: process (\d+)", launched.printed)
        psutil.Process(int(pid)).kill()
        done = launched.wait(START_S)
        assert "set timeout" not in done.stderr, "no call of RPC waited for its own limit"
        assert done.returncode != 0 and re.search(named, done.stderr), done.stderr
        assert not launched.left()


def open_ports(launched: Launched, *, loopback: bool) -> set[int]:
    """The ports where processes of a run listen, on loopback or on other addresses."""
    found = set()
    for process in launched.processes():
        for connection in process.net_connections("tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and (address.ip in ("127.0.0.1", "::1")) is loopback:
                found.add(address.port)
    return found
