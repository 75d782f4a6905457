"""What can go wrong with a run on one machine, a row each: what is said, with which exit code, and that nothing is left."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from guozhuang.world.machine import usable_cores
from tests.launching import Launched, guozhuang, write
from tests.ranks import RankError, run_ranks
from tests.waiting import until

pytestmark = pytest.mark.waits

# Ranks without torch, so that a row costs a second: what the launcher does is the same.
STOPS = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
print("step 1", flush=True)
open(f"came{rank}", "w").close()
if rank != 1:
    time.sleep(300)
while not all(os.path.exists(f"came{each}") for each in range(3)):
    time.sleep(0.01)
def step():
    raise ValueError("boom")
if sys.argv[1] == "raise":
    step()
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""


def test_a_worker_raises(tmp_path: Path) -> None:
    done = guozhuang("run", "-np", 3, write(tmp_path, STOPS), "raise", folder=tmp_path)
    assert done.returncode == 1, done
    report = done.stderr[done.stderr.index("guozhuang run: rank 1 failed first: exit code 1 (process ") :]
    assert "in step\n" in report and "  ValueError: boom\n" in report, report
    assert "the last lines of rank 1 before that:\n  step 1\n" in report, report
    others = (
        "  rank 0: signal 15 (SIGTERM), sent by guozhuang run\n  rank 2: signal 15 (SIGTERM), sent by guozhuang run\n"
    )
    assert f"ended because of it:\n{others}" in report, report


def test_a_worker_is_killed(tmp_path: Path) -> None:
    done = guozhuang("run", "-np", 3, write(tmp_path, STOPS), "kill", folder=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL, done
    assert "rank 1 failed first: signal 9 (SIGKILL)" in done.stderr
    assert "rank 0: signal 15 (SIGTERM), sent by guozhuang run" in done.stderr


HANGS = """
import time
import torch, torch.distributed as dist
import guozhuang as gz

def load_batch():
    time.sleep(300)

world = gz.init()
for step in range(10):
    if world.rank == 1 and step == 5:
        load_batch()
    dist.all_reduce(torch.ones(4))
