"""Who a process is, whether it has ended, and what runs it where the package or the interpreter lacks something."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from guozhuang.watch import processes
from guozhuang.watch.processes import GONE, STOPPED, Process, start_of, state_of
from tests.waiting import until


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as found:
        yield found
        found.kill()


def wait_for(pid: int, flags: int) -> None:
    os.waitid(os.P_PID, pid, flags | os.WNOWAIT)


def test_states(child: subprocess.Popen[bytes]) -> None:
    me, pid = os.getpid(), child.pid
    start = start_of(pid)
    assert state_of(me, start_of(me)) in ("running", "sleeping")
    assert state_of(me, start_of(me) - 100) == GONE, "another process took the number over"
    card = str(Process(pid, start, "node a"))
    assert Process.read(card) == (pid, start, "node a")
    assert not Process.read(card).has_ended("node a")
    child.send_signal(signal.SIGSTOP)
    wait_for(pid, os.WSTOPPED)
    assert state_of(pid, start) == state_of(pid, 0) == STOPPED
    child.kill()
    wait_for(pid, os.WEXITED)
    assert state_of(pid, start) == GONE, "a zombie"
    child.wait()
    assert state_of(pid, start) == GONE
    assert start_of(pid) == 0
    assert processes.command_line(pid) == processes.environment(pid) == []
    assert Process.read(card).has_ended("node a")
    assert not Process.read(card).has_ended("node b"), "nobody there can tell"


@pytest.mark.parametrize("name", ["\u8bad" * 9, ") R 1 (", "a b"])
def test_names_of_any_kind(name: str, tmp_path: Path) -> None:
    # The kernel keeps 15 bytes of a name, which may end inside a character.
    program = tmp_path / name
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as named:
        try:
            found = processes.status(named.pid)
            assert found is not None
            assert found.parent == os.getpid() and found.session == os.getsid(0) and found.start > 0
            assert named.pid in processes.descendants(os.getpid())
            assert next(processes.ancestors(named.pid)) == os.getpid()
            while (words := processes.command_line(named.pid))[-1:] != [b"60"]:  # until the kernel has put them there
                assert named.poll() is None
            assert words == [str(program).encode(), b"60"]
        finally:
            named.kill()


def test_what_the_interpreter_lacks_is_called_by_number(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pidfd_open", "memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING"):
        monkeypatch.delattr(os, name, raising=False)
    pidfd, memory = processes.pidfd_open(child.pid), processes.memfd_create("of a test")
    try:
        assert not os.get_inheritable(pidfd) and not os.get_inheritable(memory)
        assert "of a test" in processes.open_descriptors()[memory]
        os.ftruncate(memory, 10)
        assert not processes.has_sealed_size(memory)
        processes.seal_size(memory)
        assert processes.has_sealed_size(memory)
        with pytest.raises(PermissionError):
            os.ftruncate(memory, 5)
        assert not select.select([pidfd], [], [], 0)[0]
        child.kill()
        assert select.select([pidfd], [], [], 10)[0]
    finally:
        os.close(pidfd)
        os.close(memory)
    child.wait()
    with pytest.raises(ProcessLookupError):
        processes.pidfd_open(child.pid)


def test_nodes_by_what_their_processes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = (processes.REACH_EACH_OTHER, processes.SEE_EACH_OTHER, processes.SHARE_MEMORY)
    here = [processes.node_identity(each, strict=True) for each in levels]
    assert len(set(here)) == 3
    links = {"pid": "pid:[2]"}
    read = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: links.get(os.path.basename(path)) or read(path))
    there = [processes.node_identity(each) for each in levels]
    assert [a == b for a, b in zip(here, there, strict=True)] == [True, False, False]
    monkeypatch.setattr(os, "readlink", lambda path: read("/nowhere"))
    with pytest.raises(OSError, match="nowhere"):
        processes.node_identity(strict=True)
    assert processes.node_identity() in here[0], "what the system tells"


def test_a_program_finds_this_module_on_a_host_without_the_package() -> None:
    program = b"""
from guozhuang.watch.processes import this_process
import sys
print(this_process("there"), "guozhuang" in sys.modules, __name__)
"""
    text = processes.preload(Path(processes.__file__).read_bytes(), program)
    command = [sys.executable, "-I", "-S", "-c", "import sys; exec(sys.stdin.buffer.read())"]
    found = subprocess.run(command, input=text, capture_output=True, check=True).stdout.decode().split()
    assert found[2:] == ["there", "False", "__main__"]
    assert int(found[1]) > start_of(os.getpid()) > 0


@pytest.mark.parametrize(
    ("states", "num_looks"), [([""], 1), (["SS", "S"], 2), (["R", "SR", "R", "S"], 4), (["S", ""], 2), (["?", "?"], 2)]
)
def test_the_end_waits_for_threads_that_still_run(monkeypatch, states, num_looks) -> None:
    looks = iter(states)
    monkeypatch.setattr(processes, "_states_of_threads", lambda name: next(looks))
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)
    processes.wait_for_threads("a name")
    assert len(states) == num_looks and not [*looks]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux tells")
def test_threads_have_states_by_name() -> None:
    named, is_over = threading.Event(), threading.Event()

    def waits() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("guozhuang test!")
        named.set()
        is_over.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    named.wait()
    try:
        until(lambda: processes._states_of_threads("guozhuang test!") == "S")
        assert not processes._states_of_threads("guozhuang test?")
    finally:
        is_over.set()
        thread.join()
