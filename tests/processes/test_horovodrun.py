"""``horovodrun`` as its users start it: what processes are told, what is written, how a failure ends it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from guozhuang.compat.horovod.common import extension
from tests.launching import HOROVODRUN, Launched, guozhuang, write

pytestmark = pytest.mark.waits

TELL = """
import json, os, sys, time
begins = ("HOROVOD_", "GUOZHUANG_HOROVOD")
told = {name: value for name, value in os.environ.items() if name.startswith(begins)}
told |= {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONUNBUFFERED", "RANK", "OWN")}
print(json.dumps(told | {"argv": sys.argv[1:]}))
print("and an error", file=sys.stderr)
"""


# What a rank of an outer run, elastic or not, has in its environment.
OUTER = {
    "HOROVOD_HOSTNAME": "outer", "HOROVOD_RANK": "5", "HOROVOD_SIZE": "9", "HOROVOD_LOCAL_RANK": "5", "HOROVOD_LOCAL_SIZE": "9",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_ELASTIC": "1", "GUOZHUANG_HOROVOD_ELASTIC": "3@127.0.0.1:1",
}  # fmt: skip


def horovodrun(*arguments: object, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return guozhuang(*arguments, folder=folder, program=HOROVODRUN, **more)


def told(lines: list[str]) -> list[dict[str, str]]:
    """What each rank printed, by rank."""
    found = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
    return sorted(found, key=lambda each: int(each["HOROVOD_RANK"]))


def test_processes_are_told_who_they_are(tmp_path: Path) -> None:
    """Also within a run of another one. And what they print is shown, dated, and written into files."""
    script = write(tmp_path, TELL)
    old = tmp_path / "out" / "rank.1"
    old.mkdir(parents=True)
    (old / "stdout").write_text("of an earlier run\n")
    done = horovodrun(
        "-np", 2, "--cycle-time-ms", "2", "--output-filename", "out", "-prefix-timestamp", "--mpi", "--mpi-args=x",
        "python", script, "--np", 3, "a b", folder=tmp_path, OWN="kept", HOROVOD_LOG_LEVEL="info",
        **OUTER,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[[01]\] ", line) for line in lines) and len(lines) == 2
    assert len(re.findall(r"(?m)^\d{4}-\S+ \S+ \[[01]\] and an error$", done.stderr)) == 2
    for rank, found in enumerate(told(lines)):
        assert found.pop("PYTHONPATH").split(":")[-1] == extension.ON_PATH
        assert found == {
            "HOROVOD_HOSTNAME": "localhost", "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1", "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_CYCLE_TIME": "2", "HOROVOD_LOG_LEVEL": "info",
            "PYTHONUNBUFFERED": "1", "RANK": str(rank), "OWN": "kept", "argv": ["--np", "3", "a b"],
        }  # fmt: skip
        folder = tmp_path / "out" / f"rank.{rank}"
        assert told((folder / "stdout").read_text().splitlines())[0]["HOROVOD_RANK"] == str(rank)
        assert (folder / "stderr").read_text() == "and an error\n"
        assert "earlier" not in (folder / "stdout").read_text()
    assert done.stderr.count("--mpi changes nothing") == 1 and done.stderr.count("--mpi-args mean nothing here") == 1


@pytest.mark.slow
def test_two_hosts_have_ranks_crosswise(tmp_path: Path) -> None:
    """Two names of this machine, which the launcher starts without ssh, whatever its port, as two nodes of different sizes."""
    script = write(tmp_path, TELL)
    (tmp_path / "hosts").write_text("localhost slots=2\n127.0.0.1 slots=1\n")
    more = ["--output-filename", "out", "--verbose"]
    done = horovodrun("-np", 3, "-hostfile", "hosts", "-p", 2222, *more, "python", script, folder=tmp_path, **OUTER)
    assert done.returncode == 0, done.stderr
    assert (
        "horovodrun: guozhuang run -np 3 --hostfile hosts --ssh-port 2222 --copy-output out --no-python python"
        in done.stderr
    )
    found = told(done.stdout.splitlines())
    names = ("HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [[each[f"HOROVOD_{name}"] for name in names] for each in found] == [
        ["localhost", "0", "3", "0", "2", "0", "2"],
        ["localhost", "1", "3", "1", "2", "0", "1"],
        ["127.0.0.1", "2", "3", "0", "1", "1", "2"],
    ]
    assert not any({"GUOZHUANG_HOROVOD_ELASTIC", "HOROVOD_ELASTIC"} & each.keys() for each in found)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rank.0", "rank.1", "rank.2"]


# Who ends without an exception is the cause although the others, which wait for it in a collective, raise one.
FAIL = """
import os, signal, sys, time
if sys.argv[1] == "exit":
    import torch, horovod.torch as hvd
    hvd.init()
    hvd.allreduce(torch.ones(1))
if os.environ["HOROVOD_RANK"] == "1":
    print("the last words", flush=True)
    os.kill(os.getpid(), int(sys.argv[2])) if sys.argv[1] == "signal" else sys.exit(int(sys.argv[2]))
if sys.argv[1] == "exit":
    hvd.allreduce(torch.ones(1), name="waits")
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("hosts", "end", "code"),
    [
        pytest.param([], ["signal", 9], 137, id="here-signal"),
        pytest.param(["-H", "localhost:1,127.0.0.1:1"], ["exit", 7], 7, id="two-hosts-exit", marks=pytest.mark.slow),
    ],
)
def test_the_first_failure_ends_the_others(tmp_path: Path, hosts: list[str], end: list[object], code: int) -> None:
    script = write(tmp_path, FAIL)
    done = horovodrun("-np", 2, *hosts, "--output-filename", "out", sys.executable, script, *end, folder=tmp_path)
    assert done.returncode == 1, done.stderr
    said = done.stderr[done.stderr.rindex("horovodrun: Horovod detected") :]
    assert "one or more processes exited with non-zero status" in said
    assert re.search(rf"Process name: rank 1 on host \S+\nExit code: {code}\n$", said), done.stderr
    assert (tmp_path / "out" / "rank.1" / "stdout").read_text() == "the last words\n"


