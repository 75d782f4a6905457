"""What can go wrong with a run on one machine, a row each: what is said, with which exit code, and that nothing is left.

How a run ends that is ended from outside is in test_run_ends.py; what is refused before anything is started, in test_run.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from guozhuang.world.machine import usable_cores
from tests.hosts.network import missing
from tests.launching import ROOT, Launched, environment, guozhuang, write
from tests.ranks import RankError, run_ranks
from tests.waiting import LIMIT_S, until

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
if sys.argv[1] == "exit":
    sys.exit(31)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise", 1, ["exit code 1 (process ", "in step\n", "  ValueError: boom\n", "before that:\n  step 1\n"]),
        ("exit", 31, ["exit code 31 (process ", "the last lines of rank 1:\n  step 1\n"]),
        ("kill", 128 + signal.SIGKILL, ["signal 9 (SIGKILL)", "out of memory"]),
    ],
)
def test_a_worker_ends(tmp_path: Path, end: str, code: int, said: list[str]) -> None:
    done = guozhuang("run", "-np", 3, write(tmp_path, STOPS), end, folder=tmp_path)
    assert done.returncode == code, done
    report = done.stderr[done.stderr.index("guozhuang run: rank") :]
    assert report.startswith("guozhuang run: rank 1 failed first: "), report
    assert all(words in report for words in said), report
    others = (f"  rank {rank}: signal 15 (SIGTERM), sent by guozhuang run\n" for rank in (0, 2))
    assert f"ended because of it:\n{''.join(others)}" in report, report


def test_a_stopped_worker_is_ended_with_the_others(tmp_path: Path) -> None:
    """A stopped process handles no SIGTERM: it would be there until it is killed, after --shutdown-timeout."""
    text = "#!/bin/sh\nif [ $RANK = 0 ]; then kill -STOP $$; fi\nsleep 0.3\nexit 3\n"
    script = write(tmp_path, text, "train.sh")
    script.chmod(0o755)
    done = guozhuang("run", "-np", 2, "--shutdown-timeout", 50, "--no-python", script, folder=tmp_path)
    assert done.returncode == 3, done
    assert "rank 0: signal 15 (SIGTERM), sent by guozhuang run" in done.stderr, done


LEAVES = """
import os, sys
import guozhuang as gz
if os.environ["RANK"] == "1" and sys.argv[1] == "before":
    sys.exit(0)
gz.init(sys.argv[2])
if os.environ["RANK"] == "1":
    sys.exit(0)
import torch
for _ in range(1000):
    torch.distributed.all_reduce(torch.ones(4))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "backend", "said"),
    [
        ("before", "gloo", "WorldError: rank 1 of 3 ended with exit code 0 before the world began"),
        ("later", "gloo", "rank 1 had ended before that with exit code 0"),
        ("later", "shm", "left the group, while this rank waited for it"),
    ],
)
def test_a_worker_ends_with_0_while_the_others_need_it(tmp_path: Path, when: str, backend: str, said: str) -> None:
    done = guozhuang("run", "-np", 3, write(tmp_path, LEAVES), when, backend, folder=tmp_path)
    assert done.returncode == 1, done
    assert said in done.stderr[done.stderr.index("guozhuang run: rank") :], done.stderr


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


# Stands for torch: like some modules of C that it imports, it takes any exception for a sign that something is missing.
SWALLOWS = """
import time
open("importing", "w").close()
try:
    time.sleep(60)
except BaseException:
    pass
raise SystemExit(9)
"""


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    write(tmp_path / "torch", SWALLOWS, "__init__.py")
    command = [sys.executable, "-m", "guozhuang", "run", "-np", "2", "train.py"]
    environ = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    with subprocess.Popen(command, env=environ, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        _wait_for(tmp_path / "importing")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (130, "guozhuang: interrupted\n")


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.skipif(bool(missing()), reason=missing() or "it can")
@pytest.mark.parametrize(
    ("first", "code", "said"),
    [
        ("ulimit -n 24", 2, "too few open files: the launcher of 2 ranks needs 56 (got 24). Fix: ulimit -n 1024"),
        ("ip link set lo down", 1, "cannot connect to its own address 127.0.0.1"),
        ("hostname " + "n" * 64, 0, ""),
    ],
    ids=["few open files", "loopback is down", "a long name of the host"],
)
def test_a_narrow_machine(tmp_path: Path, first: str, code: int, said: str) -> None:
    script = write(tmp_path, HANGS.replace("range(10)", "range(3)"))
    command = f"ip link set lo up; {first}; exec {sys.executable} -m guozhuang run -np 2 {script}"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "sh", "-c", command],
        env=environment(), cwd=tmp_path, timeout=LIMIT_S, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code and said in done.stderr, done
    assert code == 0 or len(done.stderr.splitlines()) <= 2, done.stderr


TALKS = """
import os, time
import torch, torch.distributed as dist
import guozhuang as gz
world = gz.init("gloo")
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
                line = open_.enter_context(socket.create_connection(address, timeout=LIMIT_S))
                with contextlib.suppress(OSError):
                    line.sendall(data)
            open_.enter_context(socket.create_connection(address, timeout=LIMIT_S)).shutdown(socket.SHUT_RDWR)
        (tmp_path / "go").touch()
        done = launched.wait()
        assert done.returncode == 0, done
        assert sorted(done.stdout.splitlines()) == ["[0] fine", "[1] fine"], done
        assert not launched.left()


def enters(rank: int, world_size: int) -> None:
    import guozhuang

    guozhuang.init(timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
        ({"MASTER_PORT": "seven"}, "MASTER_PORT"),
    ],
    ids=lambda each: str(each),
)
def test_a_half_set_environment(env: dict[str, str | None], said: str) -> None:
    [error] = run_ranks(enters, 1, init=False, env={"WORLD_SIZE": "2"} | env, collect_errors=True)
    assert isinstance(error, RankError) and error.type_name == "UsageError" and error.exit_code == 1, error
    assert said in error.message and "Fix:" in error.message, error.message


def test_more_ranks_than_cores(tmp_path: Path) -> None:
    cores = usable_cores()
    script = write(tmp_path, "import os; print(os.environ['RANK'], os.environ['OMP_NUM_THREADS'])")
    done = guozhuang("run", "-np", 2 * cores + 1, script, folder=tmp_path)
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {rank} 1" for rank in range(2 * cores + 1))
    assert done.stderr == f"guozhuang run: {2 * cores + 1} ranks share {cores} cores of this node\n"


def _wait_for(*paths: Path) -> None:
    until(lambda: all(path.exists() for path in paths), told=lambda: [each.name for each in paths if not each.exists()])
