"""``guozhuang run`` in a process that has torch imported already, so that a run costs tenths of a second before its ranks.

    def test_a_run(tmp_path):
        script = write(tmp_path, "print('hello')")
        done = guozhuang("run", "-np", 2, script, folder=tmp_path)
        assert (done.returncode, done.stdout) == (0, "[0] hello\\n[1] hello\\n")

The launcher is forked from the server of tests/ranks.py. Its ranks are forked too, by the warm parent of
guozhuang/launch/warm.py, as those of ``guozhuang compare`` are: a rank that imports torch by itself takes seconds of a core.
``forks_ranks=False`` has them started by ``exec``, as for a user: for tests of how processes start, and of what is read only
then. However the launcher ends, ``left()`` tells what is left of it: every process that inherited its environment, or that
works in the folder of the test.
"""

from __future__ import annotations

import atexit
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
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest
import torch

from guozhuang import compat
from guozhuang.launch import warm
from guozhuang.launch.request import environment_of_launchers
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
        forks_ranks: whether ranks that are Python programs may be forks of a process that has imported torch.
        **more: environment variables.
    """

    def __init__(
        self,
        *arguments: object,
        folder: Path,
        program: str = "guozhuang.cli:main",
        forks_ranks: bool = True,
        **more: str,
    ) -> None:
        self._folder = str(folder.resolve())
        self.mark = secrets.token_hex(8)
        (folder / "tmp").mkdir(exist_ok=True)
        self._printed = tempfile.TemporaryDirectory(prefix="launched-")
        self._outputs = [Path(self._printed.name) / name for name in ("out", "err")]
        environ = environment(**{"TMPDIR": str(folder / "tmp"), MARK: self.mark} | more)
        context = fork_server()
        words = list(map(str, arguments))
        outputs = list(map(str, self._outputs))
        self._process = context.Process(target=_main, args=(program, words, str(folder), environ, outputs, forks_ranks))
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
        """Every process that inherited the environment of this launcher, or works in its folder, but not the launcher itself.

        The kernel does not know the environment of a rank that was forked.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != self.pid and (
                    process.environ().get(MARK) == self.mark or self._is_below(process.cwd())
                ):
                    found.append(process)
        return found

    def _is_below(self, path: str) -> bool:
        return path == self._folder or path.startswith(self._folder + os.sep)

    def left(self, limit_s: float = LIMIT_S) -> list[str]:
        """What is still there after so many seconds at most."""
        return [str(process) for process in remaining(self.processes, limit_s)]

    def until(self, what: Callable[[], Answer], limit_s: float = LIMIT_S) -> Answer:
        """Wait until the answer is true, and return it; fail with what was printed if the launcher ends before that."""
        return until(what, limit_s, goes_on=lambda: self.is_running, told=lambda: self.printed)


def guozhuang(
    *arguments: object,
    folder: Path,
    timeout_s: float = LIMIT_S,
    program: str = "guozhuang.cli:main",
    forks_ranks: bool = True,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command line of guozhuang to its end, and check that no process of it is left."""
    with Launched(*arguments, folder=folder, program=program, forks_ranks=forks_ranks, **more) as launched:
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


def _main(
    program: str, arguments: list[str], folder: str, environ: dict[str, str], outputs: list[str], forks_ranks: bool
) -> None:
    for target, path in zip((1, 2), outputs, strict=True):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), target)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    if forks_ranks:
        _keep_a_warm_parent(environ)
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


def _keep_a_warm_parent(environ: dict[str, str]) -> None:
    """Fork the warm parent of this launcher; in each of its ranks, be the rank to its end."""
    # What the launcher gives each of two ranks on two cores: one thread, and the folders of the names of other systems.
    loaded_with = environment_of_launchers(1, compat.extension().python_path, environ)
    launcher: dict[str, Any] = {}
    pid = os.getpid()
    try:
        request = warm._with_warm_parent(launcher, loaded_with)
    except OSError:
        if os.getpid() == pid:
            raise
        os._exit(0)  # the warm parent, whose launcher has ended already
    if request is launcher:
        return
    torch.set_num_threads(1)
    sys.path.insert(0, "")  # gives way to the folder of the script
    sys.path += [folder for folder in loaded_with["PYTHONPATH"].split(os.pathsep) if folder not in sys.path]
    code: Any = 1
    try:  # what the interpreter does at the end of a program; here it would return into multiprocessing
        warm._run(request)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(ValueError, OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
