"""``guozhuang run -H``: real ssh servers on loopback; each name is a host of its own, which shares the machine with the others.

What needs a network of its own is in test_ssh_hosts.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.sshd import Sshd, missing, none_left, processes_with, stop

pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(bool(missing()), reason=missing() or "it can")]
slow = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0

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
# Needs no PyTorch, so that it starts at once.
LIGHT = """
import os, signal, sys, time
rank = os.environ["RANK"]
open(f"here{rank}", "w").write(str(os.getpid()))
while len([name for name in os.listdir() if name.startswith("here")]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
for what in sys.argv[1:]:
    if what == f"raise{rank}":
        raise RuntimeError("no good")
    if what == f"exit{rank}":
        sys.exit(40 + int(rank))
    if what == f"kill{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == f"agent{rank}":
        os.kill(os.getppid(), signal.SIGKILL)
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "child":
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)", os.getcwd()], start_new_session=True)
    if what == "sleep":
        time.sleep(99)
    if what == "once" and rank == "1" and not os.path.exists("came"):
        open("came", "w").close()
        sys.exit(7)
"""


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with Sshd(tmp_path) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "it's a folder"
    found.mkdir()
    (found / "train.py").write_text(TRAIN)
    (found / "light.py").write_text(LIGHT)
    return found


def environment(**more: str) -> dict[str, str]:
    told = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "OMP_",
        "PET_",
        "TORCHELASTIC",
        "GUOZHUANG",
        "GLOO_",
        "NCCL_",
        "PWD",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def command(sshd: Sshd, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "guozhuang", "run", "--ssh-config", str(sshd.config), *arguments]


def launch(sshd: Sshd, folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(sshd, *arguments), cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert not none_left(str(folder), 1), "processes are left"
    return done


def begin(sshd: Sshd, folder: Path, num_ranks: int, *arguments: str) -> subprocess.Popen[str]:
    """Start, and return once every rank is there."""
    process = subprocess.Popen(
        command(sshd, *arguments), cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + LIMIT_S
    try:
        while len([path for path in folder.glob("here*") if path.read_text()]) < num_ranks:
            assert process.poll() is None and time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
    except BaseException:
        stop(process)
        raise
    return process


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


def test_two_hosts_with_different_slots_train(sshd: Sshd, folder: Path) -> None:
    given = ["-x", "ASKED", "-x", "GIVEN=x y='z'", "-H", "a0:1,a1:2"]
    done = launch(
        sshd,
        folder,
        *given,
        "train.py",
        *NASTY,
        ASKED="as\nked",
        NCCL_DEBUG="WARN",
        NOT_CARRIED="1",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    ranks = told(done.stdout)
    assert [each["RANK"] for each in ranks] == ["0", "1", "2"]
    assert [each["GROUP_RANK"] for each in ranks] == ["0", "1", "1"]
    assert [each["LOCAL_WORLD_SIZE"] for each in ranks] == ["1", "2", "2"]
    for each in ranks:
        assert each["total"] == 6.0
        assert each["argv"] == NASTY
        assert (each["folder"], each["python"]) == (str(folder), sys.executable)
        assert (each["ASKED"], each["GIVEN"], each["NCCL_DEBUG"]) == ("as\nked", "x y='z'", "WARN")
        assert (each["NOT_CARRIED"], each["GUOZHUANG_SECRET"]) == (None, None)
        assert (each["MASTER_ADDR"], each["GLOO_SOCKET_IFNAME"], each["NCCL_SOCKET_IFNAME"]) == (
            "127.0.0.1",
            "lo",
            "lo",
        )
    said = [line for line in done.stderr.splitlines() if line.endswith("says this to stderr")]
    assert len(said) == 3, done.stderr
    assert "says this to stderr" not in done.stdout


@pytest.mark.slow
def test_hosts_that_cannot_be_reached_are_named_in_the_words_of_ssh(sshd: Sshd, folder: Path) -> None:
    # a0 is fine; a1 has nobody who listens; a2 takes another key only; the last is unknown.
    keys = f"Host a0\n  IdentityFile {sshd.identity}\nHost a1\n  Port 1\nHost a2\n  IdentityFile {sshd.identity}-no\n"
    sshd.identity.with_name("stranger").rename(f"{sshd.identity}-no")
    sshd.config.write_text(keys + sshd.config.read_text().replace(f"  IdentityFile {sshd.identity}\n", ""))
    start = time.monotonic()
    done = launch(sshd, folder, "-H", "a0:1,a1:1,a2:1,nosuch.invalid:1", "light.py")
    assert time.monotonic() - start < 30
    assert done.returncode == 255
    said = "\n".join(ours(done.stderr))
    assert (
        "host a1 could not be reached (ssh ended with 255): ssh: connect to host 127.0.0.1 port 1: Connection" in said
    )
    assert "host a2 could not be reached" in said and "Permission denied (publickey)" in said
    assert "host nosuch.invalid could not be reached" in said and "resolve" in said
    assert "could not" in ours(done.stderr)[0]
    assert not list(folder.glob("here*"))


@pytest.mark.slow
def test_a_rank_killed_on_the_second_host(sshd: Sshd, folder: Path) -> None:
    done = launch(sshd, folder, "-H", "a0:1,a1:2", "light.py", "kill2", "child", "sleep")
    assert done.returncode == 128 + signal.SIGKILL
    said = ours(done.stderr)
    assert said[0] == "host a1 failed: exit code 137"
    assert "rank 2 failed first: signal 9 (SIGKILL)" in said[1]
    assert said[-1] == "then host a0 was ended because of it"


def test_killing_the_launcher_ends_everything(sshd: Sshd, folder: Path) -> None:
    launcher = begin(sshd, folder, 2, "-H", "a0:1,a1:1", "light.py", "child", "sleep")
    try:
        deadline = time.monotonic() + LIMIT_S
        while len([line for line in processes_with(str(folder)) if "time.sleep" in line]) < 2:
            assert time.monotonic() < deadline, "the ranks did not start their children"
            time.sleep(0.1)
        launcher.kill()
        launcher.wait()
        assert not none_left(str(folder), 15)
        assert not none_left(str(sshd.config), 5), "ssh clients are left"
    finally:
        stop(launcher)


@slow
@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("raise1", 1, "RuntimeError: no good"),
        ("exit1", 41, "rank 1 failed first: exit code 41"),
        ("agent1", 137, "host a1 lost its agent by SIGKILL"),
    ],
)
def test_failures_on_the_second_host(sshd: Sshd, folder: Path, what: str, code: int, words: str) -> None:
    done = launch(sshd, folder, "-H", "a0:1,a1:1", "light.py", what, "sleep")
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert ours(done.stderr)[0].startswith("host a1 ")
    assert "then host a0 was ended because of it" in ours(done.stderr)


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_launcher_ends_all_hosts(sshd: Sshd, folder: Path, number: signal.Signals) -> None:
    launcher = begin(sshd, folder, 2, "-H", "a0:1,a1:1", "light.py", "sleep")
    try:
        os.killpg(launcher.pid, number)  # as the terminal does
        _, err = launcher.communicate(timeout=30)
    finally:
        stop(launcher)
    assert launcher.returncode == 128 + number
    assert ours(err)[0] == f"got {number.name}; ending the ranks of 2 hosts"
    assert ours(err)[1:] == ["then host a0 was ended because of it", "then host a1 was ended because of it"]
    assert not none_left(str(folder), 1)


@slow
def test_a_second_signal_does_not_wait_for_deaf_ranks(sshd: Sshd, folder: Path) -> None:
    launcher = begin(sshd, folder, 2, "-H", "a0:1,a1:1", "light.py", "deaf", "sleep")
    try:
        time.sleep(0.5)
        launcher.terminate()
        time.sleep(1.5)
        assert launcher.poll() is None
        launcher.terminate()
        start = time.monotonic()
        launcher.communicate(timeout=30)
        assert time.monotonic() - start < 10
    finally:
        stop(launcher)
    assert not none_left(str(folder), 1)


# The launcher of a machine that differs from its hosts: what it has is what they lack.
DIFFERENT = """
import sys
from guozhuang.launch import hosts, hosts_run, ssh
what, config = sys.argv[1:]
if what == "python":
    sys.executable = "/no/such/python"
