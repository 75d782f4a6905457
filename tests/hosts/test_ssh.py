"""``guozhuang run -H``: real ssh servers on loopback; each name is a host of its own, which shares the machine with the others.

What needs a network of its own is in test_ssh_hosts.py.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from guozhuang import cli
from guozhuang.launch.hosts import ssh
from tests.hosts.sshd import Sshd, missing, none_left, processes_with
from tests.hosts.warm import Launcher, Warm
from tests.launching import ROOT, environment
from tests.waiting import LIMIT_S, until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can"),
]
slow = pytest.mark.slow
PYTHON = sys.executable


# Meets the others by the means of stock PyTorch, and says what it was given.
TRAIN = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME",
         "NCCL_SOCKET_IFNAME", "GUOZHUANG_SECRET", "ASKED", "GIVEN", "NCCL_DEBUG", "NOT_CARRIED", "OMP_NUM_THREADS")
told = {name: os.environ.get(name) for name in names}
told |= {"total": total.item(), "argv": sys.argv[1:], "folder": os.getcwd(), "python": sys.executable}
sys.stdout.write(json.dumps(told) + "\\n")
sys.stderr.write(f"rank {dist.get_rank()} says this to stderr\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""
# Ranks may take as long as they like to end: a launcher that waits for those that do not would wait for ever.
PATIENT = ("--shutdown-timeout", "3600")
# Seconds after which hosts miss a launcher. It speaks every 2 s, and must not be missed before it is stopped.
LOST_AFTER_S = 12
# Needs no PyTorch, so that it starts at once.
LIGHT = """
import os, signal, sys, time
rank = os.environ["RANK"]
open(f"here{rank}", "w").write(str(os.getpid()))
while len([name for name in os.listdir() if name.startswith("here")]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: open(f"heard{rank}", "w").close())
if "usr1" in sys.argv:
    signal.signal(signal.SIGUSR1, lambda *_: open(f"usr1-{rank}", "w").close() or sys.exit(0))
open(f"ready{rank}", "w").close()
for what in sys.argv[1:]:
    if what == f"raise{rank}":
        raise RuntimeError("no good")
    if what == f"exit{rank}":
        sys.exit(40 + int(rank))
    if what == f"kill{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == f"agent{rank}":
        os.kill(os.getppid(), signal.SIGKILL)
    if what == f"end{rank}":
        sys.exit(0)
    if what == "child":
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", os.getcwd()], start_new_session=True)
    if what == "sleep":
        time.sleep(3600)
    if what == f"host{rank}":
        def parent_of(pid):
            return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        agent = os.getppid()
        for pid in (parent_of(agent), agent, os.getpid()):
            os.kill(pid, signal.SIGKILL)
    if what == "once":
        with open(f"came{rank}", "a") as file:
            file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + "/" + os.environ["TORCHELASTIC_MAX_RESTARTS"] + " ")
        if rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(7)
    if what == "gate":
        while not os.path.exists("gate"):
            time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd")) as found:
        yield found


@pytest.fixture
def sshd(server: Sshd, tmp_path: Path) -> Sshd:
    """The one server, with a configuration of the client that a test may change."""
    found = copy.copy(server)
    found.config = tmp_path / "config"
    found.config.write_text(server.config.read_text())
    return found


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with Warm(tmp_path_factory.mktemp("warm")) as found:
        yield found


