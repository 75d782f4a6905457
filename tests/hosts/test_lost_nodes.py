"""Agents that were started by hand on two hosts: one is killed, its cable is cut, or it is told to end while it hears nobody.

The agents are forked from a server that has imported torch, and the ranks are shells: what is shown here needs neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from tests.forking import fork_server
from tests.hosts.network import Hosts, missing
from tests.waiting import LIMIT_S, remaining, until

pytestmark = [pytest.mark.waits, pytest.mark.needs_root, pytest.mark.skipif(bool(missing()), reason=missing())]

SLEEPS = "sleep 3600"
_CLONE_NEWUTS = 0x04000000
FIXED = "--nnodes 2 --master-addr 10.77.0.10 --rdzv-conf timeout=20,keep_alive_max_attempt=2 --node-rank {host}"


def _be_agent(namespace: str, name: str, arguments: list[str], output: str, more: dict[str, str]) -> None:
    """In a process of its own: become an agent of a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        assert libc.setns(file.fileno(), 0) == 0
    assert libc.unshare(_CLONE_NEWUTS) == 0
    socket.sethostname(name)
    file_number = os.open(output, os.O_RDWR | os.O_CREAT | os.O_APPEND)  # a named pipe too, though nobody reads it
    os.dup2(file_number, 1)
    os.dup2(file_number, 2)
    os.setsid()
    os.environ.update(more)
    from guozhuang.launch import agent

    try:
        code = agent.main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class Pair:
    """Two agents, each with a rank that says "here".

    Args:
        does: what the ranks do after that, as words of a shell; they sleep.
        more: variables of each agent.
    """

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        options: str,
        does: tuple[str, str] = (SLEEPS, SLEEPS),
        more: tuple[dict[str, str], dict[str, str]] = ({}, {}),
    ) -> None:
        self.hosts, self._folder = hosts, folder
        context = fork_server()
        self.agents: list[BaseProcess] = []
        for host in (0, 1):
            script = folder / f"train{host}.sh"
            script.write_text(f"#!/bin/sh\necho here\n{does[host]}\n")
            script.chmod(0o755)
            arguments = [*options.format(host=host).split(), "--no-python", str(script)]
            told = (hosts._name(host), f"h{host}", arguments, str(folder / f"out{host}"), more[host])
            process = context.Process(target=_be_agent, args=told)
            process.start()
            self.agents.append(process)

    def text(self, host: int) -> str:
        path = self._folder / f"out{host}"
        return path.read_text() if path.exists() else ""

    def says(self, host: int, pattern: str) -> None:
        until(lambda: re.search(pattern, self.text(host)), told=lambda: f"{pattern!r}:\n{self.text(host)}")

    def agent(self, host: int) -> psutil.Process:
        return psutil.Process(self.agents[host].pid)

    def is_done(self, host: int) -> bool:
        """Whether the rank of the host has ended and its agent knows."""
        script = str(self._folder / f"train{host}.sh")
        return not any(
            script in each.info["cmdline"][1:2] for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"]
        )

    def meet(self) -> None:
        for host in (0, 1):
            self.says(host, "here")

    def signal(self, host: int, number: int) -> None:
        pid = self.agents[host].pid
        assert pid is not None
        os.kill(pid, number)

    def end(self, host: int) -> tuple[int | None, str]:
        """Its exit code, and what it printed."""
        self.agents[host].join(LIMIT_S)
        return self.agents[host].exitcode, self.text(host)

    def left(self) -> list[str]:
        """Processes of the ranks that are still there, a moment later."""

        def found() -> list[str]:
            lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
            return [line for line in lines if str(self._folder) in line]

        return remaining(found)

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.join()
            agent.close()


def gate(folder: Path) -> str:
    """What a rank does that waits for a file."""
    return f"while [ ! -e {folder}/go ]; do sleep 0.05; done"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


@pytest.fixture
def pairs(hosts: Hosts, tmp_path: Path) -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


def pair_of(pairs: list[Pair], hosts: Hosts, folder: Path, options: str, *does: str) -> Pair:
    pairs.append(Pair(hosts, folder, options, (does[0], does[1]) if does else (SLEEPS, SLEEPS)))
    pairs[-1].meet()
    return pairs[-1]


def test_who_does_not_know_the_secret_is_not_let_in(pairs: list[Pair], hosts: Hosts, tmp_path: Path) -> None:
    options = "--nnodes 2 --master-addr 10.77.0.10 --rdzv-conf timeout=3600 --node-rank {host}"
    first, other = ({"GUOZHUANG_SECRET": secrets.token_hex(16)} for _ in range(2))
    pair = Pair(hosts, tmp_path, options, more=(first, other))
    pairs.append(pair)
    code, text = pair.end(1)
    assert code == 1, text
    # The first one waits on: nobody has come.
    pair.signal(0, signal.SIGTERM)
    code, of_first = pair.end(0)
    assert code == 143, of_first
    assert "GUOZHUANG_SECRET" in text and "here" not in of_first and "Traceback" not in of_first + text


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_agent_that_is_killed(pairs: list[Pair], hosts: Hosts, tmp_path: Path, host: int) -> None:
    pair = pair_of(pairs, hosts, tmp_path, FIXED)
    pair.signal(host, signal.SIGKILL)
    code, text = pair.end(1 - host)
    assert code == 1, text
    if host == 1:
        assert "node 1 (host h1): no sign of life of its agent for" in text
    else:
        assert re.search(r"the agent (of node 0 \(|at )10.77.0.10:\d+\)?, which keeps the store, is gone", text), text
    assert "Traceback" not in text and "frame #" not in text
    assert not pair.left()


