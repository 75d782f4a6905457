"""A Slurm of our own on this machine: a real munged, slurmctld and slurmd, without systemd and without a file in /etc.

    with Cluster(nodes=2, cpus=2) as cluster:
        done = cluster.run(["srun", "-n2", sys.executable, "train.py"])

The nodes are called n0, n1, ... and are all this machine, or, with ``Cluster(hosts=...)``, one on each of some ``Hosts``, which
then resolve each other's names (h0, h1, ...). Needs root. Nothing is left: jobs are cancelled, daemons and steps ended, and the
folder goes away.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.hosts.names import names
from tests.hosts.network import Hosts
from tests.waiting import LIMIT_S, remaining, until

COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo")

_CONF = """\
ClusterName=guozhuang
SlurmctldHost={controller}
SlurmUser=root
SlurmctldPort={ctld_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
{listening}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MpiParams=ports={reserved}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=2
{nodes} CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    if os.geteuid() != 0:
        return "needs root to run slurmd"
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    if absent:
        return f"needs the commands {', '.join(absent)} (apt install slurm-wlm munge)"
    try:
        pwd.getpwnam("munge")
    except KeyError:
        return "needs the user munge (apt install munge)"
    return ""


class Cluster:
    """A Slurm cluster for as long as the ``with`` block lasts.

    Args:
        nodes: how many nodes.
        cpus: of each node, as Slurm is told.
        hosts: put node i on host i of these; None: all of them on loopback of this machine.
    """

    def __init__(self, nodes: int = 2, cpus: int = 2, hosts: Hosts | None = None) -> None:
        self._num, self._cpus, self._hosts = nodes, cpus, hosts
        self._daemons: list[subprocess.Popen[str]] = []
        self._names = contextlib.ExitStack()
        # Not pytest's folder: munged's user must get in, and the path of a socket must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="gz-slurm-"))
        self._env = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SRUN", "SBATCH", "PMI", "OMPI"))
        }
        self._env |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "TZ": "UTC"}

    def __enter__(self) -> Cluster:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    @property
    def names(self) -> list[str]:
        """Of the nodes."""
        return [f"{'h' if self._hosts else 'n'}{node}" for node in range(self._num)]

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None, on: int = 0) -> subprocess.Popen[str]:
        """Start a command that can speak to the cluster, on node ``on``; its output is one stream."""
        environ = {**self._env, **(env or {})}
        if self._hosts is not None:
            return self._hosts.start(on, command, environ)
        return subprocess.Popen(
            command, env=environ, cwd=self.folder, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = LIMIT_S, on: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; what it printed is in ``stdout``."""
        return finish(self.start(command, env, on), timeout_s)

    def batch(self, script: str, *options: str, timeout_s: float = LIMIT_S) -> str:
        """Submit a batch script, wait for its end, and return what it and its steps printed."""
        path = Path(tempfile.mkstemp(suffix=".sh", dir=self.folder)[1])
        # Not `sbatch --wait`, which looks for the end every half minute only.
        path.write_text(f"#!/bin/bash\ntrap 'echo $? >{path}.end.new; mv {path}.end.new {path}.end' EXIT\n{script}\n")
        done = self.run(["sbatch", f"--output={path}.out", *options, str(path)], timeout_s=LIMIT_S)
        end = Path(f"{path}.end")
        remaining(lambda: [] if done.returncode != 0 or end.exists() else [end], timeout_s)
        printed = Path(f"{path}.out").read_text() if Path(f"{path}.out").exists() else ""
        assert end.exists() and end.read_text() == "0\n", f"{done.stdout}\n{printed}\n{self.logs()}"
        return printed

    def logs(self) -> str:
        """The last lines of the daemons."""
        found = [
            f"---- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in self.folder.glob("*.log")
        ]
        return "\n".join(found)

    def _up(self) -> None:
        self.folder.chmod(0o755)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\n")
        (self.folder / "slurm.conf").write_text(self._conf())
        self._start_munge()
        self._daemon(["slurmctld", "-D", "-c"], 0)
        for node, name in enumerate(self.names):
            (self.folder / "spool" / name).mkdir()
            self._daemon(["slurmd", "-D", "-N", name, "-c"], node)
        self._wait_for(self._is_up, "the nodes did not become idle")

    def _conf(self) -> str:
        ports = free_ports(1 + self._num)
        if self._hosts is None:
            controller = f"{socket.gethostname()}(127.0.0.1)"
            lines = [
                f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus}"
                for name, port in zip(self.names, ports[1:], strict=True)
            ]
        else:
            controller = f"{self.names[0]}({self._hosts.address(0)})"
            lines = [
                f"NodeName={name} NodeAddr={self._hosts.address(node)} Port={ports[1]} CPUs={self._cpus}"
                for node, name in enumerate(self.names)
            ]
            self._names.enter_context(names(self._hosts, self._num))
        text = _CONF.replace(
            "{nodes} CPUs={cpus} State=UNKNOWN\n", "\n".join(f"{line} State=UNKNOWN" for line in lines) + "\n"
        )
        # By name Slurm would listen on 127.0.1.1 of hosts; they have no network but their own.
        listening = "" if self._hosts else "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
        return text.format(
            listening=listening, folder=self.folder, controller=controller, ctld_port=ports[0], reserved="12000-12199"
        )

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o755)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        account = pwd.getpwnam("munge")
        for path in (folder, folder / "key"):
            os.chown(path, account.pw_uid, account.pw_gid)
        named = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in named.items()]
        as_munge = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        self._daemons.append(
            subprocess.Popen(
                [*as_munge, "munged", "--foreground", *options], text=True, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        self._wait_for((folder / "socket").exists, "munged did not start")

    def _daemon(self, command: Sequence[str], node: int) -> None:
        # Its output would fill the pipe: it logs into a file anyway.
        quiet = ["sh", "-c", 'exec "$@" >/dev/null 2>&1', "sh", *command]
        self._daemons.append(self.start(quiet, on=node))

    def _is_up(self) -> bool:
        done = self.run(["sinfo", "--noheader", "--states=idle", "--format=%D"], timeout_s=LIMIT_S)
        return done.stdout.strip() == str(self._num)

    def _wait_for(self, is_so: Callable[[], bool], otherwise: str) -> None:
        def dead() -> list[object]:
            return [each.args for each in self._daemons if each.poll() is not None]

        until(is_so, goes_on=lambda: not dead(), told=lambda: f"{otherwise} {dead()}\n{self.logs()}")

    def _down(self) -> None:
        if (self.folder / "slurm.conf").exists() and len(self._daemons) > 1:
            with contextlib.suppress(AssertionError):
                self.run(["scancel", "--quiet", "--user=root", "--signal=KILL", "--full"], timeout_s=LIMIT_S)
        for daemon in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        deadline = time.monotonic() + LIMIT_S
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(max(deadline - time.monotonic(), 0.1))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait(LIMIT_S)
            if daemon.stdout is not None and self._hosts is None:  # else the hosts close it
                daemon.stdout.close()
        for process in self._steps():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._names.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _steps(self) -> Iterator[psutil.Process]:
        """What slurmd leaves behind on purpose when it ends: its steps, and the tasks in them."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self._env["SLURM_CONF"]:
                    yield process


def finish(process: subprocess.Popen[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a command; one that does not come ends all it has started, and the test."""
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"{process.args} did not end within {timeout_s:g} s; it printed:\n{out}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, "")


def free_ports(num: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [each.getsockname()[1] for each in sockets]
