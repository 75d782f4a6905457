"""``guozhuang run`` and the command line, as a user starts them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NoReturn

import pytest

from guozhuang.launch import crew, local_run
from guozhuang.launch.options.plan_file import TrainingPlan, write_plan
from guozhuang.world.machine import usable_cores
from tests import launching
from tests.waiting import LIMIT_S, NEVER_S, until

pytestmark = pytest.mark.waits


# Says who it is, into a file per rank; then does what it was asked.
SCRIPT = """
import json, os, signal, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS",
         "GUOZHUANG_STRATEGY", "GUOZHUANG_TIMELINE", "GUOZHUANG_BACKEND", "GUOZHUANG_GROUPS")
if "virtual" in sys.argv:
    names = ("LOCAL_RANK", "GUOZHUANG_LOCAL_RANK")
rank = os.environ["RANK"]
told = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:]}
with open(os.path.join(os.environ["OUT"], rank), "w") as out:
    json.dump(told, out)
for what in sys.argv[1:]:
    if what == f"kill{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == f"exit{rank}":
        sys.exit(30 + int(rank))
    if what == "sleep":
        time.sleep(3600)
    if what == "timeline":
        from guozhuang.timeline import Timeline
        timeline = Timeline(int(rank))
        with timeline.span("forward", "step"):
            pass
        timeline.write(os.environ["GUOZHUANG_TIMELINE"] + ".rank" + rank)
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(os.path.join(os.environ["TMPDIR"], "deaf" + rank), "w").close()
    if what == "whendeaf":
        while not all(os.path.exists(os.path.join(os.environ["TMPDIR"], "deaf" + each)) for each in "01"):
            time.sleep(0.01)
    if what == "garbage":
        with open(os.environ["GUOZHUANG_TIMELINE"] + ".rank" + rank, "w") as out:
            out.write("no JSON")
    if what == "hangup":
        os.kill(os.getppid(), signal.SIGHUP)
    if what == "ignored":
        [ignored] = [line for line in open(f"/proc/{os.getppid()}/status") if line.startswith("SigIgn")]
        if not int(ignored.split()[1], 16) & 1 << signal.SIGHUP - 1:
            sys.exit(9)
    if what == "print":
        print("hello of rank", rank)
    if what == "endless":
        while True:
            print("x" * 200)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    return path


def environ(folder: Path, **more: str) -> dict[str, str]:
    (folder / "tmp").mkdir(exist_ok=True)
    return launching.environment(**{"OUT": str(folder / "out"), "TMPDIR": str(folder / "tmp")} | more)


