"""``guozhuang run`` in a process that has torch imported already, so that a run costs tenths of a second before its ranks.

    def test_a_run(tmp_path):
        script = write(tmp_path, "print('hello')")
        done = guozhuang("run", "-np", 2, script, folder=tmp_path)
        assert (done.returncode, done.stdout) == (0, "[0] hello\\n[1] hello\\n")

The launcher is forked from the server of tests/ranks.py; what it starts are real processes. However it ends, ``left()``
tells what is left of it: every process that inherited its environment.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import runpy
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest

from tests.forking import fork_server
from tests.waiting import LIMIT_S, Answer, remaining, until

MARK = "GUOZHUANG_TEST_RUN"
HOROVODRUN = "guozhuang.compat.horovod.runner.launch:run_commandline"
BPSLAUNCH = "guozhuang.compat.byteps.bpslaunch:main"
# Prefixes of variables by which a launcher, a scheduler, an outer run or a terminal would tell something to what a test starts.
_TOLD = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_", "PET_", "TORCHELASTIC", "GUOZHUANG", "HOROVOD"),
    *(
        "DMLC_",
        "BYTEPS_",
        "NVIDIA_VISIBLE_DEVICES",
        "SLURM",
        "OMPI_",
        "PMI",
        "GLOO_",
        "NCCL_",
        "TP_",
        "PWD",
        "COLUMNS",
        "LINES",
    ),
)
ROOT = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    """The variables of this process, but for what it was told as a rank or by a terminal; this tree is on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_TOLD)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path} | more


def python(
    *arguments: object, folder: Path | None = None, timeout_s: float = LIMIT_S, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run Python as a new program to its end, in ``environment(**more)``."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, env=environment(**more), capture_output=True, text=True,
        timeout=timeout_s,
    )  # fmt: skip


class Launched:
    """A command line of guozhuang that runs. Leaving the ``with`` block kills whatever is left of it.

    Args:
        *arguments: after ``guozhuang``.
        folder: where it runs, and where its temporary files go (``folder/tmp``).
        program: what takes the arguments, as module:function; ``HOROVODRUN`` for that command.
        **more: environment variables.
    """

    def __init__(self, *arguments: object, folder: Path, program: str = "guozhuang.cli:main", **more: str) -> None:
        self.mark = secrets.token_hex(8)
        (folder / "tmp").mkdir(exist_ok=True)
        self._printed = tempfile.TemporaryDirectory(prefix="launched-")
        self._outputs = [Path(self._printed.name) / name for name in ("out", "err")]
        environ = environment(**{"TMPDIR": str(folder / "tmp"), MARK: self.mark} | more)
        context = fork_server()
        words = list(map(str, arguments))
        outputs = list(map(str, self._outputs))
        self._process = context.Process(target=_main, args=(program, words, str(folder), environ, outputs))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in [*self.processes(), psutil.Process(self.pid)] if self.is_running else self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.join(LIMIT_S)
        self._process.close()
        self._printed.cleanup()

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    @property
    def printed(self) -> str:
        """Both streams so far."""
        return "".join(path.read_text(errors="replace") for path in self._outputs if path.exists())

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Wait for the launcher itself; the exit code is negative for a signal."""
        self._process.join(timeout_s)
        assert not self._process.is_alive(), f"it runs after {timeout_s:g} s; it printed:\n{self.printed}"
        out, err = (path.read_text(errors="replace") for path in self._outputs)
        return subprocess.CompletedProcess([], self._process.exitcode or 0, out, err)

    def processes(self) -> list[psutil.Process]:
        """Every process that inherited the environment of this launcher, but not the launcher itself."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != self.pid and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def left(self, limit_s: float = LIMIT_S) -> list[str]:
        """What is still there after so many seconds at most."""
        return [str(process) for process in remaining(self.processes, limit_s)]

    def until(self, what: Callable[[], Answer], limit_s: float = LIMIT_S) -> Answer:
        """Wait until the answer is true, and return it; fail with what was printed if the launcher ends before that."""
        return until(what, limit_s, goes_on=lambda: self.is_running, told=lambda: self.printed)


def guozhuang(
    *arguments: object, folder: Path, timeout_s: float = LIMIT_S, program: str = "guozhuang.cli:main", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command line of guozhuang to its end, and check that no process of it is left."""
    with Launched(*arguments, folder=folder, program=program, **more) as launched:
        done = launched.wait(timeout_s)
        assert not launched.left(), (launched.left(), done)
        return done


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip tests whose scripts import a library that is not there. It is not imported here: that takes seconds."""
    missing = [each for each in libraries if importlib.util.find_spec(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    """A script in the folder."""
    path = folder / name
    path.write_text(text)
    return path


def run_script(arguments: list[str]) -> None:
    """Be a script that nobody launched, in the process of a ``Launched`` whose program this is."""
    runpy.run_path(arguments[0], run_name="__main__")


def _main(program: str, arguments: list[str], folder: str, environ: dict[str, str], outputs: list[str]) -> None:
    for target, path in zip((1, 2), outputs, strict=True):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), target)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["guozhuang", *arguments]
    module, _, function = program.partition(":")

    code: Any = 1
    try:
        code = getattr(importlib.import_module(module), function)(arguments)
    except SystemExit as error:
        code = error.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(code)
