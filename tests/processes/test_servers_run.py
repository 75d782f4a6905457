"""``guozhuang run --servers K``: servers beside the ranks, named when they fail, and gone with the run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.launching import Launched, guozhuang, write
from tests.ranks import free_port
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.waits

SCRIPT = """
import sys
import torch
import guozhuang as gz
from guozhuang.exchange.parameter_server import ParameterServer

world = gz.init(timeout_s=3600)  # nobody waits for it
torch.manual_seed(0)
model = gz.DistributedDataParallel(torch.nn.Linear(20, 30))
model.use_exchange(ParameterServer(servers=int(sys.argv[1])))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
num_steps = int(sys.argv[2])
for step in range(num_steps):
    optimizer.zero_grad()
    model(torch.randn(4, 20, generator=torch.Generator().manual_seed(step * 10 + world.rank))).square().mean().backward()
    optimizer.step()
    if step == 3:
        print("under way", flush=True)
print(f"{world.rank} of {world.size}: {model.module.weight.sum().item()!r}")
"""
# Imports of torch by four processes of their own, where the machine is busy.
START_S = 3 * LIMIT_S


def test_a_run_with_servers(tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPT)
    done = guozhuang("run", "-np", 2, "--servers", 2, script, 2, 5, folder=tmp_path, timeout_s=START_S)
    assert done.returncode == 0, done
    told = [line.partition(": ")[2] for line in done.stdout.splitlines() if " of 2: " in line]
    assert len(told) == 2 and told[0] == told[1], done
    assert "server" not in done.stderr, done.stderr


@pytest.mark.slow
def test_an_error_of_a_rank_ends_the_others_where_they_serve(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        SCRIPT.replace(
            "    if step == 3:",
            "    if step == 3 and world.rank == 1:\n        raise ValueError('mine')\n    if step == 3:",
        ),
    )
    options = ("--hang-timeout", "off")
    done = guozhuang("run", "-np", 3, *options, script, 0, 8, folder=tmp_path, timeout_s=START_S, forks_ranks=False)
    assert done.returncode == 1 and "ValueError: mine" in done.stderr, done
    assert "rank 1 (process" in done.stderr and "this rank was waiting for the " in done.stderr, done


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Launched]:
    script = write(tmp_path, SCRIPT)
    with Launched(
        "run", "-np", 2, "--servers", 2, script, 2, 1_000_000_000, folder=tmp_path, forks_ranks=False
    ) as launched:
        launched.until(lambda: launched.printed.count("under way") == 2)
        yield launched


def process_of(launched: Launched, mark: str) -> psutil.Process:
    found = [process for process in launched.processes() if mark in " ".join(process.cmdline())]
    assert found, mark
    return found[0]


@pytest.mark.slow
def test_a_server_that_is_killed_is_named_and_ends_the_run(running: Launched) -> None:
    process_of(running, "--number 1").kill()
    done = running.wait()
    assert done.returncode == 1
    assert "parameter server 1 (process" in done.stderr and "signal 9 (SIGKILL)" in done.stderr, done.stderr
    assert not running.left()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_ends_the_servers(running: Launched) -> None:
    process_of(running, "train.py 2 1000000000").kill()
    done = running.wait()
    assert done.returncode == 128 + 9
    assert "signal 9 (SIGKILL)" in done.stderr and "server 0: parameter server: rank" in done.stderr, done.stderr
    assert not running.left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_nothing_is_left_when_the_launcher_is_ended(running: Launched, number: signal.Signals) -> None:
    assert len(running.processes()) >= 4
    running.send(number)
    done = running.wait()
    assert done.returncode == (-9 if number == signal.SIGKILL else 128 + 2)
    assert not running.left()


@contextlib.contextmanager
def two_nodes(
    folder: Path, options: Sequence[Sequence[object]], *script: object, **env: str
) -> Iterator[list[Launched]]:
    """Agents of two nodes that meet on loopback, each with a folder of its own for temporary files."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        nodes = []
        for node, own in enumerate(options):
            where = folder / f"node{node}"
            where.mkdir()
            meeting = ("--nnodes", 2, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port)
            nodes.append(stack.enter_context(Launched("run", *meeting, *own, *script, folder=where, **env)))
        yield nodes


@pytest.mark.slow
@pytest.mark.parametrize("secret", ["", "ab" * 16], ids=["open", "secret"])
def test_each_of_two_nodes_starts_its_own_servers(tmp_path: Path, secret: str) -> None:
    script = write(tmp_path, SCRIPT)
    options = [("-np", 2, "--servers", 1), ("-np", 1, "--servers", 2)]
    more = {"GUOZHUANG_SECRET": secret} if secret else {}
    with two_nodes(tmp_path, options, script, 3, 5, **more) as nodes:
        done = [node.wait(START_S) for node in nodes]
        told = [line.partition(": ")[2] for each in done for line in each.stdout.splitlines() if " of 3: " in line]
        assert [each.returncode for each in done] == [0, 0], done
        assert len(told) == 3 and len(set(told)) == 1, done
        assert not any("server" in each.stderr for each in done), done
        assert not any(node.left() for node in nodes)


@pytest.mark.slow
def test_a_server_that_is_killed_ends_both_nodes(tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPT)
    with two_nodes(tmp_path, [("-np", 1, "--servers", 1)] * 2, script, 2, 1_000_000_000) as nodes:
        for node in nodes:
            node.until(lambda node=node: "under way" in node.printed)
        victim = process_of(nodes[1], "--number 1")
        victim.kill()
        done = [node.wait() for node in nodes]
        named = f"parameter server 1 (process {victim.pid}) ended with signal 9 (SIGKILL) on host"
        assert [each.returncode for each in done] == [1, 1], done
        assert all(named in each.stderr for each in done), done
        assert not any(node.left() for node in nodes)