def guozhuang(*arguments: str | Path, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return launching.guozhuang(*arguments, folder=folder, OUT=str(folder / "out"), **more)


@pytest.fixture
def here(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command line inside this process, which saves the seconds that importing torch takes."""
    from guozhuang import cli

    kept = environ(tmp_path)
    for name in set(os.environ) - set(kept):
        monkeypatch.delenv(name)
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: cli.main(["run", *map(str, arguments)])


def told(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "out").iterdir())]


def test_ranks_are_started_and_told_what_was_asked(script: Path, tmp_path: Path) -> None:
    write_plan(TrainingPlan(1, 2, strategy="ddp", groups=2), tmp_path / "plan.json")
    options = ("--plan", "plan.json", "--strategy", "ddp", "--backend", "gloo")
    done = guozhuang("run", *options, script, "--lr", "0.1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = told(tmp_path)
    num_threads = max(1, usable_cores() // 2)
    for rank, found in enumerate(ranks):
        assert found == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "OMP_NUM_THREADS": str(num_threads),
            "GUOZHUANG_STRATEGY": "ddp",
            "GUOZHUANG_TIMELINE": None,
            "GUOZHUANG_BACKEND": "gloo",
            "GUOZHUANG_GROUPS": "2",
            "argv": ["--lr", "0.1"],
        }
    assert len(ranks) == 2
    assert not list((tmp_path / "tmp").iterdir()), "no folder of logs is left"


def test_modules_and_programs(
    here: Callable[..., int], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert here("-m", "train", "a") == 0
    assert (told(tmp_path)[0]["argv"], told(tmp_path)[0]["OMP_NUM_THREADS"]) == (["a"], "3")
    assert here("--no-python", sys.executable, script, "b") == 0
    assert told(tmp_path)[0]["argv"] == ["b"]
    assert here("--run-path", script, "c") == 0
    assert told(tmp_path)[0]["argv"] == ["c"]


@pytest.mark.parametrize("option", ["local-rank", "local_rank"])
def test_the_old_way_of_telling_the_local_rank(
    here: Callable[..., int], script: Path, tmp_path: Path, option: str
) -> None:
    assert here("-np", "2", "--pass_local_rank", option, script, "a") == 0
    assert [rank["argv"] for rank in told(tmp_path)] == [[f"--{option}={rank}", "a"] for rank in range(2)]


def test_the_arguments_of_the_script_are_its_own(here: Callable[..., int], script: Path, tmp_path: Path) -> None:
    """Torch elastic writes the local rank into them, and makes one dollar of two."""
    script.rename(tmp_path / "-$$odd.py")
    words = ["a$$b", "${local_rank}", "$local_rank", "$", "$$$", "", " ", "-np", "--"]
    assert here("-np", "2", "--pass-local-rank", "local_rank", "--", "-$$odd.py", *words) == 0
    assert [rank["argv"] for rank in told(tmp_path)] == [[f"--local_rank={rank}", *words] for rank in range(2)]


def test_a_virtual_local_rank(here: Callable[..., int], script: Path, tmp_path: Path) -> None:
    options = ("-np", "2", "--virtual-local-rank", "--pass-local-rank", "local-rank")
    assert here(*options, script, "virtual") == 0
    assert told(tmp_path) == [
        {"LOCAL_RANK": "0", "GUOZHUANG_LOCAL_RANK": str(rank), "argv": ["--local-rank=0", "virtual"]}
        for rank in range(2)
    ]


@pytest.mark.parametrize("options", [("-r", "3"), ("--duplicate-stdout-filters", "hello", "-t", "1")])
def test_torchruns_log_files_are_kept(
    here: Callable[..., int], script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert here("-np", "2", *options, script, "print") == 0
    (folder,) = (tmp_path / "tmp").iterdir()
    assert f"torchrun's way of logging are in {folder}" in capfd.readouterr().err
    assert sorted(path.read_text() for path in folder.rglob("stdout.log")) == [f"hello of rank {n}\n" for n in range(2)]


def test_filtered_output_goes_to_the_log_folder(here: Callable[..., int], script: Path, tmp_path: Path) -> None:
    assert (
        here("-np", "2", "--log-dir", "logs", "-t", "1", "--duplicate-stdout-filters", "rank 1", script, "print") == 0
    )
    (filtered,) = (tmp_path / "logs").rglob("filtered_stdout.log")
    assert filtered.read_text().count("hello") == 1
    assert not list((tmp_path / "tmp").iterdir())


def test_a_hang_up_that_was_to_be_ignored_is(here: Callable[..., int], script: Path, tmp_path: Path) -> None:
    """As nohup does; the rank sends it to its agent, which is this process."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert here(script, *["ignored"] * (sys.platform == "linux"), "hangup") == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert here(script, "hangup", "sleep") == 128 + signal.SIGHUP


def test_the_shutdown_timeout_holds_when_a_rank_fails(
    here: Callable[..., int], script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "_SHUTDOWN_S", NEVER_S)
    field = local_run.versions.field
    monkeypatch.setattr(
        local_run.versions, "field", lambda of, name: NEVER_S if name == "shutdown_timeout" else field(of, name)
    )
    assert here("-np", "2", "--shutdown-timeout", "1", script, "deaf", "whendeaf", "exit1", "sleep") == 31


def test_ranks_that_the_kernel_holds_are_a_failure(
    here: Callable[..., int], script: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "0.3")
    monkeypatch.setattr(crew, "state_of", lambda pid: "D")
    assert here("-np", "2", script, "sleep") == 1
    assert "rank 0 (process " in (err := capfd.readouterr().err) and "held by the kernel" in err


def is_full(pipe: IO[bytes] | None) -> bool:
    assert pipe is not None
    end = os.open(f"/proc/self/fd/{pipe.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [end], [], 0)[1]
    finally:
        os.close(end)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="opens the other end of a pipe by /proc")
@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT], ids=["apart", "together"])
def test_output_that_nobody_reads_does_not_hold_up_a_signal(script: Path, tmp_path: Path, stderr: int) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-m", "guozhuang", "run", "-np", "2", str(script), "endless"],
        cwd=tmp_path,
        env=environ(tmp_path),
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    try:
        until(lambda: len(list((tmp_path / "out").iterdir())) == 2)
        until(lambda: is_full(launcher.stdout))
        launcher.terminate()
        assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    finally:
        launcher.kill()
        launcher.communicate()


