"""What users see of several ranks: marked lines, a live progress bar, files; and the report of a failure."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.glass import Glass
from tests.processes.test_run import environ, guozhuang
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.waits


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
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    for rank in range(2):
        assert [line[4:] for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")] == [
            *map(str, range(500))
        ]


def test_one_rank_has_the_output_for_itself(tmp_path: Path) -> None:
    script = write(tmp_path, "print('plain', sys.stdin.readline())\n")
    done = subprocess.run(
        [sys.executable, "-m", "guozhuang", "run", str(script)], cwd=tmp_path, env=environ(tmp_path), input="typed\n",
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert done.stdout == "plain typed\n\n" and done.stderr == ""


class OnTerminal:
    """A run in a terminal of its own, in a process group of its own as a shell makes it."""

    def __init__(self, folder: Path, script: Path, columns: int = 60, **more: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns)
        self.run = subprocess.Popen(
            [sys.executable, "-m", "guozhuang", "run", "-np", "2", str(script)], process_group=0, cwd=folder,
            env=environ(folder, **more), stdin=self.slave, stdout=self.slave, stderr=self.slave,
        )  # fmt: skip
        self.seen = b""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read_until(self, is_enough: Callable[[], bool]) -> None:
        def reads() -> bool:
            if select.select([self.master], [], [], 0)[0]:
                self.seen += os.read(self.master, 65536)
            return is_enough()

        until(reads, told=lambda: self.seen)

    def end(self) -> int:
        """Read all that is shown; the exit code."""
        try:
            self.read_until(lambda: self.run.poll() is not None)
            while select.select([self.master], [], [], 0)[0]:
                self.seen += os.read(self.master, 65536)
            return self.run.wait()
        finally:
            self.run.kill()
            self.run.wait()
            os.close(self.master)
            os.close(self.slave)


@pytest.mark.slow
def test_rank_0_has_a_terminal_of_its_own(tmp_path: Path) -> None:
    """Its bars look as in a single process, whatever rank 1 prints; it sees the size; nothing is lost when it is killed."""
    script = write(
        tmp_path,
        "def seen(name):\n"
        "    while not os.path.exists(os.path.join(os.environ['OUT'], name)): time.sleep(0.01)\n"
        "def tell(name): open(os.path.join(os.environ['OUT'], name), 'w').close()\n"
        "if rank == 1:\n"
        "    for step in range(4): seen(f'bar{step}'); print('other', step); sys.stdout.flush()\n"
        "    time.sleep(3600)\n"
        "from rich.console import Console\nfrom rich.live import Live\nfrom tqdm import tqdm\n"
        "assert sys.stdout.isatty() and sys.stderr.isatty()\n"
        "console = Console()\nassert console.is_terminal and console.width == 56, console.width\n"
        "with tqdm(total=2, ncols=30, bar_format='{l_bar}{bar}|', ascii=True) as outer:\n"
        "    for step in range(2):\n"
        "        inner = tqdm(total=1, ncols=30, desc='in', bar_format='{l_bar}{bar}|', ascii=True, leave=False)\n"
        "        tell(f'bar{step}'); seen(f'shown{step}'); inner.close(); outer.update()\n"
        "with Live('', console=console, auto_refresh=False) as live:\n"
        "    for step in range(2, 4):\n"
        "        live.update(f'[red]{\"=\" * 56}[/]\\nstep {step}', refresh=True)\n"
        "        tell(f'bar{step}'); seen(f'shown{step}')\n"
        "resized = []\nsignal.signal(signal.SIGWINCH, lambda *_: resized.append(1))\nprint('ready')\n"
        "while not resized: time.sleep(0.01)\n"
        "print('columns', os.get_terminal_size(1).columns)\n"
        "sys.stdout.write('\\x1b[?25l' + '!' * 20000); sys.stdout.flush(); os.kill(os.getpid(), 9)\n",
    )
    there = OnTerminal(tmp_path, script)
    try:
        for step in range(4):  # what rank 1 prints is shown while the bar stands there
            there.read_until(lambda step=step: b"other %d" % step in there.seen)
            (tmp_path / "out" / f"shown{step}").touch()
        there.read_until(lambda: b"ready\r\n" in there.seen)
        there.resize(50)
        there.run.send_signal(signal.SIGWINCH)
    finally:
        code = there.end()
    before, ready, after = there.seen.decode().partition("ready\r\n")
    glass = Glass(60)
    glass.write(before + ready)
    own = [row[4:] for row in glass.text if row.startswith("[0] ")]
    assert own == ["100%|" + "#" * 24 + "|", "=" * 56, "step 3", "ready"], glass.text
    assert [row for row in glass.text if not row.startswith("[0] ")] == [f"[1] other {step}" for step in range(4)]
    assert "\x1b[36m[0]\x1b[0m \x1b[31m====" in before, "coloured by rich as on any terminal"
    glass = Glass(50)
    glass.write(after)
    assert code == 128 + signal.SIGKILL and glass.text[0] == "[0] columns 46"
    report = after.index("guozhuang run: rank 0 failed first")
    assert after[:report].count("!") == 20000 and glass.cursor_is_shown


def test_a_run_can_be_stopped_and_go_on(tmp_path: Path) -> None:
    """Ctrl-Z, as a shell's terminal sends it, and ``fg``. Marks have no colour where NO_COLOR is set."""
    script = write(
        tmp_path,
        "open(os.path.join(os.environ['OUT'], str(rank)), 'w').write(str(os.getpid()))\n"
        "while not os.path.exists(os.path.join(os.environ['OUT'], 'go')): print('.'); time.sleep(0.02)\n",
    )
    there = OnTerminal(tmp_path, script, NO_COLOR="1")
    try:
        there.read_until(lambda: b"[0] ." in there.seen and b"[1] ." in there.seen)
        all_of_it = [there.run.pid, *(int((tmp_path / "out" / str(rank)).read_text()) for rank in range(2))]
        os.killpg(there.run.pid, signal.SIGTSTP)

        def are(stopped: bool) -> bool:
            return all((psutil.Process(pid).status() == psutil.STATUS_STOPPED) == stopped for pid in all_of_it)

        there.read_until(lambda: are(True))
        os.killpg(there.run.pid, signal.SIGCONT)
        there.read_until(lambda: are(False))
        (tmp_path / "out" / "go").touch()
    finally:
        code = there.end()
    assert code == 0 and b"\x1b" not in there.seen


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


