"""Hosts on one machine: each a network namespace with a name of its own, joined by a switch over links of a given rate.

    with Hosts(2, rate="1gbit") as hosts:
        process = hosts.start(1, [sys.executable, "-c", "..."], env)
        hosts.sent_bytes(0)     # what host 0 has put on its link
        hosts.cut(1)            # pull the cable of host 1

Needs root and the commands of iproute2 and util-linux, with a delay or a firewall also iptables. The names of hosts resolve
nowhere, as on a bare container: whoever takes the address of "this host" by its name gets nothing. Nothing is left: namespaces
go with their links and processes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.waiting import LIMIT_S, until

COMMANDS = ("ip", "tc", "unshare")
_BURST, _QUEUE = "128kb", "50ms"


def missing(delay: bool = False) -> str:
    """Why hosts, with delayed links if asked for, cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    wanted = (*COMMANDS, "iptables") if delay else COMMANDS
    absent = [name for name in wanted if shutil.which(name) is None]
    packages = "iproute2 util-linux iptables" if delay else "iproute2 util-linux"
    return f"needs the commands {', '.join(absent)} (apt install {packages})" if absent else ""


class Hosts:
    """Hosts 0 .. num - 1 with the addresses 10.77.0.10, 10.77.0.11, ...

    Args:
        num: how many.
        rate: of each link, both ways, as ``tc`` writes it ("1gbit"); "" for as fast as it goes.
        delay_ms: how long a packet is under way from one host to another; there and back is twice that.
    """

    def __init__(self, num: int, rate: str = "", delay_ms: float = 0.0) -> None:
        self._num, self._rate, self._delay_ms = num, rate, delay_ms
        self._prefix = f"gz{os.getpid()}"  # two test runs at a time do not meet
        self._switch = f"{self._prefix}sw"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    def address(self, host: int) -> str:
        return f"10.77.0.{10 + host}"

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
        """Run a command on a host, with its own host name; it is ended, if need be, when the hosts go."""
        inside = ["ip", "netns", "exec", self._name(host), "unshare", "--uts", "sh", "-c"]
        process = subprocess.Popen(
            [*inside, f'hostname h{host}; exec "$@"', "sh", *command],
            env=dict(env), text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def run(self, host: int, command: Sequence[str], env: Mapping[str, str], path: Path, **options: Any) -> Running:
        """As ``start``, with what is printed in a file, so that it can be read meanwhile."""
        into = ["sh", "-c", f'exec "$@" > {shlex.quote(str(path))} 2>&1', "sh"]
        return Running(self.start(host, [*into, *command], env, **options), path)

    def listening(self, host: int) -> set[str]:
        """The addresses, besides loopback, on which anything but ssh listens on a host."""
        table = _ip("netns", "exec", self._name(host), "cat", "/proc/net/tcp", "/proc/net/tcp6")
        found = set()
        for fields in (line.split() for line in table.splitlines()):
            if len(fields) > 3 and fields[3] == "0A":
                address, port = fields[1].split(":")
                raw = b"".join(bytes.fromhex(address[k : k + 8])[::-1] for k in range(0, len(address), 8))
                if int(port, 16) != 22 and not ipaddress.ip_address(raw).is_loopback:
                    found.add(str(ipaddress.ip_address(raw)))
        return found

    def sent_bytes(self, host: int) -> int:
        """What the host has put on its link so far, frames and all."""
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(_ip("netns", "exec", self._name(host), "cat", counter))

    def awaits_answers(self, host: int) -> bool:
        """Whether a process of the host has sent something over a connection that nobody has acknowledged so far."""
        table = _ip("netns", "exec", self._name(host), "cat", "/proc/net/tcp", "/proc/net/tcp6")
        rows = [line.split() for line in table.splitlines()]
        return any(fields[3] == "01" and int(fields[4].partition(":")[0], 16) for fields in rows)

    def cut(self, host: int) -> None:
        """Pull the host's cable: nothing arrives any more, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def pass_only(self, port: int) -> None:
        """Put a firewall on every host that drops what begins a connection from outside, unless it is to this TCP port."""
        for host in range(self._num):
            for rule in ("-i lo", "-m state --state ESTABLISHED,RELATED", f"-p tcp --dport {port}"):
                _ip("netns", "exec", self._name(host), "iptables", "-A", "INPUT", *rule.split(), "-j", "ACCEPT")
            _ip("netns", "exec", self._name(host), "iptables", "-A", "INPUT", "-j", "DROP")

    def _name(self, host: int) -> str:
        return f"{self._prefix}h{host}"

    def _up(self) -> None:
        hosts = {host: self._name(host) for host in range(self._num)}
        for name in (self._switch, *hosts.values()):
            _ip("netns", "add", name)
        # Not in the namespace of the machine at any moment: names there are short and taken.
        links = (
            f"link add eth0 netns {name} type veth peer name p{h} netns {self._switch}" for h, name in hosts.items()
        )
        _ip_batch(*links)
        ports = (f"link set p{host} master br0 up" for host in hosts)
        _ip_batch("link add br0 type bridge", "link set br0 up", *ports, inside=self._switch)
        for host, name in hosts.items():
            address = f"addr add {self.address(host)}/24 dev eth0"
            _ip_batch("link set lo up", "link set eth0 up", address, inside=name)
            for namespace, device in ((name, "eth0"), (self._switch, f"p{host}")) if self._rate else ():
                shape = ("tbf", "rate", self._rate, "burst", _BURST, "latency", _QUEUE)
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)
        for host in range(self._num) if self._delay_ms else ():
            self._delay(host)

    def _delay(self, host: int) -> None:
        """Start what holds packets (delay.py). Should it die, packets pass at once."""
        queue = ("-i", "eth0", "-j", "NFQUEUE", "--queue-num", "0", "--queue-bypass")
        _ip("netns", "exec", self._name(host), "iptables", "-t", "mangle", "-A", "PREROUTING", *queue)
        script = str(Path(__file__).with_name("delay.py"))
        process = self.start(host, [sys.executable, script, str(self._delay_ms)], os.environ)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said == "ready\n", f"packets to host {host} are not delayed: {said}{process.stdout.read()}"

    def _down(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(ValueError):  # read to the end before
                process.communicate()
        names = [*(self._name(host) for host in range(self._num)), self._switch]
        there = set(os.listdir("/run/netns")) if Path("/run/netns").exists() else set()
        for name in names:
            if name in there:
                for pid in _ip("netns", "pids", name).split():  # of a session of its own
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _ip("netns", "del", name)


class Running:
    """A process, and what it has printed to a file so far."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self.process, self._path = process, path

    @property
    def text(self) -> str:
        return self._path.read_text() if self._path.exists() else ""

    def says(self, *patterns: str, limit_s: float = LIMIT_S) -> str:
        """Wait until it has printed all of that; return what it has printed."""
        until(
            lambda: all(re.search(pattern, self.text) for pattern in patterns),
            limit_s,
            goes_on=lambda: self.process.poll() is None,
            told=lambda: f"{patterns}:\n{self.text}",
        )
        return self.text

    def wait(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Its exit code, and all that it printed."""
        return self.process.wait(limit_s), self.text


def run_everywhere(
    hosts: Hosts,
    ranks_of_hosts: Sequence[int],
    command: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float = LIMIT_S,
    expect_failure: bool = False,
) -> list[str]:
    """Run a command once per rank, with the environment of torchrun; return what each printed, in rank order.

    Ranks are numbered host by host. Rank 0's host keeps the store.

    Raises:
        AssertionError: a rank did not end in time, or not with 0 (unless ``expect_failure``); the text has all output.
    """
    processes = []
    size = sum(ranks_of_hosts)
    for host, num_local in enumerate(ranks_of_hosts):
        for local_rank in range(num_local):
            own = {
                "RANK": str(len(processes)), "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(num_local),
                "GROUP_RANK": str(host), "GROUP_WORLD_SIZE": str(len(ranks_of_hosts)),
                "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            processes.append(hosts.start(host, command, {**env, **own}))
    deadline = time.monotonic() + timeout_s
    printed, wrong = [], []
    for rank, process in enumerate(processes):
        try:
            out, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            wrong.append(f"rank {rank} did not end")
        if process.returncode != 0 and not expect_failure:
            wrong.append(f"rank {rank} ended with {process.returncode}")
        printed.append(out)
    told = "\n".join(f"---- rank {rank} printed:\n{out}" for rank, out in enumerate(printed))
    assert not wrong, f"{'; '.join(wrong)}\n{told}"
    return printed


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _ip_batch(*lines: str, inside: str = "") -> None:
    """Several commands of ``ip`` by one process, in a namespace if one is named."""
    _run("ip", *(["-n", inside] if inside else []), "-batch", "-", given="\n".join(lines))


def _run(*command: str, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
