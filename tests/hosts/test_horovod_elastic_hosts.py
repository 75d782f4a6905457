"""Elastic runs with workers on other hosts: over ssh on loopback, and over a network of two hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import network
from tests.hosts.network import Hosts, Running
from tests.hosts.sshd import Sshd, missing, none_left, with_ssh
from tests.waiting import LIMIT_S

pytestmark = [
    pytest.mark.waits,
    pytest.mark.needs_root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can"),
]
_LACKS = network.missing()

LIGHT = """
import os, sys, time
from guozhuang.compat.horovod.runner.elastic import worker
while True:
    found = worker.membership().join()
    told = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "HOROVOD_HOSTNAME", "MASTER_ADDR", "MINE")]
    with open(f"pid{told[0]}", "w") as file:
        file.write(str(os.getpid()))
    print("round", found.number, *told, flush=True)
    while not os.path.exists(f"over{found.number}"):
        time.sleep(0.02)
    if os.path.exists("all_over"):
        sys.exit(0)
"""
TRAIN = """
import os, time
import torch
import horovod.torch as hvd
torch.set_num_threads(1)
hvd.init()
state = hvd.elastic.TorchState(step=0, total=0.0)

@hvd.elastic.run
def train(state):
    while not (state.step >= 20 and os.path.exists("over")):
        state.total += float(hvd.allreduce(torch.ones(1000), op=hvd.Sum)[0])
        state.step += 1
        print("step", state.step, hvd.rank(), hvd.size(), os.environ["HOROVOD_HOSTNAME"], os.getpid(),
              os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
        time.sleep(0.05)
        state.commit()
    print("the end", hvd.size())

train(state)
"""


def command(folder: Path, *options: str, script: str) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "guozhuang.compat.horovod.runner.launch",
        "--host-discovery-script",
        f"cat {folder}/hosts",
    ]
    return [*words, *options, sys.executable, script]


def test_workers_over_ssh(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "light.py").write_text(LIGHT)
    (folder / "hosts").write_text("localhost:1\na0:1\n")
    with Sshd(tmp_path) as sshd, open(tmp_path / "out", "wb") as out:
        words = command(folder, "-np", "2", "--min-np", "2", "--max-np", "3", script="light.py")
        process = subprocess.Popen(
            words,
            env=with_ssh(tmp_path, sshd, MINE="carried"),
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
        run = Running(process, tmp_path / "out")
        try:
            run.says(r"\[0\] round 1 0 2 localhost 127.0.0.1 carried", r"\[1\] round 1 1 2 a0 127.0.0.1 carried")
            (folder / "hosts").write_text("localhost:1\na0:1\na1:1\n")
            run.says("hosts are now: localhost:1, a0:1, a1:1")
            (folder / "over1").touch()
            run.says(r"\[2\] round 2 2 3 a1 127.0.0.1 carried")
            os.kill(int((folder / "pid1").read_text()), signal.SIGKILL)
            run.says(r"rank 1 \(host a0", r"signal 9 \(SIGKILL\)")
            (folder / "over2").touch()
            run.says(r"\[1\] round 3 1 2 a1 127.0.0.1 carried")
            (folder / "all_over").touch()
            (folder / "over3").touch()
            code, printed = run.wait()
            assert code == 0, printed
        finally:
            process.kill()
        assert not none_left(str(folder))


def test_a_host_that_cannot_be_reached(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "light.py").write_text(LIGHT)
    (folder / "hosts").write_text("localhost:1\nnowhere.invalid:1\n")
    with Sshd(tmp_path) as sshd, open(tmp_path / "out", "wb") as out:
        words = command(folder, "-np", "2", "--min-np", "1", script="light.py")
        (folder / "over1").touch()
        (folder / "all_over").touch()
        process = subprocess.Popen(
            words, env=with_ssh(tmp_path, sshd, MINE="-"), cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True
        )
        code, printed = Running(process, tmp_path / "out").wait()
        assert code == 0 and "host nowhere.invalid could not be reached" in printed, printed
        assert "[0] round 1 0 1 localhost" in printed


@pytest.mark.skipif(bool(_LACKS), reason=_LACKS or "it can")
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_two_hosts_with_a_network_between_them(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "hosts").write_text("h0:1\n")
    with Hosts(2) as hosts, Sshd(tmp_path, hosts, 2) as sshd:
        words = command(folder, "-np", "1", "--min-np", "1", "--max-np", "2", script="train.py")
        run = hosts.run(0, words, with_ssh(tmp_path, sshd), tmp_path / "out", cwd=folder)
        run.says(" 0 1 h0 ")
        (folder / "hosts").write_text("h0:1\nh1:1\n")
        printed = run.says(" 1 2 h1 ", " 0 2 h0 ")
        [line, *_] = [line for line in printed.splitlines() if " 1 2 h1 " in line]
        assert line.endswith(" eth0"), "gloo uses the interface between the hosts"
        if how == "killed":
            os.kill(int(line.split()[-2]), signal.SIGKILL)
            run.says(r"signal 9 \(SIGKILL\)")
        else:
            hosts.cut(1)
            run.says("host h1 was lost", "round 3 begins: 1 ranks on h0", limit_s=LIMIT_S)
        (folder / "over").touch()
        code, printed = run.wait()
        assert code == 0 and "the end 1" in printed, printed
        assert not none_left(str(folder))