def test_a_cable_that_is_cut(pairs: list[Pair], hosts: Hosts, tmp_path: Path) -> None:
    """To the other node it is the same as a host that is switched off."""
    pair = pair_of(pairs, hosts, tmp_path, FIXED)
    hosts.cut(1)
    ends = [pair.end(host) for host in (0, 1)]
    assert [code for code, _ in ends] == [1, 1], ends
    assert "node 1 (host h1): no sign of life of its agent for" in ends[0][1]
    assert re.search(
        r"10.77.0.10:\d+\)?, which keeps the store, has not answered for \d+ s: its host is off", ends[1][1]
    )
    assert not pair.left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_signal_ends_an_agent_whose_store_does_not_answer(
    pairs: list[Pair], hosts: Hosts, tmp_path: Path, number: int
) -> None:
    """It stands in a call of the store then, which would go on for a quarter of an hour."""
    pair = pair_of(pairs, hosts, tmp_path, FIXED.replace("max_attempt=2", "max_attempt=600"))
    hosts.cut(1)
    until(lambda: hosts.awaits_answers(1))
    pair.signal(1, number)
    code, text = pair.end(1)
    assert code == 128 + number, text
    pair.signal(0, signal.SIGTERM)
    assert pair.end(0)[0] == 143


def test_a_node_that_has_finished_hears_of_the_end_of_the_others(
    pairs: list[Pair], hosts: Hosts, tmp_path: Path
) -> None:
    pair = pair_of(pairs, hosts, tmp_path, FIXED, SLEEPS, "true")
    until(lambda: pair.is_done(1))
    pair.signal(0, signal.SIGKILL)
    code, text = pair.end(1)
    assert code == 1 and "which keeps the store, is gone" in text, text


def test_nodes_that_end_at_different_times_end_well(pairs: list[Pair], hosts: Hosts, tmp_path: Path) -> None:
    pair = pair_of(pairs, hosts, tmp_path, FIXED, "true", gate(tmp_path))
    until(lambda: pair.is_done(0))
    (tmp_path / "go").touch()
    ends = [pair.end(host) for host in (0, 1)]
    assert [code for code, _ in ends] == [0, 0], ends


@pytest.mark.slow
def test_an_agent_that_was_stopped_for_a_moment_goes_on(pairs: list[Pair], hosts: Hosts, tmp_path: Path) -> None:
    pair = pair_of(pairs, hosts, tmp_path, FIXED.replace("max_attempt=2", "max_attempt=600"), *[gate(tmp_path)] * 2)
    for host in (0, 1):
        pair.signal(host, signal.SIGSTOP)
        until(lambda host=host: pair.agent(host).status() == psutil.STATUS_STOPPED)
        other, before = pair.agent(1 - host), pair.agent(1 - host).num_ctx_switches().voluntary
        # The other one looks every 0.1 s, and waits for an answer if the stopped one keeps the store.
        until(lambda other=other, before=before: other.num_ctx_switches().voluntary > before + 10)
        pair.signal(host, signal.SIGCONT)
    (tmp_path / "go").touch()
    ends = [pair.end(host) for host in (0, 1)]
    assert [code for code, _ in ends] == [0, 0], ends


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_an_agent_that_was_stopped_for_long_is_given_up(
    pairs: list[Pair], hosts: Hosts, tmp_path: Path, host: int
) -> None:
    pair = pair_of(pairs, hosts, tmp_path, FIXED)
    pair.signal(host, signal.SIGSTOP)
    code, text = pair.end(1 - host)
    assert code == 1 and ("no sign of life" in text or "has not answered" in text), text
    pair.signal(host, signal.SIGCONT)
    code, text = pair.end(host)
    assert code == 1, text
    assert not pair.left()


@pytest.mark.parametrize("max_restarts", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_failure_is_told_to_the_others_also_where_nobody_reads(
    pairs: list[Pair], hosts: Hosts, tmp_path: Path, max_restarts: int
) -> None:
    """The output of host 1 is a full pipe, as of a terminal that was stopped or of a pager."""
    os.mkfifo(tmp_path / "out1")
    fills = f"[ -e {tmp_path}/once ] && sleep 3600\ntouch {tmp_path}/once\nhead -c 300000 /dev/zero &\nsleep 1\nexit 3"
    options = FIXED.replace("max_attempt=2", "max_attempt=600") + f" --max-restarts {max_restarts}"
    pair = Pair(hosts, tmp_path, options, (SLEEPS, fills))
    pairs.append(pair)
    if max_restarts:
        pair.says(0, "here\n(.*\n)*.*here")
        pair.signal(0, signal.SIGTERM)
        assert pair.end(0)[0] == 143
    else:
        code, text = pair.end(0)
        assert code == 3 and "node 1: rank 1 failed first: exit code 3" in text, text
        pipe = os.open(tmp_path / "out1", os.O_RDONLY | os.O_NONBLOCK)
        read, deadline = b"", time.monotonic() + LIMIT_S
        while pair.agents[1].is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                read += os.read(pipe, 1 << 16)
            time.sleep(0.01)
        os.close(pipe)
        assert pair.agents[1].exitcode == 3 and b"rank 1 failed first: exit code 3" in read
    pair.agents[1].kill()
    pair.agents[1].join()
    assert not pair.left()