"""


def test_a_worker_hangs(tmp_path: Path) -> None:
    done = guozhuang("run", "-np", 2, "--hang-timeout", 1.5, write(tmp_path, HANGS), folder=tmp_path)
    assert done.returncode == 75, done
    assert "hang: no rank has started a collective for" in done.stderr
    assert "in load_batch" in done.stderr.replace("\n[0] ", "\n").partition("---- rank 1:")[2], done.stderr
    report = done.stderr[done.stderr.index("guozhuang run: the ranks hung") :]
    assert report.startswith("guozhuang run: the ranks hung, held up by rank 1: 5 collectives"), report
    assert "ended itself first: exit code 75" in report


def test_the_agent_is_killed(tmp_path: Path) -> None:
    with Launched("run", "-np", 3, write(tmp_path, STOPS), "sleep", folder=tmp_path) as launched:
        _wait_for(tmp_path / "came0", tmp_path / "came1", tmp_path / "came2")
        assert len(launched.processes()) >= 3
        launched.send(signal.SIGKILL)
        assert launched.wait().returncode == -signal.SIGKILL
        assert not launched.left()


def test_a_given_port_is_busy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = guozhuang("run", "-np", 2, "--master-port", port, write(tmp_path, STOPS), "raise", folder=tmp_path)
    assert done.returncode == 2, done
    [line] = done.stderr.splitlines()
    assert f"port {port} is taken by another process" in line and "Fix:" in line, line


TALKS = """
import os, time
import torch, torch.distributed as dist
import guozhuang as gz
world = gz.init("gloo", timeout_s=60)
other = dist.new_group(backend="shm")
open(f"came{world.rank}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
for _ in range(50):
    for group in (None, other):
        one = torch.ones(1000)
        dist.all_reduce(one, group=group)
        assert one.sum() == 1000 * world.size
late = dist.new_group()
dist.barrier(late)
print("fine", flush=True)
"""
GARBAGE = (
    b"",
    b"\n",
    b"GET / HTTP/1.1\r\nHost: there\r\n\r\n",
    b"\x16\x03\x01\x02\x00" * 50,
    b"\xff" * 5000,
    b"\0" * 5000,
)


def test_garbage_is_sent_to_every_open_port(tmp_path: Path) -> None:
    with (
        Launched("run", "-np", 2, write(tmp_path, TALKS), folder=tmp_path) as launched,
        contextlib.ExitStack() as open_,
    ):
        _wait_for(tmp_path / "came0", tmp_path / "came1")
        ports = {
            (connection.laddr.ip, connection.laddr.port)
            for process in [psutil.Process(launched.pid), *launched.processes()]
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert ports and all(ip in ("127.0.0.1", "::1") for ip, _ in ports), ports
        for address in sorted(ports):
            for data in GARBAGE:
                line = open_.enter_context(socket.create_connection(address, timeout=5))
                with contextlib.suppress(OSError):
                    line.sendall(data)
            open_.enter_context(socket.create_connection(address, timeout=5)).shutdown(socket.SHUT_RDWR)
        (tmp_path / "go").touch()
        done = launched.wait()
        assert done.returncode == 0, done
        assert sorted(done.stdout.splitlines()) == ["[0] fine", "[1] fine"], done
        assert not launched.left()


def enters(rank: int, world_size: int) -> None:
    import guozhuang

    guozhuang.init(timeout_s=20)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE"),
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
        ({"MASTER_PORT": "seven"}, "MASTER_PORT"),
        ({"RANK": "4"}, "RANK"),
    ],
    ids=lambda each: str(each),
)
def test_a_half_set_environment(env: dict[str, str | None], said: str) -> None:
    began = time.monotonic()
    [error] = run_ranks(enters, 1, init=False, env={"WORLD_SIZE": "2"} | env, collect_errors=True)
    assert isinstance(error, RankError) and error.type_name == "UsageError" and error.exit_code == 1, error
    assert said in error.message and "Fix:" in error.message, error.message
    assert time.monotonic() - began < 15, "it waited for others before it looked at its environment"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-np", "2", "nosuch.py"], "there is no such script"),
        (["-np", "2", "-m", "no.such.module"], "there is no such module"),
        (["-np", "2", "--no-python", "nosuchprogram"], "there is no such program"),
        (["-np", "2", "broken.py"], "broken.py, line 2"),
        (["-np", "0", "train.py", "raise"], "must be at least 1"),
        (["-np", "-1", "train.py", "raise"], "must be at least 1"),
        (["-np", "two", "train.py", "raise"], "cannot be used"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_nothing_is_started(tmp_path: Path, words: list[str], said: str) -> None:
    write(tmp_path, STOPS)
    write(tmp_path, "x = 1\nif x\n    pass\n", "broken.py")
    done = guozhuang("run", *words, folder=tmp_path)
    assert done.returncode == 2 and not done.stdout, done
    [line] = done.stderr.splitlines()
    assert said in line and "Fix:" in line, line
    assert not list(tmp_path.glob("came*"))


def test_more_ranks_than_cores(tmp_path: Path) -> None:
    cores = usable_cores()
    script = write(tmp_path, "import os; print(os.environ['RANK'], os.environ['OMP_NUM_THREADS'])")
    done = guozhuang("run", "-np", 2 * cores + 1, script, folder=tmp_path)
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {rank} 1" for rank in range(2 * cores + 1))
    assert done.stderr == f"guozhuang run: {2 * cores + 1} ranks share {cores} cores of this node\n"


def _wait_for(*paths: Path) -> None:
    until(lambda: all(path.exists() for path in paths), told=lambda: [each.name for each in paths if not each.exists()])