@pytest.fixture
def fast(sshd: Sshd, warm: Warm, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Iterator[Any]:
    """Run the launcher in this process, on hosts whose interpreter is warm; (exit code, stdout, stderr)."""
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", warm.python)

    def run(*arguments: str, is_alone: bool = True) -> tuple[int, str, str]:
        try:
            code = cli.main(["run", "--ssh-config", str(sshd.config), *arguments])
        finally:
            out, err = capfd.readouterr()
        assert not none_left(str(folder)), "processes are left"
        left = none_left(str(sshd.config)) if is_alone else []
        assert not left, "ssh clients are left"
        return code, out, err

    yield run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "it's a folder"
    found.mkdir()
    (found / "train.py").write_text(TRAIN)
    (found / "light.py").write_text(LIGHT)
    return found


def command(sshd: Sshd, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "guozhuang", "run", "--ssh-config", str(sshd.config), *arguments]


def ours(err: str) -> list[str]:
    return [line.removeprefix("guozhuang run: ") for line in err.splitlines() if line.startswith("guozhuang run: ")]


def told(out: str) -> list[dict[str, Any]]:
    """What the ranks of TRAIN said, by rank; lines may have a mark before them."""
    found = [json.loads(line[line.index("{") :]) for line in out.splitlines() if "{" in line]
    return sorted(found, key=lambda each: int(each["RANK"]))


NASTY = [
    "a b",
    "c\n\"d'",
    "é 锅庄",
    "",
    "$HOME",
    "*",
    "`date`",
    "!x",
    "--host",
    "\\",
    os.fsdecode(b"\xff\xfe"),
    "-H",
    "a,b:2",
]


def test_two_hosts_with_different_slots_train(fast: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)  # the hosts' own interpreter, which has imported nothing
    for name, value in {"ASKED": "as\nked", "NCCL_DEBUG": "WARN", "NOT_CARRIED": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = fast("-x", "ASKED", "-x", "GIVEN=x y='z'", "-H", "a0:1,a1:2", "train.py", *NASTY)
    assert code == 0, err
    ranks = told(out)
    assert [each["RANK"] for each in ranks] == ["0", "1", "2"]
    assert [each["GROUP_RANK"] for each in ranks] == ["0", "1", "1"]
    assert [each["LOCAL_WORLD_SIZE"] for each in ranks] == ["1", "2", "2"]
    for each in ranks:
        assert each["total"] == 6.0
        assert each["argv"] == NASTY
        assert (each["folder"], each["python"]) == (str(folder), PYTHON)
        assert (each["ASKED"], each["GIVEN"], each["NCCL_DEBUG"]) == ("as\nked", "x y='z'", "WARN")
        assert (each["NOT_CARRIED"], each["GUOZHUANG_SECRET"]) == (None, None)
        assert (each["MASTER_ADDR"], each["GLOO_SOCKET_IFNAME"], each["NCCL_SOCKET_IFNAME"]) == (
            "127.0.0.1",
            "lo",
            "lo",
        )
    said = [line for line in err.splitlines() if line.endswith("says this to stderr")]
    assert len(said) == 3, err
    assert "says this to stderr" not in out


def test_hosts_that_cannot_be_reached_are_named_in_the_words_of_ssh(sshd: Sshd, folder: Path, fast: Any) -> None:
    # a0 is fine; a1 has nobody who listens; a2 takes another key only; the last is unknown.
    other = sshd.identity.with_name("stranger")
    keys = f"Host a0\n  IdentityFile {sshd.identity}\nHost a1\n  Port 1\nHost a2\n  IdentityFile {other}\n"
    sshd.config.write_text(keys + sshd.config.read_text().replace(f"  IdentityFile {sshd.identity}\n", ""))
    code, _, err = fast("-H", "a0:1,a1:1,a2:1,nosuch.invalid:1", "light.py")
    assert code == 255
    said = "\n".join(ours(err))
    assert (
        "host a1 could not be reached (ssh ended with 255): ssh: connect to host 127.0.0.1 port 1: Connection" in said
    )
    assert "host a2 could not be reached" in said and "Permission denied (publickey)" in said
    assert "host nosuch.invalid could not be reached" in said and "resolve" in said
    assert "could not" in ours(err)[0]
    assert not list(folder.glob("here*"))


def test_killing_the_launcher_ends_everything(begun: Any, sshd: Sshd, folder: Path) -> None:
    launcher = begun(2, "-H", "a0:1,a1:1", "light.py", "child", "sleep")
    until(lambda: len([line for line in processes_with(str(folder)) if "time.sleep" in line]) == 2, LIMIT_S)
    launcher.send(signal.SIGKILL)
    assert not none_left(str(folder))
    assert not none_left(str(sshd.config)), "ssh clients are left"


@slow
def test_a_master_connection_of_the_user_does_not_hold_the_run(sshd: Sshd, fast: Any, tmp_path: Path) -> None:
    lines = f"Host *\n  ControlMaster auto\n  ControlPath {tmp_path}/%n\n  ControlPersist 60\n"
    sshd.config.write_text(lines + sshd.config.read_text())
    try:
        assert fast("-H", "a0:1,a1:1", "light.py")[0] == 0
        # One that is there already is used: with a password of one time only, it is the only way in.
        there = ["ssh", "-F", str(sshd.config), "a1", "true"]
        subprocess.run(
            there, check=True, timeout=LIMIT_S, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, cwd=tmp_path
        )
        assert (tmp_path / "a1").is_socket()
        for path in Path().glob("here*"):
            path.unlink()
        sshd.config.write_text(sshd.config.read_text().replace("StrictHostKeyChecking yes", "IdentityFile none"))
        code, _, err = fast("-H", "a1:1", "light.py", "exit0", is_alone=False)
        assert code == 40, err
    finally:
        subprocess.run(["ssh", "-F", str(sshd.config), "-O", "exit", "a1"], capture_output=True, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        (["raise1"], 1, "host a1 failed: exit code 1\n.*RuntimeError: no good"),
        (["exit1"], 41, "host a1 failed: exit code 41\n.*rank 1 failed first: exit code 41"),
        (["kill2", "child"], 137, r"host a1 failed: exit code 137\n.*rank 2 failed first: signal 9 \(SIGKILL\)"),
        (["agent1"], 137, "host a1 lost its agent by SIGKILL"),
        (["host1"], 255, "host a1 was lost: the connection to it broke"),
    ],
)
def test_failures_on_the_second_host(fast: Any, what: list[str], code: int, words: str) -> None:
    ended, _, err = fast("-H", "a0:1,a1:2", "light.py", *what, "sleep")
    assert ended == code, err
    assert re.search(f"(?s)^guozhuang run: {words}", err[err.index("guozhuang run: ") :]), err
    assert ours(err)[-1] == "then host a0 was ended because of it", err


@pytest.fixture
def begun(sshd: Sshd, warm: Warm, folder: Path) -> Iterator[Any]:
    """A launcher in a process of its own, on hosts whose interpreter is warm; returned once every rank is there."""
    launchers = []

    def start(num_ranks: int, *arguments: str, **more: float) -> Launcher:
        words = ["--ssh-config", str(sshd.config), *arguments]
        launcher = Launcher(warm.python, folder, environment(), *words, **more)
        launchers.append(launcher)
        until(
            lambda: len(list(folder.glob("ready*"))) == num_ranks,
            LIMIT_S,
            goes_on=lambda: not launcher.ended(),
            told=lambda: launcher.result(0),
        )
        return launcher

    yield start
    for launcher in launchers:
        launcher.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=slow)])
