"""Ranks that a warm parent forks: they see, print and end as ranks that are started by ``exec``, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from guozhuang.launch import crew as crews
from guozhuang.launch import guard
from guozhuang.launch.crew import Crew, entry
from guozhuang.launch.warm import ForkedRank, NotWarmError, WarmParent
from tests import launching
from tests.waiting import LIMIT_S, until

FACTS = """
import json, os, signal, sys, time
import beside
main = sys.modules["__main__"]
found = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags), "cwd": os.getcwd(),
    "main": sorted(set(vars(main)) - {"pickle"}), "file": __file__, "spec": __spec__ and __spec__.name, "package": __package__,
    "environ": dict(os.environ), "parent": os.getppid(), "leads": os.getpid() == os.getpgid(0) == os.getsid(0),
    "streams": [(str(s), s.encoding, s.errors, s.line_buffering, s.write_through, s.newlines) for s in
                (sys.stdin, sys.stdout, sys.stderr)], "same": sys.stdout is sys.__stdout__,
    "signals": [str(signal.getsignal(n)) for n in range(1, 32)], "mask": sorted(signal.pthread_sigmask(0, [])),
    "files": sorted(os.listdir("/proc/self/fd"))[:3], "umask": os.umask(0o22), "input": sys.stdin.readline(),
    "threads": len(os.listdir("/proc/self/task")), "beside": beside.__file__,
}
print(json.dumps(found))
print("an error", file=sys.stderr)
"""
ENDS = {
    "code": ("sys.exit(7)", 7),
    "message": ("sys.exit('no data')", 1),
    "error": ("def f():\n    1 / 0\nf()", 1),
    "own hook": ("sys.excepthook = lambda *a: print('hook', a[0], a[2].tb_frame.f_code.co_name)\n1 / 0", 1),
    "syntax": ("def", 1),
    "interrupt": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(600)", -signal.SIGINT),
    "signal": ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    "pipe": ("import subprocess\nprint(subprocess.run(['sh', '-c', 'kill -PIPE $$']).returncode)", 0),
    "at exit": ("import atexit\natexit.register(print, 'last')\nprint('first')", 0),
    "spawned": (
        "import multiprocessing\ndef f(): print('in', __name__, flush=True)\nif __name__ == '__main__':\n"
        "    p = multiprocessing.get_context('spawn').Process(target=f); p.start(); p.join(); print(p.exitcode)",
        0,
    ),
}
PROGRAM = "tests.processes.test_warm_parent:main"


class Ranks:
    """Starts ranks on a crew, one after the other, and waits for their ends."""

    def __init__(self, crew: Crew, folder: Path) -> None:
        self.crew, self.folder, self.num_started = crew, folder, 0

    def start(self, *words: str, **more: str) -> int:
        self.num_started += 1
        environ = os.environ | {guard.VARIABLE: self.crew.run, "RANK": "3", "OMP_NUM_THREADS": "2"} | more
        outputs = [str(self.folder / f"{name}{self.num_started}") for name in ("out", "err")]
        self.crew.start(3, [*entry(), sys.executable, "-u", *words], environ, *outputs)
        return self.crew.pid(3)

    def end(self) -> tuple[int, str, str]:
        ended = until(lambda: self.crew.wait(LIMIT_S))
        return ended[3], *((self.folder / f"{name}{self.num_started}").read_text() for name in ("out", "err"))

    @property
    def is_forked(self) -> bool:
        return isinstance(self.crew._processes[3], ForkedRank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("scripts")
    (found / "beside.py").write_text("")
    (found / "package").mkdir()
    (found / "package" / "__init__.py").write_text("")
    head = "import os, signal, sys, time\n"
    for name, (text, _) in ENDS.items():
        (found / f"ends_{name}.py").write_text(head + text)
    for path in (found / "facts.py", found / "package" / "inner.py"):
        path.write_text(FACTS)
    return found


@pytest.fixture(scope="module")
def both(folder: Path) -> Iterator[tuple[Ranks, Ranks]]:
    """A crew that starts ranks by ``exec``, and one with a warm parent that is ready."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crews, "WARM_AFTER_S", 0.0)
        patch.chdir(folder)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        with open(folder / "input", "w+") as file:
            file.write("a line\n")
        for name in ("cold", "forked"):
            (folder / name).mkdir()
        before, descriptor = os.dup(0), os.open(folder / "input", os.O_RDONLY)
        os.dup2(descriptor, 0)
        os.close(descriptor)
        ranks = [Ranks(Crew(str(folder / "none")), folder / name) for name in ("cold", "forked")]
        try:
            warm(ranks[1])
            yield ranks[0], ranks[1]
        finally:
            for each in ranks:
                each.crew.close()
                assert not guard.belonging(each.crew.run, each.crew.sessions)
            os.dup2(before, 0)
            os.close(before)


