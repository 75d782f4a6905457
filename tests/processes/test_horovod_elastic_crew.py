"""The processes of an elastic run on one machine: workers, and the script that finds hosts."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from guozhuang.compat.horovod.runner.elastic import crew
from guozhuang.compat.horovod.runner.elastic.crew import LocalWorkers
from guozhuang.compat.horovod.runner.elastic.discovery import DiscoveryError, HostDiscovery
from guozhuang.compat.horovod.runner.elastic.remote_crew import RemoteWorkers
from guozhuang.compat.horovod.runner.elastic.remote_host import HostSettings
from guozhuang.launch.console.output import RankPlaces
from guozhuang.launch.console.streams import NamedPipe
from guozhuang.launch.crew import state_of
from guozhuang.launch.hosts import ssh
from guozhuang.net.doors import Doors
from guozhuang.watch.processes import node_identity
from tests.waiting import NEVER_S, until

NOWHERE = ("127.0.0.1", 1)


@pytest.mark.parametrize("environ", [{f"VARIABLE{n}": "x" * 100_000 for n in range(100)}, {"ZERO": "a\0b"}])
def test_a_worker_that_cannot_be_started(tmp_path: Path, environ: dict[str, str]) -> None:
    with closing(LocalWorkers(str(tmp_path), NOWHERE, 60.0, environ)) as workers:
        with pytest.raises(OSError, match="/bin/true cannot be started: "):
            workers.start(0, "a", 1, ["/bin/true"], os.devnull, os.devnull)
        workers.end(0)
        assert workers.wait(0.0) == {}


def test_the_end_of_a_worker_takes_what_it_started_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "GRACE_S", NEVER_S)
    sleeps = f"sleep 600.{os.getpid()}"

    def sleeping() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if sleeps == " ".join(each.info["cmdline"] or [])]

    def started(worker: int, script: str) -> int:
        return workers.start(worker, "a", 1, ["/bin/sh", "-c", script], os.devnull, os.devnull)

    def codes() -> dict[int, int]:
        found: dict[int, int] = {}
        until(lambda: found.update(workers.wait(0)) or found)
        return found

    with closing(LocalWorkers(str(tmp_path), NOWHERE, 60.0, dict(os.environ))) as workers:
        started(0, f"{sleeps} & exit 3")
        assert codes() == {0: 3} and not sleeping()
        # The shell notes each SIGTERM and goes on; what it has started ignores it.
        started(1, f"(trap '' TERM; exec {sleeps}) & trap 'echo >> {tmp_path}/heard' TERM; while :; do wait; done")
        until(sleeping)
        workers.end(1)
        until(lambda: workers.wait(0) or (tmp_path / "heard").exists())
        assert workers.wait(0) == {} and sleeping(), "it has a grace"
        workers.end(1, at_once=True)
        assert codes() == {1: -signal.SIGKILL} and not sleeping()
        assert not (workers._jobs or workers._pids or workers._crew.sessions), "nothing is kept of who has ended"


class Events:
    """What a remote host reports."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.texts: list[str] = []

    def started(self, worker: int, pid: int) -> None:
        self.pids[worker] = pid

    def ended(self, worker: int, code: int) -> None:
        self.codes[worker] = code

    def say(self, text: str) -> None:
        self.texts.append(text)


