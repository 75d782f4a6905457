"""What users see of several ranks: marked lines, a live progress bar, files; and the report of a failure."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes.test_run import environ, guozhuang


def write(folder: Path, text: str) -> Path:
    (folder / "out").mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text("import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + text)
    return path


def test_lines_are_marked_and_none_is_lost(tmp_path: Path) -> None:
    """Much at once, in characters that any cut would break; the last words without an end of line."""
    script = write(
        tmp_path,
        "for i in range(3000): print(f'{rank} 锅庄 {i} ' + 'é' * 50)\n"
        "sys.stderr.write(f'err {rank}\\n'); sys.stdout.write(f'end {rank}'); sys.stdout.flush(); os._exit(0)\n",
    )
    done = guozhuang("run", "-np", "3", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {rank} 锅庄 {i} " + "é" * 50 for i in range(3000)] + [f"[{rank}] end {rank}"]
        assert f"[{rank}] err {rank}" in done.stderr.splitlines()
    assert len(lines) == 3 * 3001


@pytest.mark.slow
def test_both_streams_to_one_place_keep_their_order(tmp_path: Path) -> None:
    script = write(tmp_path, "for i in range(500): print(i, file=(sys.stdout, sys.stderr)[i % 2])\n")
    done = subprocess.run(
        [sys.executable, "-m", "guozhuang", "run", "-np", "2", str(script)], cwd=tmp_path, env=environ(tmp_path),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90, check=True,
    )  # fmt: skip
    for rank in range(2):
        assert [line[4:] for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")] == [
            *map(str, range(500))
        ]


def test_one_rank_has_the_output_for_itself(tmp_path: Path) -> None:
    script = write(tmp_path, "print('plain', sys.stdin.readline())\n")
    done = subprocess.run(
        [sys.executable, "-m", "guozhuang", "run", str(script)], cwd=tmp_path, env=environ(tmp_path), input="typed\n",
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    assert done.stdout == "plain typed\n\n" and done.stderr == ""


def test_a_progress_bar_lives_on_a_terminal(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "for i in range(3):\n    rank or sys.stderr.write(f'\\r{i}/2'); sys.stderr.flush(); time.sleep(0.3)\n"
        "    rank and print('other', i)\n"
        "rank == 0 and sys.stderr.write('\\n')\n",
    )
    master, slave = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "guozhuang", "run", "-np", "2", str(script)],
        cwd=tmp_path, env=environ(tmp_path), stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    seen, arrived = b"", []
    while select.select([master], [], [], 60)[0]:
        try:
            data = os.read(master, 65536)
        except OSError:
            break
        seen += data
        arrived += [time.monotonic()] * (b"/2" in data)
    os.close(master)
    assert run.wait() == 0
    text = seen.decode()
    bar = "\x1b[36m[0]\x1b[0m "
    assert f"\r{bar}0/2" in text and f"\r{bar}2/2" in text, "drawn over, with a coloured mark"
    assert "\x1b[33m[1]\x1b[0m other 1\r\n" in text
    assert arrived[-1] - arrived[0] > 0.3, "not kept back until the end"


@pytest.mark.slow
def test_a_file_per_rank(tmp_path: Path) -> None:
    script = write(
        tmp_path, "print('hello', rank); sys.stderr.write('err\\n'); rank == 1 and os.kill(os.getpid(), 9)\n"
    )
    for _ in range(2):
        done = guozhuang("run", "-np", "2", "--log-dir", "logs", script, folder=tmp_path)
        assert done.returncode == 128 + signal.SIGKILL
        assert "hello" not in done.stdout and "logs/rank0.log and so on" in done.stderr
        assert "the last lines of rank 1:\n  hello 1\n  err" in done.stderr
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank0.log", "rank1.log"]
    again = "--- started anew, attempt 0\n"
    assert (tmp_path / "logs" / "rank1.log").read_text() == f"hello 1\nerr\n{again}hello 1\nerr\n"


@pytest.mark.slow
def test_torchs_own_redirection_still_works(tmp_path: Path) -> None:
    script = write(tmp_path, "print('hello', rank)\n")
    done = guozhuang("run", "-np", "2", "--log-dir", "logs", "-t", "3", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[default1]:hello 1" in done.stdout
    assert len(list((tmp_path / "logs").rglob("stdout.log"))) == 2


@pytest.mark.slow
def test_only_some_ranks_are_shown(tmp_path: Path) -> None:
    done = guozhuang("run", "-np", "2", "--local-ranks-filter", "1", write(tmp_path, "print('hi')\n"), folder=tmp_path)
    assert done.stdout == "[1] hi\n"


@pytest.mark.parametrize("stand", ["", "--standalone"])
def test_the_report_of_a_failure(tmp_path: Path, stand: str) -> None:
    """Rank 1 raises; rank 0 loses its peer a few milliseconds later and is faster to end; rank 2 sleeps.

    Rank 1 is slow to leave: it is ended by the launcher before it comes to its own end.
    """
    script = write(
        tmp_path,
        "from pathlib import Path\nmark = Path(os.environ['OUT'], 'raised')\nprint('step 7', rank)\n"
        "if rank == 1:\n"
        "    import atexit; atexit.register(lambda: (mark.touch(), time.sleep(1)))\n"
        "    raise ValueError('boom')\n"
        "if rank == 0:\n"
        "    while not mark.exists(): time.sleep(0.001)\n"
        "    raise RuntimeError('Connection closed by peer [127.0.0.1]:1')\n"
        "time.sleep(60)\n",
    )
    done = guozhuang("run", "-np", "3", *filter(None, [stand]), script, folder=tmp_path)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("guozhuang run: rank") :].splitlines()
    assert report[0].startswith("guozhuang run: rank 1 failed first: an exception (process ")
    assert report[1] == "  Traceback (most recent call last):" and "  ValueError: boom" in report
    assert report[report.index("the last lines of rank 1 before that:") + 1] == "  step 7 1"
    ended = report[report.index("ended because of it:") + 1 :]
    assert ended[0].startswith("  rank 0: ") and ended[1] == "  rank 2: signal 15 (SIGTERM), sent by guozhuang run"
    for noise in ("torch.distributed.elastic", "Root Cause", "FAILED", "Sending process"):
        assert noise not in done.stderr


@pytest.mark.slow
def test_a_restart_is_said(tmp_path: Path) -> None:
    script = write(tmp_path, "print('try'); sys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 5)\n")
    done = guozhuang("run", "-np", "2", "--max-restarts", "3", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "exit code 5" in done.stderr and "all ranks are started anew (1 of at most 3 times)" in done.stderr
    assert done.stdout.count("] try") >= 3, "one may have been ended before it came so far"


@pytest.mark.slow
def test_a_closed_output_does_not_stop_the_ranks(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "for i in range(20000): print('x' * 20)\nopen(os.path.join(os.environ['OUT'], str(rank)), 'w').close()\n",
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "guozhuang", "run", "-np", "2", str(script)],
        cwd=tmp_path, env=environ(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert run.stdout is not None and run.stderr is not None
    run.stdout.readline()
    run.stdout.close()
    err = run.stderr.read().decode()
    run.stderr.close()
    assert run.wait(60) == 0, err
    assert err.count("standard output is closed") == 1
    assert len(list((tmp_path / "out").iterdir())) == 2
