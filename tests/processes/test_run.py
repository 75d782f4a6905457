"""``guozhuang run`` and the command line, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

# Says who it is, into a file per rank; then does what it was asked.
SCRIPT = """
import json, os, signal, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS",
         "GUOZHUANG_STRATEGY", "GUOZHUANG_TIMELINE", "GUOZHUANG_BACKEND", "GUOZHUANG_GROUPS")
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
        time.sleep(60)
    if what == "timeline":
        from guozhuang.timeline import Timeline
        timeline = Timeline(int(rank))
        with timeline.span("forward", "step"):
            pass
        timeline.write(os.environ["GUOZHUANG_TIMELINE"] + ".rank" + rank)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    return path


def environ(folder: Path, **more: str) -> dict[str, str]:
    told = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_", "PET_", "TORCHELASTIC", "GUOZHUANG")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    (folder / "tmp").mkdir(exist_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"OUT": str(folder / "out"), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": path} | more


def guozhuang(*arguments: str | Path, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "guozhuang", *map(str, arguments)],
        cwd=folder,
        env=environ(folder, **more),
        capture_output=True,
        text=True,
        timeout=90,
    )


def told(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "out").iterdir())]


def test_ranks_are_started_and_told_what_was_asked(script: Path, tmp_path: Path) -> None:
    options = ("-np", "2", "--strategy", "ddp", "--backend", "gloo", "--groups", "2")
    done = guozhuang("run", *options, script, "--lr", "0.1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = told(tmp_path)
    num_threads = max(1, len(os.sched_getaffinity(0)) // 2)
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


def test_modules_and_programs(script: Path, tmp_path: Path) -> None:
    assert guozhuang("run", "-m", "train", "a", folder=tmp_path, OMP_NUM_THREADS="3").returncode == 0
    assert (told(tmp_path)[0]["argv"], told(tmp_path)[0]["OMP_NUM_THREADS"]) == (["a"], "3")
    assert guozhuang("run", "--no-python", sys.executable, script, "b", folder=tmp_path).returncode == 0
    assert told(tmp_path)[0]["argv"] == ["b"]
    assert guozhuang("run", "--run-path", script, "c", folder=tmp_path).returncode == 0
    assert told(tmp_path)[0]["argv"] == ["c"]


@pytest.mark.parametrize("option", ["local-rank", "local_rank"])
def test_the_old_way_of_telling_the_local_rank(script: Path, tmp_path: Path, option: str) -> None:
    done = guozhuang("run", "-np", "2", "--pass_local_rank", option, script, "a", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [rank["argv"] for rank in told(tmp_path)] == [[f"--{option}={rank}", "a"] for rank in range(2)]


@pytest.mark.slow
def test_variables_of_torchrun_are_read(script: Path, tmp_path: Path) -> None:
    done = guozhuang("run", "--use_env", script, folder=tmp_path, PET_NPROC_PER_NODE="2", PET_MASTER_PORT="0")
    assert done.returncode == 0, done.stderr
    assert len(told(tmp_path)) == 2


@pytest.mark.slow
def test_a_port_that_is_taken_is_an_error_of_the_command_line(script: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options in (("--master-port", port), ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")):
            done = guozhuang("run", *options, script, folder=tmp_path)
            assert done.returncode == 2
            assert f"port {port} is taken by another process" in done.stderr
            assert not told(tmp_path)
    assert guozhuang("run", "--master-port", port, script, folder=tmp_path).returncode == 0


def test_on_one_node_nothing_listens_but_on_loopback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, psutil\n"
        "found = [c.laddr for c in psutil.Process(os.getppid()).net_connections('tcp') if c.status == 'LISTEN']\n"
        "print(*{address.ip for address in found}, str(found[0].port) == os.environ['MASTER_PORT'])\n"
    )
    assert guozhuang("run", "-np", "1", script, folder=tmp_path).stdout == "127.0.0.1 True\n"


def test_more_ranks_than_cores_work_and_are_said_once(script: Path, tmp_path: Path) -> None:
    num_cores = len(os.sched_getaffinity(0))
    done = guozhuang("run", "-np", str(num_cores + 1), script, folder=tmp_path)
    assert done.returncode == 0
    assert done.stderr.count(f"{num_cores + 1} ranks share {num_cores} cores") == 1
    assert len(told(tmp_path)) == num_cores + 1


def test_the_first_failure_is_shown_first_and_its_code_returned(script: Path, tmp_path: Path) -> None:
    done = guozhuang("run", "--nproc_per_node=2", script, "exit1", "sleep", folder=tmp_path)
    assert done.returncode == 31
    summary = [line for line in done.stderr.splitlines() if line.startswith("guozhuang run:")]
    assert summary[0].startswith("guozhuang run: rank 1 failed first: exit code 31")


def test_a_signal_is_named(script: Path, tmp_path: Path) -> None:
    done = guozhuang("run", "-np", "2", script, "kill0", "sleep", folder=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 0 failed first: signal 9 (SIGKILL)" in done.stderr
    assert "out of memory" in done.stderr


def test_stopping_the_launcher_stops_the_ranks(script: Path, tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-m", "guozhuang", "run", "-np", "2", str(script), "sleep"],
        cwd=tmp_path,
        env=environ(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "out").iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children()
        assert len(ranks) == 2
        launcher.terminate()
        _, err = launcher.communicate(timeout=45)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "got SIGTERM; the ranks of this node were ended" in err
    assert not [rank for rank in ranks if rank.is_running()]


def test_timelines_of_the_ranks_become_one(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    (tmp_path / "trace.json.rank7").write_text("left by an earlier run")
    done = guozhuang("run", "-np", "2", "--timeline", "trace.json", script, "timeline", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"the timeline is in {out}" in done.stderr
    text = out.read_text()
    trace = json.loads(text)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert len([event for event in events if event["name"] == "forward"]) == 2
    assert not list(tmp_path.glob("trace.json.rank*"))


@pytest.mark.slow
def test_a_timeline_that_nobody_wrote_is_said(script: Path, tmp_path: Path) -> None:
    done = guozhuang("run", "--timeline", "trace.json", script, folder=tmp_path)
    assert done.returncode == 0
    assert "no timeline was written" in done.stderr


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
        (["run", "-np", "many", "train.py"], "'many'"),
        (["run", "--nnodes", "0", "train.py"], "torch elastic refused"),
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
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("guozhuang: ")
    assert "Traceback" not in err
    assert not told(tmp_path)


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

    with pytest.raises(SystemExit) as caught:
        cli.main(["dance"])
    assert caught.value.code == 2
    assert "'dance'" in capsys.readouterr().err
