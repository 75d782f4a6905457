"""The processes of an elastic run on one machine: workers, and the script that finds hosts."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from guozhuang.compat.horovod.runner.elastic.crew import Ended, Event, LocalWorkers, Lost, Printed, Reached, Started
from guozhuang.compat.horovod.runner.elastic.discovery import DiscoveryError, HostDiscoveryScript, Watch
from guozhuang.compat.horovod.runner.elastic.doors import Doors
from guozhuang.compat.horovod.runner.elastic.remote_crew import HostConfig, RemoteCrew
from guozhuang.compat.horovod.runner.elastic.writing import Room
from guozhuang.launch.hosts import ssh
from guozhuang.watch.processes import node_identity


def of_kind(events: queue.Queue[Event], kind: type[Any], limit_s: float = 20.0) -> Any:
    """The next event of that kind."""
    deadline = time.monotonic() + limit_s
    while not isinstance(event := events.get(timeout=max(deadline - time.monotonic(), 0.001)), kind):
        pass
    return event


def test_a_worker_that_cannot_be_started_has_ended() -> None:
    events: queue.Queue[Event] = queue.Queue()
    crew = LocalWorkers(events, Room())
    too_much = {f"VARIABLE{number}": "x" * 100_000 for number in range(100)}
    for number, environ in enumerate([too_much, {"ZERO": "a\0b"}]):
        crew.start(number, ["/bin/true"], environ)
        said = of_kind(events, Printed)
        assert said.worker == number and said.stream == "stderr" and b"/bin/true cannot be started" in said.data
        assert of_kind(events, Ended) == Ended(number, 126)
    crew.end(0)
    crew.close()


def test_workers_wait_where_nobody_takes_what_they_print() -> None:
    events: queue.Queue[Event] = queue.Queue()
    room = Room(most_bytes=1 << 18)
    crew = LocalWorkers(events, room)
    crew.start(0, ["/bin/sh", "-c", "head -c 5000000 /dev/zero; exit 3"], dict(os.environ))
    try:
        of_kind(events, Started)
        deadline = time.monotonic() + 10
        while not room.is_full() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        there = list(events.queue)
        assert sum(len(event.data) for event in there if isinstance(event, Printed)) <= (1 << 18) + (1 << 16)
        assert not any(isinstance(event, Ended) for event in there)
        num_bytes = 0
        while not isinstance(event := events.get(timeout=20), Ended):
            assert isinstance(event, Printed)
            num_bytes += len(event.data)
            room.give(len(event.data))
        assert num_bytes == 5_000_000 and event == Ended(0, 3)
        crew.look()
        assert not crew._processes and not crew._threads, "nothing is kept of who has ended"
    finally:
        crew.close()


def test_workers_of_another_host_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without ssh between; what its pipes and its own queue hold is not endless either."""
    monkeypatch.setattr(ssh, "command", lambda host, options, timeout_s, token: ssh.local_command(token))
    events: queue.Queue[Event] = queue.Queue()
    room, num_bytes = Room(most_bytes=1 << 18), 20_000_000
    with socket.create_server(("127.0.0.1", 0)) as store, closing(Doors(store.getsockname()[1], [])) as doors:
        told = HostConfig(doors.open(), doors.secret, node_identity(), 600.0, 60.0, {}, ssh.SshOptions())
        with closing(RemoteCrew("localhost", told, events, room)) as crew:
            crew.start(0, ["/bin/sh", "-c", f"head -c {num_bytes} /dev/zero; exit 3"], 1)
            assert of_kind(events, Reached).address == "127.0.0.1"
            of_kind(events, Started)
            deadline = time.monotonic() + 10
            while not room.is_full() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.5)
            there = list(events.queue)
            assert 1 << 18 <= sum(len(event.data) for event in there if isinstance(event, Printed)) <= 1 << 20
            assert not any(isinstance(event, Ended | Lost) for event in there)
            while not isinstance(event := events.get(timeout=20), Ended):
                assert isinstance(event, Printed)
                num_bytes -= len(event.data)
                room.give(len(event.data))
            assert event == Ended(0, 3) and num_bytes == 0


def of(path: Path) -> list[psutil.Process]:
    """Processes with the path on their command line."""
    return [each for each in psutil.process_iter(["cmdline"]) if str(path) in " ".join(each.info["cmdline"] or [])]


@pytest.fixture
def script(tmp_path: Path) -> HostDiscoveryScript:
    """Prints a host; once the file ``hangs`` is there, it does not end."""
    return HostDiscoveryScript(f"if test -e {tmp_path}/hangs; then tail -f {tmp_path}/hangs; else echo a:2; fi", 1)


def test_a_script_that_runs_is_ended_with_the_driver(tmp_path: Path, script: HostDiscoveryScript) -> None:
    said: list[str] = []
    watch = Watch(script, said.append)
    assert watch.newest() == {"a": 2}
    (tmp_path / "hangs").touch()
    deadline = time.monotonic() + 20
    while not of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert of(tmp_path)
    began = time.monotonic()
    watch.close()
    assert time.monotonic() < began + 3 and not of(tmp_path) and not said and watch.newest() == {"a": 2}
    with pytest.raises(DiscoveryError, match="not run any more"):
        script.find()


def test_an_interrupt_ends_the_script(tmp_path: Path, script: HostDiscoveryScript) -> None:
    (tmp_path / "hangs").touch()

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while not (script._process and of(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        script.find()
    thread.join()
    assert not of(tmp_path)
