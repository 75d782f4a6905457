"""However a run ends, no process of it is left: neither a rank, nor what a rank started, nor what that started."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.launching import Launched
from tests.waiting import LIMIT_S, NEVER_S, until

pytestmark = pytest.mark.waits

# Starts a child, a child in a session of its own that ignores SIGTERM, and a daemon in the old way (two forks); says who
# they are; then does what it was asked.
SCRIPT = """
import json, os, signal, subprocess, sys, time
rank = os.environ["RANK"]
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
child = subprocess.Popen([sys.executable, "-S", "-c", sleep])
far = subprocess.Popen([sys.executable, "-S", "-c", sleep], start_new_session=True)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode())
        time.sleep(3600)
    os._exit(0)
pids = {"rank": os.getpid(), "child": child.pid, "far": far.pid, "daemon": int(os.read(read, 32))}
path = os.path.join(os.environ["OUT"], rank)
with open(path + ".new", "w") as file:
    json.dump(pids, file)
os.rename(path + ".new", path)
while not os.path.exists(os.path.join(os.environ["OUT"], "go")):
    time.sleep(0.02)
for what in sys.argv[1:]:
    if what == "deaf":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: open(os.path.join(os.environ["OUT"], f"heard{rank}"), "w").close())
    elif what == "sleep":
        open(os.path.join(os.environ["OUT"], f"asleep{rank}"), "w").close()
        time.sleep(3600)
    elif what == f"raise{rank}":
        raise ValueError("boom")
"""


class Started:
    """A launcher and all processes that came of it."""

    def __init__(self, folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> None:
        (folder / "out").mkdir()
        (folder / "train.py").write_text(SCRIPT)
        self.folder = folder
        launched = Launched(
            "run", "-np", 2, *options, "train.py", *arguments, folder=folder, forks_ranks=False, OUT=str(folder / "out")
        )
        self.launcher = launched
        launched.until(lambda: len(list((folder / "out").glob("[01]"))) == 2)
        self.pids = [json.loads((folder / "out" / rank).read_text()) for rank in "01"]
        self.all = [psutil.Process(pid) for pids in self.pids for pid in pids.values()]
        self.all += psutil.Process(self.launcher.pid).children(recursive=True)
        (folder / "out" / "go").touch()
        launched.until(lambda: "sleep" not in arguments or len(list((folder / "out").glob("asleep*"))) == 2)

    def wait(self) -> tuple[int, str]:
        done = self.launcher.wait()
        return done.returncode, done.stdout + done.stderr

    def left(self) -> list[str]:
        _, alive = psutil.wait_procs(self.all, timeout=LIMIT_S)
        return [f"{process}" for process in alive]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    made: list[Started] = []

    def begin(*arguments: str, **options: tuple[str, ...]) -> Started:
        made.append(Started(tmp_path, *arguments, **options))
        return made[-1]

    yield begin
    for each in made:
        for process in each.all:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        each.launcher.__exit__(None, None, None)


def temporary(folder: Path) -> list[Path]:
    return list((folder / "tmp").iterdir())


def test_a_killed_launcher_leaves_nothing(start: Callable[..., Started], tmp_path: Path) -> None:
    run = start("deaf", "sleep")
    run.launcher.send(signal.SIGKILL)
    assert not run.left()
    run.wait()
    until(lambda: not temporary(tmp_path), told=lambda: "the guard removes the temporary folder")


@pytest.mark.slow
def test_ranks_end_with_the_launcher_even_without_the_guard(start: Callable[..., Started]) -> None:
    run = start("sleep")
    guards = [p for p in psutil.process_iter(["cmdline"]) if str(run.launcher.pid) in (p.info["cmdline"] or [])]
    guards = [p for p in guards if any("guard.py" in word for word in p.info["cmdline"])]
    assert len(guards) == 1
    guards[0].kill()
    run.launcher.send(signal.SIGKILL)
    ranks = [pids["rank"] for pids in run.pids]
    _, alive = psutil.wait_procs([process for process in run.all if process.pid in ranks], LIMIT_S)
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_everything(start: Callable[..., Started], tmp_path: Path, number: signal.Signals) -> None:
    run = start("sleep")
    run.launcher.send(number)
    code, out = run.wait()
    assert code == 128 + number, out
    assert f"got {number.name}; the ranks of this node were ended" in out
    assert not run.left()
    assert not temporary(tmp_path)


@pytest.mark.slow
def test_ranks_that_do_not_listen_are_killed_in_the_end(start: Callable[..., Started]) -> None:
    run = start("deaf", "sleep", options=("--shutdown-timeout", "1"))
    run.launcher.send(signal.SIGTERM)
    assert run.wait()[0] == 128 + signal.SIGTERM
    assert not run.left()


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait(start: Callable[..., Started]) -> None:
    run = start("deaf", "sleep", options=("--shutdown-timeout", f"{NEVER_S:.0f}"))
    run.launcher.send(signal.SIGINT)
    run.launcher.until(lambda: len(list((run.folder / "out").glob("heard*"))) == 2)
    run.launcher.send(signal.SIGINT)
    assert run.wait()[0] == 130
    assert not run.left()


@pytest.mark.parametrize(("what", "code"), [("nothing", 0), ("raise1", 1)])
def test_what_ranks_started_ends_with_them(start: Callable[..., Started], tmp_path: Path, what: str, code: int) -> None:
    run = start(what)
    ended, out = run.wait()
    assert ended == code, out
    assert not run.left()
    assert not temporary(tmp_path)