def test_workers_of_another_host_wait_where_nobody_takes_what_they_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without ssh between; what its pipes hold and what is on the way is not endless."""
    monkeypatch.setattr(ssh, "command", lambda host, options, timeout_s, token: ssh.local_command(token))
    events, num_bytes = Events(), 20_000_000
    pipe = NamedPipe(str(tmp_path / "pipe"))
    with socket.create_server(("127.0.0.1", 0)) as store, closing(Doors(store.getsockname()[1], [])) as doors:
        settings = HostSettings("localhost", doors.open(), doors.secret.hex(), node_identity(), 600.0)
        with closing(RemoteWorkers(settings, {}, ssh.SshOptions(), 60.0, events)) as host:
            script = f"head -c {num_bytes} /dev/zero; echo too >&2; exit 3"
            host.start(0, ["/bin/sh", "-c", script], 1, RankPlaces(pipe.path, pipe.path, {}))
            until(lambda: host.turn() or not host.reading)
            assert host.address == "127.0.0.1" and events.pids.keys() == {0}
            shell = psutil.Process(events.pids[0])

            def is_stuck() -> bool:
                host.turn()
                return [each.status() for each in shell.children()] == [psutil.STATUS_SLEEPING]

            until(is_stuck)  # in what it writes
            assert sum(len(each.unsent) for each in host._all_pipes) < 1 << 18 and not (events.codes or host.is_lost)
            found = bytearray()

            def read() -> bool:
                host.turn()
                try:
                    found.extend(os.read(pipe.source, 1 << 16))
                except BlockingIOError:
                    return bool(events.codes)
                return False

            until(read)
            assert events.codes == {0: 3} and not events.texts
            assert found.count(0) == num_bytes and found.endswith(b"too\n")
            host.start(1, ["/bin/sh", "-c", "sleep 600"], 1, RankPlaces(pipe.path, pipe.path, {}))
            until(lambda: host.turn() or 1 in events.pids)
            host.stop()
            until(lambda: host.turn() or host.is_lost)
            assert events.codes == {0: 3, 1: 255} and not events.texts, "the end was asked for"
            until(lambda: state_of(events.pids[1]) in ("", "Z"))
    pipe.close()


def of(path: Path) -> list[psutil.Process]:
    """Processes with the path on their command line."""
    return [each for each in psutil.process_iter(["cmdline"]) if str(path) in " ".join(each.info["cmdline"] or [])]


@pytest.fixture
def discovery(tmp_path: Path) -> HostDiscovery:
    """Prints a host; once the file ``hangs`` is there, it does not end."""
    return HostDiscovery(f"if test -e {tmp_path}/hangs; then tail -f {tmp_path}/hangs; else echo a:2; fi", 1)


def test_a_script_that_hangs_holds_nobody_up_and_is_ended(
    tmp_path: Path, discovery: HostDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    discovery.find()
    assert discovery.newest == {"a": 2}
    now = discovery._started
    assert discovery.turn(now + 0.9) == "" and not discovery._process, "once a second"
    (tmp_path / "hangs").touch()
    assert discovery.turn(now + 2.0) == ""
    until(lambda: of(tmp_path))
    assert discovery.turn(now + 61.0) == "" and of(tmp_path)
    text = discovery.turn(now + 62.5)
    assert "did not end within 60 s" in text and text.endswith("The hosts that were found before stay")
    until(lambda: not of(tmp_path))
    assert discovery.newest == {"a": 2}
    assert discovery.turn(now + 64.0) == discovery.turn(now + 125.0) == "", "said once"
    (tmp_path / "hangs").unlink()
    texts = [discovery.turn(now + 127.0)]
    until(lambda: any(texts) or texts.append(discovery.turn(now + 127.5)))
    assert texts[-1] == "the discovery script works again"
    (tmp_path / "hangs").touch()
    discovery.turn(now + 130.0)
    until(lambda: of(tmp_path))
    discovery.close()
    until(lambda: not of(tmp_path))


def test_an_interrupt_ends_the_script(tmp_path: Path, discovery: HostDiscovery) -> None:
    (tmp_path / "hangs").touch()

    def interrupt() -> None:
        until(lambda: discovery._process and of(tmp_path))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        discovery.find()
    thread.join()
    until(lambda: not of(tmp_path))


def test_a_script_that_fails_at_the_start() -> None:
    with pytest.raises(DiscoveryError, match=r"ended with exit code 3, saying: no hosts$"):
        HostDiscovery("echo no hosts >&2; exit 3", 1).find()
    listed = HostDiscovery(None, 1, [("a", 1), ("b", 2), ("a", 1)])
    listed.find()
    assert listed.newest == {"a": 2, "b": 2} and listed.turn(0.0) == ""