def test_a_signal_for_the_launcher_ends_all_hosts(begun: Any, folder: Path, number: signal.Signals) -> None:
    launcher = begun(2, "-H", "a0:1,a1:1", "light.py", "sleep")
    os.killpg(launcher.pid, number)  # as the terminal does
    code, said = launcher.result()
    assert code == 128 + number
    assert ours(said)[0] == f"got {number.name}; ending the ranks of 2 hosts"
    assert ours(said)[1:] == ["then host a0 was ended because of it", "then host a1 was ended because of it"]
    assert not none_left(str(folder))


@pytest.mark.slow
def test_servers_that_nobody_uses_end_with_the_ranks(fast: Any) -> None:
    code, _, err = fast("-H", "a0:1,a1:1", "--server-hosts", "a2:2", "light.py")
    assert (code, ours(err)) == (0, []), err


@slow
def test_a_parameter_server_that_is_killed_is_named(begun: Any, folder: Path) -> None:
    launcher = begun(2, "-H", "a0:1,a1:1", "--servers", "3", "light.py", "sleep")
    found = until(
        lambda: [line for line in processes_with(str(folder)) if "--number 2" in line and "rank.py" not in line],
        LIMIT_S,
        goes_on=lambda: not launcher.ended(),
    )
    pid = int(found[0].partition(":")[0])
    os.kill(pid, signal.SIGKILL)
    code, said = launcher.result()
    assert code == 1, said
    server = rf"parameter server 2 \(process {pid}\) ended with signal 9 \(SIGKILL\)"
    assert re.match(rf"host a1 \(parameter server 2\) ends the run: {server}", ours(said)[0]), said
    assert "then host a0 (parameter servers 0 to 1) was ended because of it" in ours(said)
    assert not none_left(str(folder))


