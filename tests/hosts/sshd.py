"""Real ssh servers with throw-away keys: one on loopback, or one on each host of ``tests.hosts.network``.

    with Sshd(tmp_path) as sshd:                       # names a0, a1, ... all lead to it
        run(..., "--ssh-config", sshd.config, "-H", "a0:1,a1:1", ...)
    with Hosts(2) as hosts, Sshd(tmp_path, hosts, 2) as sshd:   # names h0, h1

Nothing of the user's or the machine's configuration is read or changed.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.hosts.network import Hosts
from tests.launching import environment
from tests.waiting import LIMIT_S, remaining, until

SERVER = shutil.which("sshd") or "/usr/sbin/sshd"


def missing() -> str:
    """Why ssh cannot be tried here; "" if it can."""
    absent = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    absent += [] if os.path.exists(SERVER) else ["sshd"]
    if absent:
        return f"needs the commands {', '.join(absent)} (apt install openssh-server openssh-client)"
    if os.geteuid() != 0:
        return "needs root to start an ssh server that lets root in"
    return ""


class Sshd:
    """One or several ssh servers.

    Args:
        folder: for keys, configuration and logs.
        hosts: where the servers run; None: one on loopback.
        num: how many hosts there are.
    """

    def __init__(self, folder: Path, hosts: Hosts | None = None, num: int = 0) -> None:
        self._folder, self._hosts, self._num = folder / "ssh", hosts, num
        self._server: subprocess.Popen[bytes] | None = None
        self.port = 22
        self.config = self._folder / "config"
        self.identity = self._folder / "id"

    def __enter__(self) -> Sshd:
        self._folder.mkdir(mode=0o700)
        os.makedirs("/run/sshd", exist_ok=True)
        for name in ("host", "id", "stranger"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / name)]
            subprocess.run(command, check=True, timeout=LIMIT_S)
        (self._folder / "authorized").write_text("restrict " + (self._folder / "id.pub").read_text())
        (self._folder / "server").write_text(
            f"HostKey {self._folder}/host\nAuthorizedKeysFile {self._folder}/authorized\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nUsePAM no\nPermitRootLogin prohibit-password\nMaxStartups 64\n"
            f"StrictModes no\nPidFile none\nAllowUsers {getpass.getuser()}\n"
        )
        if self._hosts is None:
            self._start_on_loopback()
            names = {f"a{number}": "127.0.0.1" for number in range(8)}
        else:
            for host in range(self._num):
                self.start_on(host)
            names = {f"h{number}": self._hosts.address(number) for number in range(8)}
        self._write_client(names)
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            family = psutil.Process(self._server.pid).children(recursive=True)
            self._server.terminate()
            self._server.wait(LIMIT_S)
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def start_on(self, host: int) -> None:
        """Start the server of one host, and wait until it listens."""
        assert self._hosts is not None
        address = self._hosts.address(host)
        # The server's children outlive it where the network was cut; they must not hold the pipe that the host reads.
        quiet = ["sh", "-c", 'exec "$@" > /dev/null 2>&1', "sh"]
        command = [*quiet, *self._command(), "-o", f"ListenAddress={address}:22"]
        self._hosts.start(host, command, {"PATH": os.environ["PATH"]})
        asking = ["bash", "-c", f"exec 3<>/dev/tcp/{address}/22"]
        until(lambda: self._hosts.start(host, asking, {"PATH": os.environ["PATH"]}).wait(LIMIT_S) == 0)

    def _command(self) -> list[str]:
        return [SERVER, "-D", "-f", str(self._folder / "server"), "-E", str(self._folder / "log")]

    def _start_on_loopback(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < deadline, (self._folder / "log").read_text()
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
            command = [*self._command(), "-o", f"ListenAddress=127.0.0.1:{self.port}"]
            self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            while self._server.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                    return
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def _write_client(self, names: dict[str, str]) -> None:
        key = " ".join((self._folder / "host.pub").read_text().split()[:2])
        (self._folder / "known").write_text("".join(f"{name} {key}\n" for name in names))
        blocks = [f"Host {name}\n  HostName {address}\n  HostKeyAlias {name}\n" for name, address in names.items()]
        self.config.write_text(
            "".join(blocks)
            + f"Host *\n  Port {self.port}\n  User {getpass.getuser()}\n  IdentityFile {self._folder}/id\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {self._folder}/known\n  StrictHostKeyChecking yes\n"
        )


def processes_with(text: str, besides: Sequence[int] = ()) -> list[str]:
    """All processes of this machine, in whatever namespace, that have ``text`` in their command line or folder."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "cwd", "status"]):
        line = " ".join([*(process.info["cmdline"] or []), "in", process.info["cwd"] or "?"])
        is_ours = process.info["pid"] in (os.getpid(), *besides)
        if text in line and not is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(f"{process.info['pid']}: {line}")
    return found


def none_left(text: str, within_s: float = LIMIT_S) -> list[str]:
    """Wait until no process has ``text`` in its command line or folder; those that are left at the limit."""
    return remaining(lambda: processes_with(text), within_s)


def stop(process: subprocess.Popen[str]) -> None:
    """End a launcher that a failed test left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def with_ssh(folder: Path, sshd: Sshd, **more: str) -> dict[str, str]:
    """An environment whose ssh knows the test's hosts: horovodrun has no option for a configuration file."""
    (folder / "bin").mkdir()
    client = folder / "bin" / "ssh"
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {sshd.config} "$@"\n')
    client.chmod(0o755)
    found = environment()
    return found | {"PATH": f"{folder / 'bin'}{os.pathsep}{found['PATH']}", "OMP_NUM_THREADS": "1"} | more