def test_copies_take_what_comes_after_a_full_disk_too(tmp_path: Path) -> None:
    """A rank goes on, and is shown, where its copy cannot be written; that is said once."""
    full = tmp_path / "out" / "rank.0"
    full.mkdir(parents=True)
    (full / "stdout").symlink_to("/dev/full")
    script = write(tmp_path, "for i in range(3): print(i, flush=True)")
    done = horovodrun("-np", 1, "--output-filename", "out", "python", script, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0] 0\n[0] 1\n[0] 2\n"), done.stderr
    assert done.stderr.count("no more of what a rank prints is written to") == 1 and "No space left" in done.stderr


def test_copies_hold_every_attempt_of_a_run(tmp_path: Path) -> None:
    """And what a rank of an outer run was told is not told to ranks of `guozhuang run`."""
    text = "import os, sys\nprint('try', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
    text += f"assert not os.environ.keys() & {set(OUTER)}\n"
    script = write(tmp_path, text + "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n")
    for _ in range(2):
        done = guozhuang("run", "-np", 1, "--max-restarts", 1, "--copy-output", "out", script, folder=tmp_path, **OUTER)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out" / "rank.0" / "stdout").read_text() == "try 0\ntry 1\n"


def test_a_signal_ends_all_of_it(tmp_path: Path) -> None:
    script = write(tmp_path, "import os, time\nprint('here', os.environ['RANK'], flush=True)\ntime.sleep(60)\n")
    with Launched("-np", 2, "python", script, folder=tmp_path, program=HOROVODRUN) as launched:
        launched.until(lambda: launched.printed.count("here") == 2)
        launched.send(signal.SIGTERM)
        done = launched.wait()
        assert done.returncode == 128 + signal.SIGTERM and not launched.left(), done.stderr
        assert "Horovod detected" not in done.stderr