def test_nodes_that_cannot_be_found_are_one_line(
    here: Callable[..., int], script: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unknown(*_: object, **more: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert here("--nnodes", "2", "--master-addr", "nosuch.invalid", script) == 1
    err = capfd.readouterr().err
    assert err.startswith("guozhuang run: ") and "'nosuch.invalid'" in err and len(err.splitlines()) == 1


def test_variables_of_torchrun_are_read(
    here: Callable[..., int], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("PET_MASTER_PORT", "0")
    assert here("--use_env", script) == 0
    assert len(told(tmp_path)) == 2


def test_a_port_that_is_taken_is_an_error_of_the_command_line(
    here: Callable[..., int], script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options in (
            ("--master-port", port),
            ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
            ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port),
        ):
            assert here(*options, script) == 2
            [line] = capfd.readouterr().err.splitlines()
            assert f"port {port} is taken by another process" in line and "Fix:" in line
            assert not told(tmp_path)
    assert here("--master-port", port, script) == 0


def test_on_one_node_nothing_listens_but_on_loopback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, psutil\n"
        "found = [c.laddr for c in psutil.Process(os.getppid()).net_connections('tcp') if c.status == 'LISTEN']\n"
        "print(*{address.ip for address in found}, str(found[0].port) == os.environ['MASTER_PORT'])\n"
    )
    assert guozhuang("run", "-np", "1", script, folder=tmp_path).stdout == "127.0.0.1 True\n"


def test_one_rank_is_replaced_while_the_others_go_on(tmp_path: Path) -> None:
    """Rank 0 stays the same process; rank 1 comes back in its old place, and only once more than it may."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "rank, come = os.environ['RANK'], len([name for name in os.listdir() if name.startswith('came')])\n"
        "if rank == '1':\n"
        "    open(f'came{come}', 'w').close()\n"
        "    sys.exit(7 if come < int(sys.argv[1]) else 0)\n"
        "while len([name for name in os.listdir() if name.startswith('came')]) < 3:\n"
        "    time.sleep(0.01)\n"
        "print('the same', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    options = ("run", "-np", 2, "--max-restarts", 2, "--on-failure", "keep-survivors", script)
    done = launching.guozhuang(*options, 2, folder=tmp_path)
    assert done.returncode == 0 and done.stdout == "[0] the same 0\n", done
    assert done.stderr.count("and the others go on") == 2 and "(2 of at most 2 times)" in done.stderr
    for name in tmp_path.glob("came*"):
        name.unlink()
    done = launching.guozhuang(*options, 3, folder=tmp_path)
    assert done.returncode == 7 and "rank 1 failed first: exit code 7" in done.stderr, done


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (("--redirects", 3, "--log-dir", "logs"), "logs/*/attempt_0/1/stdout.log"),
        (("--copy-output", "logs"), "logs/rank.1/stdout"),
    ],
)
def test_a_replaced_rank_leaves_its_output_and_no_child(
    tmp_path: Path, options: tuple[object, ...], files: str
) -> None:
    """The new process of rank 1 finds the children of the first one ended, and appends to the file of its output."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "if os.environ['RANK'] != '1':\n"
        "    while not os.path.exists('over'):\n"
        "        time.sleep(0.01)\n"
        "elif not os.path.exists('child'):\n"
        "    open('child', 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "    print('the first process')\n"
        "    sys.exit(7)\n"
        "else:\n"
        "    status = f\"/proc/{open('child').read()}/stat\"\n"
        "    lives = os.path.exists(status) and ') Z ' not in open(status).read()\n"
        "    print('the second, with', 'a' if lives else 'no', 'child')\n"
        "    open('over', 'w').close()\n"
    )
    keeping = ("--max-restarts", 1, "--on-failure", "keep-survivors")
    done = launching.guozhuang("run", "-np", 2, *keeping, *options, script, folder=tmp_path)
    assert done.returncode == 0, done
    (file,) = tmp_path.glob(files)
    assert file.read_text() == "the first process\nthe second, with no child\n", done


def test_timelines_of_the_ranks_become_one(
    here: Callable[..., int], script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    (tmp_path / "trace.json.rank7").write_text("left by an earlier run")
    assert here("-np", "2", "--timeline", "trace.json", script, "timeline") == 0
    assert f"the timeline is in {out}" in capfd.readouterr().err
    text = out.read_text()
    trace = json.loads(text)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert len([event for event in events if event["name"] == "forward"]) == 2
    assert not list(tmp_path.glob("trace.json.rank*"))


def test_a_timeline_that_cannot_be_joined_changes_no_exit_code(
    here: Callable[..., int], script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("--timeline", "trace.json", script, "garbage", "exit0") == 30
    assert "could not be joined" in capfd.readouterr().err
    assert (tmp_path / "trace.json.rank0").exists()


def test_a_timeline_that_nobody_wrote_is_said(
    here: Callable[..., int], script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("--timeline", "trace.json", script) == 0
    assert "no timeline was written" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nosuch.py"], "there is no such script (got 'nosuch.py')"),
        (["run", "--strategy", "nosuch", "train.py"], "'nosuch'"),
        (["run", "--strategy", "single", "-np", "2", "train.py"], "runs in one process"),
        (["run", "--backend", "glue", "train.py"], "'glue'"),
        (["run", "--groups", "0", "train.py"], "--groups"),
        (["run", "--groups", "2", "--strategy", "none", "train.py"], "--groups 2"),
        (["run", "-np", "0", "train.py"], "at least 1"),
        (["run", "-np", "-1", "train.py"], "at least 1"),
        (["run", "-np", "many", "train.py"], "'many'"),
        (["run", "--nnodes", "0", "train.py"], "--nnodes makes no sense"),
        (["run", "--max-restarts", "-1", "train.py"], "torch elastic refused"),
        (["run", "--log-dir", "train.py", "-t", "3", "train.py"], "torch elastic refused"),
        (["run", "--logs-specs", "nosuch", "train.py"], "torch elastic refused"),
        (["run", "--rdzv-backend", "nosuch", "train.py"], "--rdzv-backend nosuch cannot be used"),
        (["run", "--rdzv-backend", "etcd", "--nnodes", "2", "train.py"], "--rdzv-backend etcd cannot be used"),
        (["run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:70000", "train.py"], "'localhost:70000'"),
        (["run", "--on-failure", "keep-survivors", "train.py"], "no restart is allowed"),
        (["run", "--timeline", "no/such/folder/t.json", "train.py"], "timeline cannot be written"),
        (["run", "--no-python", "nosuch-program"], "there is no such program"),
        (["run", "-m", "--no-python", "x"], "exclude each other"),
        (["run", "broken.py"], "syntax error in broken.py, line 2"),
        (["run", "-m", "broken"], "broken.py, line 2"),
        (["run", "-m", "nosuch.module"], "there is no such module (got 'nosuch.module')"),
        (["run", "-m", "folder"], "no __main__"),
        (["run", "folder"], "no __main__.py"),
        (["run", "--use-env", "--pass-local-rank", "local-rank", "train.py"], "exclude each other"),
        (["run", "--hang-timeout", "0", "train.py"], "--hang-timeout"),
        (["run", "--log-dir", "train.py/x", "train.py"], "folder for logs"),
        (["run", "--nnodes", "2", "--node-rank", "2", "train.py"], "--node-rank"),
        (["run", "--rdzv-endpoint", "localhost:x", "train.py"], "HOST:PORT"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_one_line_and_starts_nothing(
    script: Path,
    tmp_path: Path,
    arguments: Sequence[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from guozhuang import cli

    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("import os\nfor x in:\n    pass\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").touch()
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    [line] = err.splitlines()
    assert line.startswith("guozhuang: ") and words in line and "Fix:" in line
    assert not out and not told(tmp_path)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    from guozhuang import cli

    assert "COMMAND" in help_of(cli.main, [], capsys)
    assert "--strategy NAME" in help_of(cli.main, ["run", "--help"], capsys)
    assert "--strategies" in help_of(cli.main, ["compare", "--help"], capsys)
    assert help_of(cli.main, ["--version"], capsys).startswith("guozhuang ")


def help_of(main: object, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)  # type: ignore[operator]
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from guozhuang import cli

    assert cli.main(["dance"]) == 2
    assert "'dance'" in capsys.readouterr().err
