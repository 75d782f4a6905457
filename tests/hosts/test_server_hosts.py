"""``guozhuang run -H ... --servers K --server-hosts ...``: parameter servers on hosts of their own, and what they save."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts import network
from tests.hosts.network import Hosts, Running
from tests.hosts.sshd import Sshd, missing, none_left, processes_with
from tests.hosts.test_ssh import ours
from tests.launching import environment
from tests.waiting import LIMIT_S

_LACKS = network.missing() or missing()
pytestmark = [
    pytest.mark.waits,
    pytest.mark.needs_root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_LACKS), reason=_LACKS or "it can"),
]

SERVER = "guozhuang.exchange.parameter_server.server"

# The same model by ddp's all-reduce and by servers; each rank counts what leaves its host from the second step on.
SCRIPT = """
import json, sys
import torch
import guozhuang as gz
from guozhuang.exchange.parameter_server import ParameterServer

def sent():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

world = gz.init()
num_servers, num_steps = int(sys.argv[1]), int(sys.argv[2])
found = {"rank": world.rank, "size": world.size}
for name, exchange in (("ddp", None), ("servers", ParameterServer(servers=num_servers))):
    torch.manual_seed(0)
    ddp = gz.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(500, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 9)))
    if exchange is not None:
        ddp.use_exchange(exchange)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps if name == "servers" else 4):
        optimizer.zero_grad()
        inputs = torch.randn(4, 500, generator=torch.Generator().manual_seed(10 * step + world.rank))
        ddp(inputs).square().mean().backward()
        optimizer.step()
        if step == 0:
            before = sent()
        if step == 3:
            weights = torch.cat([p.detach().flatten() for p in ddp.parameters()])
            num_bytes = 3 * 4 * weights.numel()
            found[name] = {"sent": (sent() - before) / num_bytes, "weights": weights}
        if step == 5:
            print("under way", flush=True)
pair = [found[name].pop("weights") for name in ("ddp", "servers")]
found |= {"difference": (pair[0] - pair[1]).abs().max().item(), "sum": pair[1].double().sum().item()}
sys.stdout.write(json.dumps(found) + "\\n")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "work"
    found.mkdir()
    (found / "train.py").write_text(SCRIPT)
    return found


def launch(hosts: Hosts, sshd: Sshd, folder: Path, *arguments: str) -> Running:
    """``guozhuang run`` on host 0."""
    words = [sys.executable, "-m", "guozhuang", "run", "--ssh-config", str(sshd.config), *arguments]
    return hosts.run(0, words, environment(), folder / "said", cwd=folder)


def told(out: str) -> list[dict[str, Any]]:
    found = [json.loads(line[line.index("{") :]) for line in out.splitlines() if '{"rank"' in line]
    return sorted(found, key=lambda each: int(each["rank"]))


def server_process(number: int, folder: Path) -> psutil.Process:
    found = [line for line in processes_with(str(folder)) if SERVER in line and f"--number {number} " in line]
    assert len(found) == 1, found
    return psutil.Process(int(found[0].partition(":")[0]))


def test_with_servers_on_spare_hosts_a_worker_sends_each_byte_once(tmp_path: Path, folder: Path) -> None:
    with Hosts(5) as hosts, Sshd(tmp_path, hosts, 5) as sshd:
        before = [hosts.sent_bytes(host) for host in range(5)]
        launcher = launch(hosts, sshd, folder, "-H", "h0,h1,h2", "--server-hosts", "h3,h4", "train.py", "2", "4")
        code, out = launcher.wait()
        by_servers = [hosts.sent_bytes(host) - begin for host, begin in zip(range(5), before, strict=True)][3:]
        assert code == 0, out
        found = told(out)
        assert [each["size"] for each in found] == [3, 3, 3], "servers are no ranks"
        assert len({each["sum"] for each in found}) == 1, "all ranks have the same bits"
        for each in found:
            assert each["difference"] < 1e-6, each
            assert 1.0 <= each["servers"]["sent"] < 1.06, each
            assert 1.30 < each["ddp"]["sent"] < 1.40, each  # 2 (n - 1) / n = 4/3
        # Each server answers three workers with about its half of the gradients, in four steps.
        share = 3 * 4 * 4 * (500 * 1000 + 1000 + 9 * 1000 + 9) / 2
        assert all(0.9 * share < sent < 1.1 * share + 300_000 for sent in by_servers), (by_servers, share)
        assert not ours(out), out
        assert not none_left(str(folder))


@pytest.fixture
def running(tmp_path: Path, folder: Path) -> Iterator[tuple[Hosts, Running]]:
    with Hosts(2) as hosts, Sshd(tmp_path, hosts, 2) as sshd:
        launcher = launch(hosts, sshd, folder, "-H", "h0:2", "--server-hosts", "h1:2", "train.py", "2", "1000000000")
        launcher.says("(?s)under way.*under way", limit_s=LIMIT_S)
        yield hosts, launcher


def test_a_server_that_is_killed_is_named_with_its_host(running: tuple[Hosts, Running], folder: Path) -> None:
    _, launcher = running
    victim = server_process(1, folder)
    victim.kill()
    code, out = launcher.wait()
    assert code == 1, out
    said = [line for line in ours(out) if not line.startswith("server ")]
    named = (
        rf"host h1 \(parameter servers 0 to 1\) ends the run: parameter server 1 \(process {victim.pid}\) ended with "
    )
    assert re.match(named + r"signal 9 \(SIGKILL\)", said[0]), out
    assert "host h0" in said[-1], out
    assert not none_left(str(folder))


@pytest.mark.parametrize("what", ["launcher", "interrupt", "supervisor", "rank"])
def test_nothing_is_left_of_servers(running: tuple[Hosts, Running], folder: Path, what: str) -> None:
    _, launcher = running
    if what in ("launcher", "interrupt"):
        os.kill(launcher.process.pid, signal.SIGKILL if what == "launcher" else signal.SIGINT)
    elif what == "supervisor":
        agent = server_process(0, folder).parent()
        assert agent is not None and agent.parent() is not None
        agent.parent().kill()  # type: ignore[union-attr]
    else:
        ranks = [
            line for line in processes_with(str(folder)) if "train.py 2 1000000000" in line and "guozhuang" not in line
        ]
        os.kill(int(ranks[0].partition(":")[0]), signal.SIGKILL)
    code, out = launcher.wait()
    said = [line for line in ours(out) if not line.startswith("server ")]  # they tell of the ranks that they lost
    expected = {"launcher": -9, "interrupt": 130, "supervisor": 255, "rank": 137}
    assert code == expected[what], out
    if what == "interrupt":
        assert "then host h1 (parameter servers 0 to 1) was ended because of it" in ours(out), out
    if what == "supervisor":
        assert said[0].startswith("host h1 (parameter servers 0 to 1) was lost"), out
    if what == "rank":
        assert said[0].startswith("host h0 failed: exit code 137"), out
    assert not none_left(str(folder))