@slow
def test_a_signal_of_signals_to_handle_comes_to_the_ranks(begun: Any, folder: Path) -> None:
    asked = ("--signals-to-handle", "SIGUSR1,SIGTERM")
    launcher = begun(2, *asked, "-H", "a0:1,a1:1", "light.py", "usr1", "sleep")
    launcher.send(signal.SIGUSR1)
    code, said = launcher.result()
    assert code == 128 + signal.SIGUSR1, said
    assert ours(said)[0] == "got SIGUSR1; ending the ranks of 2 hosts"
    assert sorted(path.name for path in folder.glob("usr1*")) == ["usr1-0", "usr1-1"]
    assert not none_left(str(folder))


def test_a_second_signal_does_not_wait_for_deaf_ranks(begun: Any, folder: Path) -> None:
    launcher = begun(2, *PATIENT, "-H", "a0:1,a1:1", "light.py", "deaf", "sleep")
    agents = {str(psutil.Process(int((folder / f"here{rank}").read_text())).ppid()) for rank in range(2)}
    guards = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    words = [word for line in guards if any("guard.py" in each for each in line) and agents & {*line} for word in line]
    temporary = [Path(word) for word in words if "guozhuang-run-" in word]
    assert temporary and all(path.exists() for path in temporary)
    launcher.send(signal.SIGTERM)
    until(lambda: len(list(folder.glob("heard*"))) == 2)
    assert not launcher.ended()
    launcher.send(signal.SIGTERM)
    launcher.result()
    assert not none_left(str(folder))
    assert not any(path.exists() for path in temporary), "the guards had no time to tidy up"


@slow
def test_a_host_whose_ranks_have_finished_is_ended_soon(begun: Any, folder: Path) -> None:
    launcher = begun(2, *PATIENT, "-H", "a0:1,a1:1", "light.py", "end1", "deaf", "sleep")
    until(lambda: not psutil.pid_exists(int((folder / "here1").read_text())))
    os.kill(int((folder / "here0").read_text()), signal.SIGKILL)
    code, said = launcher.result()
    assert code == 137, said
    assert not none_left(str(folder))