def warm(ranks: Ranks) -> None:
    """Have a warm parent start, and wait until it is ready."""
    ranks.crew.keep_warm([sys.executable, "-u", "facts.py"])
    ranks.start("-m", "this")
    done = ranks.end()  # Crew.wait, which it calls, starts the warm parent
    assert done[0] == 0, done
    assert ranks.crew.warm is not None
    ranks.crew.warm.wait(LIMIT_S)


def ended(ranks: Ranks, is_forked: bool, *words: str, **more: str) -> tuple[int, str, str]:
    os.lseek(0, 0, os.SEEK_SET)
    ranks.start(*words, **more)
    assert ranks.is_forked == is_forked
    return ranks.end()


@pytest.mark.parametrize(
    "words", [("facts.py", "a", "-b"), ("./facts.py",), ("-m", "package.inner", "x"), ("-m", "facts")]
)
def test_a_forked_rank_sees_what_any_other_sees(
    both: tuple[Ranks, Ranks], folder: Path, words: tuple[str, ...]
) -> None:
    cold, forked = both
    code, out, err = ended(cold, False, *words, MORE="ä\udcff")
    assert code == 0, err
    expected = json.loads(out)
    code, out, again = ended(forked, True, *words, MORE="ä\udcff")
    assert code == 0, again
    found = json.loads(out)
    for facts, ranks in ((expected, cold), (found, forked)):
        assert facts["environ"].pop(guard.VARIABLE) == ranks.crew.run
        assert facts["parent"] == os.getpid() and facts["leads"] and facts["input"] == "a line\n"
    assert found == expected
    assert again == err == "an error\n"


@pytest.mark.parametrize("name", ENDS)
def test_a_forked_rank_ends_as_any_other(both: tuple[Ranks, Ranks], name: str) -> None:
    cold, forked = both
    expected = ended(cold, False, f"ends_{name}.py")
    assert expected[0] == ENDS[name][1], expected
    assert ended(forked, True, f"ends_{name}.py") == expected


def test_a_module_that_is_missing_is_reported_as_by_python(both: tuple[Ranks, Ranks]) -> None:
    cold, forked = both
    expected = ended(cold, False, "-m", "no_such_module")
    assert "No module named no_such_module" in expected[2]
    assert ended(forked, True, "-m", "no_such_module") == expected


def test_forked_ranks_draw_different_random_numbers(both: tuple[Ranks, Ranks], folder: Path) -> None:
    text = "import numpy, random, torch\nprint(numpy.random.rand(), random.random(), torch.initial_seed())"
    (folder / "random_numbers.py").write_text(text)
    one, two = (ended(both[1], True, "random_numbers.py")[1].split() for _ in range(2))
    assert one[0] != two[0] and one[1] != two[1] and one[2] == two[2]


def test_torch_computes_on_several_threads_in_a_forked_rank(both: tuple[Ranks, Ranks], folder: Path) -> None:
    (folder / "threads.py").write_text(
        "import torch\na = torch.ones(600, 600, requires_grad=True)\nfor _ in range(3): (a @ a).sum().backward()\n"
        "import numpy\nb = numpy.ones((600, 600)) @ numpy.ones((600, 600))\n"
        "print(torch.get_num_threads(), float(a.grad[0, 0]), b[0, 0])"
    )
    assert ended(both[1], True, "threads.py")[:2] == (0, "2 3600.0 600.0\n")


def test_a_variable_that_is_read_on_loading_is_obeyed(both: tuple[Ranks, Ranks], folder: Path) -> None:
    (folder / "threads_of.py").write_text("import torch\nprint(torch.get_num_threads())")
    assert ended(both[1], False, "threads_of.py", OMP_NUM_THREADS="1")[:2] == (0, "1\n")


