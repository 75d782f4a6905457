"""Several agents of ``guozhuang run``: on hosts of their own, meeting by number or as they come, with and without a secret."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.hosts.network import Hosts, Running, missing
from tests.launching import environment
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.waits, pytest.mark.needs_root, pytest.mark.skipif(bool(missing()), reason=missing())]


# Meets the others with nothing but torch, by a store; says who is there; then waits to be ended, or for a file.
SCRIPT = """
import datetime, os, sys, time
import torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
found = [None] * size
dist.all_gather_object(found, os.uname().nodename)
print(f"met {size}: {' '.join(found)} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
stop = os.path.join(os.environ["OUT"], "stop")
once = os.path.join(os.environ["OUT"], "once")
if f"fail{rank}" in sys.argv and not os.path.exists(once):
    open(once, "w").close()
    raise ValueError("boom")
while {"wait", "turn"} & set(sys.argv) and not os.path.exists(stop):
    time.sleep(0.05)
    if "turn" in sys.argv:
        dist.barrier()
dist.barrier()
dist.destroy_process_group()
"""


Start = Callable[..., Running]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


@pytest.fixture
def start(hosts: Hosts, tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()

    def begin(host: int, options: str, *arguments: str, **more: str) -> Running:
        env = environment(OUT=str(tmp_path), TMPDIR=str(tmp_path / "tmp"), **more)
        command = [sys.executable, "-m", "guozhuang", "run", *options.split(), str(tmp_path / "train.py"), *arguments]
        return hosts.run(host, command, env, tmp_path / f"out{host}")

    yield begin


def agent_process(folder: Path) -> psutil.Process:
    """The process of the only agent that is there."""
    lines = {p: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}
    script = str(folder / "train.py")
    [process] = [p for p, line in lines.items() if line[1:4] == ["-m", "guozhuang", "run"] and script in line]
    return process


@pytest.mark.parametrize(("is_secret", "failing"), [(True, 0), (False, 3)], ids=["secret", "open"])
@pytest.mark.slow
def test_nodes_meet_by_number_and_again_after_a_failure(
    start: Start, hosts: Hosts, tmp_path: Path, is_secret: bool, failing: int
) -> None:
    more = {"GUOZHUANG_SECRET": secrets.token_hex(16)} if is_secret else {}
    options = "-np 2 --nnodes 2 --master-addr 10.77.0.10 --master-port 29444 --max-restarts 1 --node-rank"
    agents = [start(host, f"{options} {host}", f"fail{failing}", "wait", **more) for host in (0, 1)]
    for agent in agents:
        agent.says("met 4: h0 h0 h1 h1 attempt 1")
    text = agents[failing // 2].text
    assert f"rank {failing} failed first: exit code 1" in text and "started anew" in text
    assert not hosts.listening(0) & {"0.0.0.0", "::"}
    (tmp_path / "stop").touch()
    assert [agent.wait()[0] for agent in agents] == [0, 0], agents[0].text + agents[1].text


@pytest.mark.slow
def test_a_node_that_gives_up_ends_the_others(start: Start, tmp_path: Path) -> None:
    """Its ranks are asleep, in no collective that could fail."""
    options = "-np 1 --nnodes 2 --master-addr 10.77.0.10 --node-rank"
    agents = [start(host, f"{options} {host}", "wait") for host in (0, 1)]
    for agent in agents:
        agent.says("met 2: h0 h1")
    ours = {"GROUP_RANK": "1", "OUT": str(tmp_path)}
    [rank] = [p for p in psutil.process_iter(["environ"]) if ours.items() <= (p.info["environ"] or {}).items()]
    rank.kill()
    assert [agent.wait(LIMIT_S)[0] for agent in agents] == [137, 137], agents[0].text + agents[1].text
    assert "rank 1 failed first: signal 9 (SIGKILL)" in agents[1].text
    assert "node 1: rank 1 failed first: signal 9 (SIGKILL)" in agents[0].text


ELASTIC = "-np 1 --nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint 10.77.0.10:29555 --rdzv-id job --max-restarts 3"


@pytest.mark.slow
def test_a_node_joins_late(start: Start, tmp_path: Path) -> None:
    first = start(0, ELASTIC, "wait")
    first.says("met 1: h0")
    second = start(1, ELASTIC, "wait")
    for agent in (second, first):
        agent.says("met 2: h[01] h[01]")
    (tmp_path / "stop").touch()
    assert [first.wait()[0], second.wait()[0]] == [0, 0], first.text + second.text


@pytest.mark.slow
def test_a_lost_node_is_left_behind(start: Start, tmp_path: Path) -> None:
    """Torch elastic restarts the ranks that fail for it, with the nodes that give signs of life."""
    agents = [start(host, ELASTIC, "turn") for host in (0, 1)]
    for agent in agents:
        agent.says("met 2: h[01] h[01]")
    for process in psutil.Process(agents[1].process.pid).children(recursive=True):
        process.kill()
    agents[1].process.kill()
    agents[0].says("met 1: h0", limit_s=LIMIT_S)
    (tmp_path / "stop").touch()
    assert agents[0].wait()[0] == 0, agents[0].text


@pytest.mark.slow
def test_a_signal_while_waiting_for_others_ends_the_agent(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    agent = start(0, "--nnodes 2 --master-addr 10.77.0.10 --node-rank 0")
    until(lambda: list((tmp_path / "tmp").glob("guozhuang-run-*")))
    until(lambda: hosts.listening(0))
    agent_process(tmp_path).send_signal(signal.SIGINT)
    assert agent.wait(LIMIT_S)[0] == 130, agent.text
    assert not list((tmp_path / "tmp").iterdir())