if what == "folder":
    ssh.folder = lambda: "/no/such/folder"
if what == "package":
    source = ssh.supervisor_source().replace(b'find_spec(header["package"])', b'find_spec("no_such_package")')
    ssh.supervisor_source = lambda: source
wanted = hosts.plan(["--ssh-config", config, "-H", "a0:1,a1:1", "light.py"], ["light.py"], {})
sys.exit(hosts_run.Run(wanted, [False, False], b"x" * 32).run())
"""


@slow
@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("python", 127, r"host a[01] has no such interpreter: /no/such/python: .*not found|No such file"),
        ("folder", 1, r"host a[01] has no such working directory: '/no/such/folder': No such file or directory"),
        ("package", 1, r"host a[01] has Python, but not this package: .* finds no package 'guozhuang'"),
    ],
)
def test_what_a_host_lacks_is_named(sshd: Sshd, folder: Path, what: str, code: int, words: str) -> None:
    command = [sys.executable, "-c", DIFFERENT, what, str(sshd.config)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code, done.stderr
    assert re.search(words, ours(done.stderr)[0])
    assert len(ours(done.stderr)) == 2
    assert not none_left(str(folder), 1)


@slow
def test_a_script_that_is_missing_is_named(sshd: Sshd, folder: Path) -> None:
    done = launch(sshd, folder, "-H", "a0:1,a1:1", "nosuch.py")
    assert done.returncode == 2
    assert "there is no such script (got 'nosuch.py')" in done.stderr
    assert "Traceback" not in done.stderr


@slow
def test_a_host_that_says_nothing_is_named_at_the_time_out(sshd: Sshd, folder: Path, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 99\n")
    silent.chmod(0o755)
    sshd.config.write_text(f"Host a1\n  ProxyCommand {silent}\n  ConnectTimeout 60\n" + sshd.config.read_text())
    start = time.monotonic()
    done = launch(sshd, folder, "--start-timeout", "12", "-H", "a0:1,a1:1", "light.py")
    assert 10 < time.monotonic() - start < 40
    assert done.returncode == 255
    assert "host a1 could not be reached" in ours(done.stderr)[0]


@slow
def test_this_machine_needs_no_ssh(folder: Path) -> None:
    code = [
        sys.executable,
        "-m",
        "guozhuang",
        "run",
        "--ssh-config",
        "/dev/null",
        "--hostfile",
        "hosts",
        "-np",
        "2",
    ]
    (folder / "hosts").write_text("# both are this machine\nlocalhost slots=1\n127.0.0.1:3\n")
    done = subprocess.run(
        [*code, "light.py", "exit1"], cwd=folder, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 41, done.stderr
    assert "host 127.0.0.1 failed: exit code 41" in done.stderr


@slow
def test_all_hosts_start_again_after_a_failure(sshd: Sshd, folder: Path) -> None:
    done = launch(sshd, folder, "--max-restarts", "2", "-H", "a0:1,a1:1", "light.py", "once")
    assert done.returncode == 0, done.stderr
    assert ours(done.stderr)[0] == "host a1 failed: exit code 7"
    assert ours(done.stderr)[-1] == "starting all ranks again, time 1 of 2"


@slow
def test_a_port_that_is_taken_is_a_clear_error(sshd: Sshd, folder: Path) -> None:
    arguments = ("--master-port", str(sshd.port), "-H", "a0:1,a1:1", "light.py")
    done = launch(sshd, folder, *arguments)
    assert done.returncode == 1
    assert "could not listen on any address" in done.stderr and "Address already in use" in done.stderr


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
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        assert [each["argv"] for each in told(out)] == [[name]] * 2
