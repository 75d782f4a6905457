"""The supervisor of a host, without ssh and without PyTorch: what it passes on, and that nothing outlives the launcher."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from guozhuang.launch.hosts import ssh
from guozhuang.launch.hosts.frames import NodeRefused
from guozhuang.launch.hosts.link import Link
from guozhuang.launch.hosts.supervisor import AgentStarted, EndAgent, HostLacks, PauseHost, SupervisorConfig
from tests.waiting import LIMIT_S, NEVER_S, remaining, until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="what a supervisor finds of its descendants, it finds by /proc"),
]

TOKEN = "guozhuang-0123"


class Host:
    """A link to a supervisor whose agent is a piece of Python."""

    def __init__(self, agent: str, where: Path, before: str = "", **more: Any) -> None:
        config = {
            "folder": str(where), "is_remote": True, "environment": {"CARRIED": "a\nb"}, "lists": ssh.LISTS,
            "asked_environment": {}, "package": "json", "lost_after_s": NEVER_S, "lost_grace_s": 1.0, "command": ["-c", agent],
            "first_line": "é \n",
        }  # fmt: skip
        self.link = Link("a", 0, True)
        self.out = {"stdout": b"", "stderr": b""}
        self.folder = where
        command: Sequence[str] = ssh.local_command(TOKEN)
        if before:
            command = ["sh", "-c", f'{before}; exec "$@"', "sh", *command]
        self.link.start(command, TOKEN, SupervisorConfig(**(config | more)), self._take)  # type: ignore[arg-type]

    def hears(self) -> None:
        """Return when the supervisor has read all that was sent to it."""
        stdin = self.link._process.stdin
        assert stdin is not None
        until(lambda: self.link.send_more() or not self.link._unsent)
        until(lambda: struct.unpack("i", fcntl.ioctl(stdin, termios.FIONREAD, b"    ")) == (0,))

    def looks_again(self, agent: psutil.Process) -> None:
        """Return when the supervisor has asked its clock once more, as it does between two outputs of the agent."""
        for _ in range(2):
            before = len(self.out["stderr"])
            agent.send_signal(signal.SIGUSR1)
            self.wait(lambda before=before: len(self.out["stderr"]) > before)

    def later(self, ahead_s: float) -> None:
        """Set the clock of the supervisor to so many seconds ahead of the real one."""
        (self.folder / "new clock").write_text(str(ahead_s))
        os.replace(self.folder / "new clock", self.folder / "clock")

    def _take(self, link: Link, stream: str, data: bytes) -> None:
        self.out[stream] += data

    def wait(self, until: Any = None, limit_s: float = LIMIT_S) -> None:
        """Serve the link until something is true, or until it closes."""
        deadline = time.monotonic() + limit_s
        while not self.link.look() and not self.link.is_closed and not (until and until()):
            assert time.monotonic() < deadline, (self.link.messages, self.out, self.link.words)
            for descriptor in select.select(self.link.reading(), [], [], 0.02)[0]:
                self.link.receive(descriptor)
            self.link.send_more()


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    hosts: list[Host] = []
    clock = tmp_path / "clock"  # a file that holds by how many seconds the clock of the supervisor is ahead
    clock.write_text("0")
    ahead = (
        f"import time\nreal = time.monotonic\ntime.monotonic = lambda: real() + float(open({str(clock)!r}).read())\n"
    )
    source = ahead.encode() + ssh.supervisor_source()
    monkeypatch.setattr(ssh, "supervisor_source", lambda: source)

    def make(agent: str, **more: Any) -> Host:
        hosts.append(Host(agent, tmp_path, **more))
        return hosts[-1]

    yield make
    for host in hosts:
        if not host.link.is_closed:
            host.link.abandon()


# Starts a child in a session of its own, which takes no SIGTERM, and tells the process ids.
FAMILY = """
import os, signal, subprocess, sys, time
if "deaf" in os.environ["CARRIED"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: os.write(2, b"."))
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(3600)
"""


def family(host: Host) -> list[psutil.Process]:
    host.wait(lambda: host.out["stdout"].endswith(b"\n"))
    found = [psutil.Process(int(pid)) for pid in host.out["stdout"].split()]
    assert len(found) == 2
    return found


def gone(processes: Sequence[psutil.Process], limit_s: float = LIMIT_S) -> bool:
    def is_alive(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end between the two questions
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return not remaining(lambda: list(filter(is_alive, processes)), limit_s)


def test_streams_stay_apart_and_the_exit_code_is_told(begin: Any, tmp_path: Path) -> None:
    host = begin(
        "import json, os, sys\n"
        "told = os.fdopen(int(sys.argv[1])).readline()\n"
        "os.write(int(sys.argv[2]), json.dumps(['NodeRefused', {'why': told}]).encode() + b'\\n')\n"
        "sys.stdout.write('x' * 3_000_000 + os.environ['CARRIED']); sys.stderr.write(os.getcwd()); sys.stdout.flush()\n"
        "sys.exit(3)"
    )
    host.wait()
    assert host.link.code == 3
    assert host.link.last(NodeRefused) == NodeRefused("é \n")
    assert host.out == {"stdout": b"x" * 3_000_000 + b"a\nb", "stderr": os.fsencode(tmp_path)}


def test_what_a_login_shell_prints_is_kept_out(begin: Any) -> None:
    host = begin("print('mine')", before="echo welcome; printf 'no end of line'; echo oops >&2")
    host.wait()
    assert (host.out["stdout"], host.link.code) == (b"mine\n", 0)
    assert "welcome" in host.link.words and "no end of line" in host.link.words and "oops" in host.link.words


def test_an_agent_that_is_killed_takes_its_family_along(begin: Any) -> None:
    host = begin(FAMILY)
    processes = family(host)
    processes[0].kill()
    host.wait()
    assert host.link.code == -signal.SIGKILL
    assert gone(processes)


def test_the_end_is_asked_for_first(begin: Any) -> None:
    host = begin(
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\nprint(1, flush=True)\ntime.sleep(3600)"
    )
    host.wait(lambda: host.out["stdout"])
    host.link.say(EndAgent(LIMIT_S))
    host.wait()
    assert host.link.code == 7


def test_who_does_not_end_is_killed_after_the_grace(begin: Any) -> None:
    host = begin(FAMILY, environment={"CARRIED": "deaf"}, lost_after_s=9 * NEVER_S)
    processes = family(host)
    host.link.say(EndAgent(NEVER_S))
    host.hears()
    host.looks_again(processes[0])
    assert not gone(processes, 0)
    host.later(NEVER_S)
    host.wait()
    assert host.link.code == -signal.SIGKILL
    assert gone(processes)


def test_a_launcher_that_is_gone_ends_everything(begin: Any) -> None:
    host = begin(FAMILY)
    processes = family(host)
    host.link.hang_up()
    assert gone(processes)


def test_a_launcher_that_is_silent_is_taken_for_gone(begin: Any) -> None:
    host = begin(FAMILY)
    processes = family(host)
    for k in range(1, 4):  # signs of life, for longer than the limit
        host.later(0.6 * k * NEVER_S)
        host.looks_again(processes[0])
        host.link.ping()
        host.hears()
    assert not gone(processes, 0)
    host.later(3 * NEVER_S)
    assert gone(processes)


def test_a_launcher_that_has_said_so_may_be_silent(begin: Any) -> None:
    host = begin(FAMILY)
    processes = family(host)
    host.link.say(PauseHost(True))
    host.hears()
    host.later(2 * NEVER_S)
    host.looks_again(processes[0])
    assert not gone(processes, 0)
    host.link.say(PauseHost(False))
    host.hears()
    host.looks_again(processes[0])
    assert not gone(processes, 0), "it counts from there"
    host.later(4 * NEVER_S)
    assert gone(processes)


def test_a_launcher_that_pauses_may_be_killed(begin: Any) -> None:
    host = begin(FAMILY)
    processes = family(host)
    host.link.say(PauseHost(True))
    host.hears()
    host.link.hang_up()
    assert gone(processes)


def test_another_signal_is_passed_on(begin: Any) -> None:
    host = begin(
        "import signal, sys, time\nsignal.signal(10, lambda *_: sys.exit(8))\nprint(1, flush=True)\ntime.sleep(3600)"
    )
    host.wait(lambda: host.out["stdout"])
    host.link.say(EndAgent(LIMIT_S, 10))
    host.wait()
    assert host.link.code == 8


# An agent that takes no SIGTERM, with its real guard and a folder; it imports nothing that takes long.
GUARDED = f"""
import importlib.util, os, signal, time
spec = importlib.util.spec_from_file_location("guard", {str(Path(ssh.__file__).parents[1] / "guard.py")!r})
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = os.path.join(os.getcwd(), "of the agent")
os.mkdir(folder)
kept = guard.Guard("0123", folder)
kept.know([])
print("up", flush=True)
time.sleep(3600)
"""


def test_the_guard_of_an_agent_that_is_killed_has_time_to_tidy(begin: Any, tmp_path: Path) -> None:
    host = begin(GUARDED)
    host.wait(lambda: host.out["stdout"])
    host.link.say(EndAgent(0.2))
    host.wait()
    assert host.link.code == -signal.SIGKILL
    assert not (tmp_path / "of the agent").exists()


def test_a_client_that_leaves_somebody_with_its_pipes_is_closed_all_the_same(begin: Any) -> None:
    seconds = f"3600.{os.getpid()}"  # so that it is not that of another run of the tests
    host = begin("print('mine')", before=f"(sleep {seconds} &)")
    # The shell's grandchild holds stdout and stderr for ever, as a master connection of ssh does.
    host.wait()
    assert (host.out["stdout"], host.link.code) == (b"mine\n", 0)
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", seconds]]
    for process in left:
        process.kill()
    assert left


def test_a_supervisor_that_is_killed_ends_its_agent(begin: Any) -> None:
    host = begin("import time; print(1, flush=True); time.sleep(3600)")
    host.wait(lambda: host.out["stdout"])
    started = host.link.last(AgentStarted)
    agent = psutil.Process(started.agent)
    os.kill(started.supervisor, signal.SIGKILL)
    assert gone([agent])
    host.wait()
    assert host.link.code is None, "nobody told how the agent ended: the connection was lost"


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ({"folder": "/no/such/folder"}, "no such working directory"),
        ({"package": "no_such_package"}, "not this package"),
    ],
)
def test_what_is_missing_is_told(begin: Any, more: dict[str, str], missing: str) -> None:
    host = begin("print('never')", **more)
    host.wait()
    what = host.link.last(HostLacks).what
    assert missing in what and next(iter(more.values())) in what
    assert host.out["stdout"] == b""


def test_lists_of_folders_keep_what_the_host_has(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/there:/both")
    host = begin("import os; print(os.environ['PATH'])", environment={"PATH": "/ours:/both"})
    host.wait()
    assert host.out["stdout"] == b"/ours:/both:/there\n"