def test_a_full_disk_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").symlink_to("/dev/full")
    script = write(tmp_path, "for step in range(100): print('step', step, flush=True)\n")
    done = guozhuang("run", "-np", "2", "--log-dir", "logs", script, folder=tmp_path)
    assert done.returncode == 0, done
    assert done.stderr.count("No space left on device; the rank goes on") == 1 and "rank1.log: No space" in done.stderr
    assert (tmp_path / "logs" / "rank0.log").read_text().endswith("step 99\n")


def test_the_report_with_log_files_tells_when_and_what(tmp_path: Path) -> None:
    """Rank 1 raised first, though it is the last to end. What an earlier run left in the files is not told again."""
    (tmp_path / "logs").mkdir()
    old = 'Traceback (most recent call last):\n  File "old.py", line 1\nOSError: of yesterday, Connection closed by peer\n'
    for rank in range(2):
        (tmp_path / "logs" / f"rank{rank}.log").write_text(old)
    script = write(
        tmp_path,
        "from pathlib import Path\nmark = Path(os.environ['OUT'], 'raised')\nprint('step 7')\n"
        "if rank:\n"
        "    import atexit; atexit.register(lambda: (mark.touch(), time.sleep(3600)))\n"
        "    raise ValueError('boom\\n\\nmore of it')\n"
        "while not mark.exists() or 'more of it' not in Path('logs/rank1.log').read_text(): time.sleep(0.01)\n"
        "sys.exit(5)\n",
    )
    done = guozhuang("run", "-np", "2", "--log-dir", "logs", script, folder=tmp_path)
    report = done.stderr[done.stderr.index("guozhuang run: rank") :]
    assert done.returncode == 1 and report.startswith("guozhuang run: rank 1 failed first"), report
    assert report.count("Traceback") == report.count("ValueError: boom") == 1 and "yesterday" not in report
    assert "  ValueError: boom\n\n  more of it\nthe last lines of rank 1 before that:\n  step 7\nended" in report


@pytest.mark.slow
def test_torchs_own_redirection_still_works(tmp_path: Path) -> None:
    script = write(tmp_path, "print('hello', rank)\n")
    done = guozhuang("run", "-np", "2", "--log-dir", "logs", "-t", "3", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[default1]:hello 1" in done.stdout
    assert len(list((tmp_path / "logs").rglob("stdout.log"))) == 2
    script.write_text("print('hello')\nraise ValueError('boom')\n")
    done = guozhuang("run", "-np", "2", "--log-dir", "logs", "-r", "3", script, folder=tmp_path)
    assert "  Traceback (most recent call last):\n" in done.stderr and "\n  ValueError: boom\n" in done.stderr


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
        "    import atexit; atexit.register(lambda: (mark.touch(), time.sleep(3600)))\n"
        "    raise ValueError('boom')\n"
        "if rank == 0:\n"
        "    while not mark.exists(): time.sleep(0.001)\n"
        "    raise RuntimeError('Connection closed by peer [127.0.0.1]:1')\n"
        "time.sleep(3600)\n",
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
    assert run.wait(LIMIT_S) == 0, err
    assert err.count("standard output is closed") == 1
    assert len(list((tmp_path / "out").iterdir())) == 2