@pytest.mark.slow
def test_a_rank_outlives_the_warm_parent_and_others_start_without_it(tmp_path: Path, folder: Path) -> None:
    go_on = tmp_path / "go on"
    (folder / "waits.py").write_text(
        f"import os, sys, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\nsys.exit(5)"
    )
    ranks = Ranks(Crew(str(folder / "none")), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crews, "WARM_AFTER_S", 0.0)
        patch.chdir(folder)
        try:
            warm(ranks)
            ranks.start("waits.py")
            assert ranks.is_forked and ranks.crew.warm is not None
            parent = psutil.Process(ranks.crew.warm.pid)
            parent.kill()
            until(lambda: not parent.is_running() or parent.status() == psutil.STATUS_ZOMBIE)
            go_on.touch()
            assert ranks.end()[0] == 5
            assert ended(ranks, False, "ends_code.py")[0] == 7
            assert ended(ranks, False, "ends_code.py")[0] == 7
        finally:
            ranks.crew.close()


def test_no_rank_is_forked_where_an_import_leaves_a_thread(tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    (tmp_path / "train.py").touch()
    words = [sys.executable, "-u", str(tmp_path / "train.py")]
    parent = WarmParent.start(words, os.environ, ["no_such_module", "starts_a_thread"])
    try:
        with pytest.raises(NotWarmError, match="2 threads run after the imports"):
            parent.wait(LIMIT_S)
    finally:
        parent.close()


@pytest.mark.slow
def test_a_killed_agent_leaves_neither_the_warm_parent_nor_a_forked_rank(tmp_path: Path, folder: Path) -> None:
    program = tmp_path / "agent.py"
    (folder / "sleeps.py").write_text("import time\ntime.sleep(600)")
    program.write_text(
        "import sys, time\nfrom pathlib import Path\nfrom guozhuang.launch import crew as crews\n"
        "from tests.processes.test_warm_parent import Crew, Ranks, warm\ncrews.WARM_AFTER_S = 0.0\n"
        f"ranks = Ranks(Crew({str(tmp_path / 'none')!r}), Path({str(tmp_path)!r}))\n"
        "warm(ranks)\npid = ranks.start('sleeps.py')\nassert ranks.is_forked\n"
        "print(pid, ranks.crew.warm.pid, flush=True)\ntime.sleep(600)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    agent = subprocess.Popen(
        [sys.executable, str(program)],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert agent.stdout is not None
    try:
        processes = [psutil.Process(int(pid)) for pid in agent.stdout.readline().split()]
        assert len(processes) == 2
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert not alive


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--on-failure", "keep-survivors")])
def test_a_rank_that_is_started_again_is_forked(tmp_path: Path, option: tuple[str, ...]) -> None:
    """Rank 1, and where all are started anew each rank, fails until it is a fork; the output has its mark in front as ever."""
    script = launching.write(
        tmp_path,
        "import os, sys, time\n"
        "is_forked = 'warm.py' in open('/proc/self/cmdline').read()\n"
        "print('forked' if is_forked else 'not forked')\n"
        "if not is_forked and os.environ['RANK'] in sys.argv[1:]:\n"
        "    sys.exit(3)\n",
    )
    done = launching.guozhuang(
        "run",
        "-np",
        2,
        "--max-restarts",
        1_000_000,
        *option,
        script,
        *(("1",) if option else ("0", "1")),
        folder=tmp_path,
        program=PROGRAM,
        forks_ranks=False,
    )
    assert done.returncode == 0 and "[1] forked\n" in done.stdout, done
    assert ("[0] forked\n" in done.stdout) == (not option), done


@pytest.mark.parametrize(
    "options",
    [
        ("--max-restarts", 1),
        pytest.param(("--max-restarts", 1, "--no-warm"), marks=pytest.mark.slow),
        pytest.param(("--max-restarts", 0), marks=pytest.mark.slow),
    ],
)
def test_a_warm_parent_is_kept_only_for_restarts(tmp_path: Path, options: tuple[object, ...]) -> None:
    script = launching.write(
        tmp_path,
        "import os, psutil, sys, time\n"
        "agent, limit = psutil.Process(os.getppid()), time.monotonic() + float(sys.argv[1])\n"
        "def is_there(): return any('warm.py' in ' '.join(p.cmdline()) for p in agent.children())\n"
        "while not is_there() and time.monotonic() < limit: time.sleep(0.01)\n"
        "print(is_there())\n",
    )
    is_kept = options == ("--max-restarts", 1)
    done = launching.guozhuang(
        "run", *options, script, LIMIT_S if is_kept else 1, folder=tmp_path, program=PROGRAM, forks_ranks=False
    )
    assert (done.returncode, done.stdout) == (0, f"{is_kept}\n"), done


def main(arguments: list[str]) -> int:
    """Run the command line, with a warm parent that starts at once."""
    from guozhuang import cli

    crews.WARM_AFTER_S = 0.0
    return cli.main(arguments)