@slow
def test_hosts_wait_for_a_launcher_that_is_stopped(begun: Any, folder: Path) -> None:
    launcher = begun(2, "-H", "a0:1,a1:1", "light.py", "gate", lost_after_s=LOST_AFTER_S)
    launcher.send(signal.SIGTSTP)
    until(lambda: psutil.Process(launcher.pid).status() == psutil.STATUS_STOPPED)
    # The hosts look at least every 0.1 s whether they have missed the launcher for so long.
    supervisors = [psutil.Process(int((folder / f"here{rank}").read_text())).parents()[1] for rank in range(2)]
    looks = [each.num_ctx_switches().voluntary for each in supervisors]
    until(
        lambda: all(
            each.num_ctx_switches().voluntary > before + 10 * (LOST_AFTER_S + 1)
            for each, before in zip(supervisors, looks, strict=True)
        )
    )
    ranks = [int((folder / f"here{rank}").read_text()) for rank in range(2)]
    assert all(psutil.pid_exists(pid) for pid in ranks)
    launcher.send(signal.SIGCONT)
    (folder / "gate").touch()
    assert launcher.result() == (0, "")
    assert not none_left(str(folder))


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("python", 127, r"host a[01] has no such interpreter: /no/such/python: .*not found|No such file"),
        ("folder", 1, r"host a[01] has no such working directory: '/no/such/folder': No such file or directory"),
        ("package", 1, r"host a[01] has Python, but not this package: .* finds no package 'guozhuang'"),
    ],
)
def test_what_a_host_lacks_is_named(
    fast: Any, monkeypatch: pytest.MonkeyPatch, what: str, code: int, words: str
) -> None:
    if what == "python":
        monkeypatch.setattr(sys, "executable", "/no/such/python")
    if what == "folder":
        monkeypatch.setattr(ssh, "folder", lambda: "/no/such/folder")
    if what == "package":
        source = ssh.supervisor_source().replace(b"find_spec(config.package)", b'find_spec("no_such_package")')
        monkeypatch.setattr(ssh, "supervisor_source", lambda: source)
    ended, _, err = fast("-H", "a0:1,a1:1", "light.py")
    assert ended == code, err
    assert re.search(words, ours(err)[0])
    assert len(ours(err)) == 2


@pytest.mark.parametrize(
    ("script", "words"),
    [("nosuch.py", "there is no such script (got 'nosuch.py')"), ("broken.py", "syntax error in broken.py, line 1")],
)
def test_a_script_that_cannot_be_run_is_named(fast: Any, folder: Path, script: str, words: str) -> None:
    (folder / "broken.py").write_text("def f(:\n")
    code, _, err = fast("-H", "a0:1,a1:1", script)
    assert code == 2, err
    assert words in err
    assert "Traceback" not in err


def test_a_host_that_says_nothing_is_named_at_the_time_out(sshd: Sshd, fast: Any, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 3600\n")
    silent.chmod(0o755)
    sshd.config.write_text(f"Host a1\n  ProxyCommand {silent}\n  ConnectTimeout 60\n" + sshd.config.read_text())
    code, _, err = fast("--start-timeout", "4", "-H", "a0:1,a1:1", "light.py")
    assert code == 255
    assert ours(err)[0].startswith("host a1 could not be reached"), err


@slow
def test_this_machine_needs_no_ssh(folder: Path) -> None:
    code = [sys.executable, "-m", "guozhuang", "run", "--ssh-config", "/dev/null", "--hostfile", "hosts", "-np", "2"]
    (folder / "hosts").write_text("# both are this machine\nlocalhost slots=1\n127.0.0.1:3\n")
    done = subprocess.run(
        [*code, "light.py", "exit1"], cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 41, done.stderr
    assert "host 127.0.0.1 failed: exit code 41" in done.stderr


def test_all_hosts_start_again_after_a_failure(fast: Any, folder: Path) -> None:
    code, _, err = fast("--max-restarts", "2", "-H", "a0:1,a1:1", "light.py", "once")
    assert code == 0, err
    assert ours(err)[0] == "host a1 failed: exit code 7"
    assert ours(err)[-1] == "starting all ranks again, time 1 of 2"
    assert [(folder / f"came{rank}").read_text() for rank in range(2)] == ["0/2 1/2 "] * 2


def test_a_port_that_is_taken_is_a_clear_error(sshd: Sshd, fast: Any) -> None:
    code, _, err = fast("--master-port", str(sshd.port), "-H", "a0:1,a1:1", "light.py")
    assert code == 1
    assert "could not listen on any address" in err and "Address already in use" in err


@slow
def test_two_runs_at_a_time_do_not_meet(sshd: Sshd, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.py").write_text(TRAIN)
    runs = [
        subprocess.Popen(command(sshd, "-H", "a0:1,a1:1", "train.py", name), cwd=where, env=environment(),
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for where, name in ((folder, "first"), (other, "second"))
    ]  # fmt: skip
    for process, name in zip(runs, ("first", "second"), strict=True):
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert [each["argv"] for each in told(out)] == [[name]] * 2
