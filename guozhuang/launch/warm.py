"""A warm parent: a process that has imported torch, from which a rank is forked in hundredths of a second.

[Note: warm parent] A rank that is started by ``exec`` imports torch and the package for seconds before its script begins. The
warm parent does that once; then it forks a rank at each request. A forked rank must not differ from an ordinary one:
1. The agent must be its parent, because the agent reads its exit code and the kernel kills it at the agent's death (see
   [Note: no orphans] in guard.py), and because it must outlive the warm parent. So the warm parent forks a process that forks
   the rank and ends at once. During the request the agent is the reaper of its orphaned descendants, so it becomes the parent
   of the rank. The rank waits for that, reports its process id, and begins when the agent confirms. If the agent has stopped
   waiting by then, the rank ends without having run anything. An orphan of another rank that the agent adopts in these
   milliseconds is a zombie after its end, until the agent ends.
2. Some variables are read only when a program or library is loaded (``READ_ON_LOADING``). If the new rank's differ from those
   that the warm parent was started with, the rank is started by ``exec``. The same holds for a command that runs no Python
   file or module, and whenever the warm parent is not ready, has ended or does not answer.
3. No thread survives a fork. The warm parent therefore has one thread and runs no parallel region of OpenMP. The threads that
   OpenBLAS starts when numpy is imported end at the first fork, and start again when they are needed; so the warm parent
   forks once before it counts its threads, and ends if there is more than one, or if an import has initialized CUDA.
4. A launcher that is forked by a warm parent gets a warm parent of its own, forked from it before it does anything else. So
   the launcher's ranks are forks too, and its children. That is how ``guozhuang compare`` starts its runs.
5. What differs: the command line that ``ps`` shows; a variable such as OMP_NUM_THREADS that a script sets before it imports
   torch comes too late; and ranks share the memory of what was imported.

    python -u warm.py SOCKET COMMAND ...

COMMAND is that of the ranks: ``-m MODULE ARGUMENTS`` or ``SCRIPT ARGUMENTS``. Standard input holds a list of further modules to
import, as JSON. The warm parent ends when the agent's end of the socket is closed.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Prefixes of variables that Python, the C library or numerical libraries read once, when they are loaded.
READ_ON_LOADING = (
    "PYTHON", "LD_", "GLIBC_", "MALLOC_", "LANG", "LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NPY_", "ATEN_", "DNNL_",
    "ONEDNN_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_",
)  # fmt: skip
_LIMIT_S = 5.0  # seconds that a forked rank may take to report its process id; then the rank is started by exec
_POLL_S = 0.001
_READY = b"ready"


# The warm parent that serves this process, if this process is a launcher that another warm parent forked; else None.
inherited: WarmParent | None = None


class NotWarmError(Exception):
    """Raised when no warm parent can fork a rank, so that it must be started by ``exec``; the text is the reason."""


class ForkedRank:
    """A rank that a warm parent forked, now a child of this process; has those methods of ``Popen`` that ``Crew`` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code of the rank, negative for a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        """Send the rank SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the rank has ended."""
        if self._code is None:
            os.waitpid(self.pid, 0)


class WarmParent:
    """The agent's handle of its warm parent.

    Args:
        process: the warm parent, a child of this process.
        channel: the socket to the warm parent.
        environ: the environment variables that the warm parent was started with.
    """

    def __init__(
        self, process: subprocess.Popen[bytes] | ForkedRank, channel: socket.socket, environ: Mapping[str, str]
    ) -> None:
        self._process, self._channel, self._environ = process, channel, environ
        self._is_ready = False

    @classmethod
    def start(cls, words: Sequence[str], environ: Mapping[str, str], modules: Sequence[str] = ()) -> WarmParent:
        """Start a process that imports torch and then forks ranks on request; return without waiting for its imports.

        Args:
            words: the command of a rank (``[sys.executable, "-u", ...]``).
            environ: the environment variables that all ranks share.
            modules: names of modules to import besides torch and this package; those that cannot be imported are left out.

        Raises:
            NotWarmError: no rank with this command can be forked.
        """
        arguments = arguments_of(words)
        channel, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.write(json.dumps(list(modules)).encode())
            file.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno()), *arguments],
                env=dict(environ), pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        return cls(process, channel, dict(environ))

    @property
    def pid(self) -> int:
        """Return the process id of the warm parent."""
        return self._process.pid

    def wait(self, limit_s: float) -> None:
        """Wait until the warm parent is ready, at most ``limit_s`` seconds.

        Raises:
            NotWarmError: the warm parent is not ready by then.
        """
        if self._is_ready:
            return
        try:
            self._channel.settimeout(limit_s)
            answer = self._channel.recv(4096)
        except (BlockingIOError, TimeoutError):
            raise NotWarmError("the warm parent is still importing") from None
        except OSError as error:
            raise NotWarmError(f"the warm parent has ended: {error}") from error
        self._channel.settimeout(_LIMIT_S)
        if answer != _READY:
            raise NotWarmError(f"the warm parent has ended: {answer.decode(errors='replace') or 'it was killed'}")
        self._is_ready = True

    def fork(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        files: Sequence[int],
        is_launcher: bool = False,
    ) -> ForkedRank:
        """Have the warm parent fork a rank, or a launcher.

        Args:
            words: the command of the rank or launcher.
            environ: the complete environment of the new process.
            files: descriptors for its standard input, output and error.
            is_launcher: whether the process is a launcher, which gets a warm parent of its own.

        Raises:
            NotWarmError: the rank must be started by ``exec``; no process of it is left.
        """
        arguments = arguments_of(words)
        check_variables(self._environ, environ)
        self.wait(0.0)
        try:
            request = {"arguments": arguments, "words": list(words), "environ": dict(environ), "cwd": os.getcwd()}
            more = {"agent": os.getpid(), "is_launcher": is_launcher}
            return self._ask(json.dumps(request | more), files)
        except OSError as error:
            self.close()
            raise NotWarmError(f"the warm parent did not fork: {error}") from error

    def _ask(self, request: str, files: Sequence[int]) -> ForkedRank:
        ours, theirs = socket.socketpair()
        with ours, tempfile.TemporaryFile() as file:
            ours.settimeout(_LIMIT_S)
            file.write(request.encode())
            file.seek(0)
            with theirs, _reaper_of_orphans():
                socket.send_fds(self._channel, [b"fork"], [*files, file.fileno(), theirs.fileno()])
                theirs.close()  # so that ``recv`` ends if no process is left that could report
                reply = ours.recv(64)
            if not reply:
                raise OSError("no rank reported")
            rank = ForkedRank(int(reply))
            ours.send(b"begin")
        return rank

    def close(self) -> None:
        """Kill the warm parent. The ranks that it forked continue."""
        self._is_ready = False
        self._channel.close()
        self._process.kill()
        self._process.wait()


def arguments_of(words: Sequence[str]) -> list[str]:
    """Return the arguments of a rank's command after ``python -u``: ``["-m", "module", ...]`` or ``["train.py", ...]``.

    Raises:
        NotWarmError: the command is not that of a Python file or module, or has other options of the interpreter.
    """
    if sys.platform != "linux":
        raise NotWarmError("only Linux lets a process adopt the child of another")
    if list(words[:2]) != [sys.executable, "-u"] or len(words) < 3:
        raise NotWarmError("the command is not that of a Python program with this interpreter")
    if words[2] == "-m" and len(words) > 3:
        return list(words[2:])
    if words[2].startswith("-") or words[2].endswith(".pyc") or not os.path.isfile(words[2]):
        raise NotWarmError(f"{words[2]} is not a file of Python source")
    return list(words[2:])


def check_variables(loaded_with: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Check that a warm parent that was started with some environment variables may fork a rank with others.

    Args:
        loaded_with: the variables that the warm parent was started with.
        environ: the variables of the rank.

    Raises:
        NotWarmError: a variable that is read on loading differs.
    """
    for name in sorted(loaded_with.keys() | environ.keys()):
        is_read = name.startswith(READ_ON_LOADING) and not name.startswith("TORCH_NCCL_")
        if is_read and loaded_with.get(name) != environ.get(name):
            raise NotWarmError(f"the warm parent was started with another {name}, which is read on loading only")


@contextlib.contextmanager
def _reaper_of_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose parent ends inside the ``with`` block."""
    from guozhuang.watch.processes import SET_CHILD_SUBREAPER, prctl

    prctl(SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(SET_CHILD_SUBREAPER, 0)


# Functions that run in the warm parent.


def _serve(channel: socket.socket, loaded_with: Mapping[str, str]) -> dict[str, Any]:
    """Fork a rank at each request. Return in each rank, with its request; the warm parent itself ends here.

    Args:
        channel: the socket to the agent.
        loaded_with: the environment variables at the start of this program.
    """
    while True:
        try:
            message, files, _, _ = socket.recv_fds(channel, 16, 5)
        except OSError:
            message = b""
        if not message:
            os._exit(0)  # the agent has closed the socket, or has ended: no request will follow
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            try:
                channel.close()
                request = _begin(files)
            except BaseException:
                os._exit(1)  # the agent notices that the request's socket is closed, and starts the rank by exec
            return _with_warm_parent(request, loaded_with) if request["is_launcher"] else request
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def _begin(files: Sequence[int]) -> dict[str, Any]:
    """Give this forked process the session, streams, folder and environment of the rank; return the request for that rank."""
    from guozhuang.launch import rank

    parent = os.getppid()
    with os.fdopen(files[3], "rb") as file:
        request: dict[str, Any] = json.load(file)
    os.setsid()
    for target, source in enumerate(files[:3]):
        os.dup2(source, target)
        os.close(source)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    while os.getppid() == parent and parent != request["agent"]:
        time.sleep(_POLL_S)  # wait until the process that forked this one ends, and the agent adopts this one
    if not rank.begin(request["agent"]):
        os._exit(1)
    with socket.socket(fileno=files[4]) as agent:
        agent.send(str(os.getpid()).encode())
        if not agent.recv(16):
            os._exit(1)
    return request


def _with_warm_parent(launcher: dict[str, Any], loaded_with: Mapping[str, str]) -> dict[str, Any]:
    """Fork the warm parent of this launcher. Return in the launcher and, later, in each of its ranks, with their request."""
    from guozhuang.launch import warm  # the launcher will import this copy; the running copy is named ``__main__``

    channel, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        channel.close()
        os.setsid()
        theirs.send(_READY)
        return _serve(theirs, loaded_with)
    theirs.close()
    warm.inherited = warm.WarmParent(warm.ForkedRank(pid), channel, loaded_with)
    return launcher


def _run(request: Mapping[str, Any]) -> None:
    """Run the script of a rank as ``__main__``, as the interpreter does after its start."""
    arguments = request["arguments"]
    _find_modules_as(arguments)
    sys.orig_argv[:] = request["words"]
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _open_stream(descriptor, name)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # otherwise all forked ranks would draw the same random numbers
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    try:
        if arguments[0] == "-m":
            sys.argv[:] = ["-m", *arguments[2:]]
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # what ``python -m`` calls
            return
        sys.argv[:] = arguments
        path = main.__dict__["__file__"] = os.path.join(os.getcwd(), arguments[0])
        main.__dict__["__cached__"] = None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
        exec(code, main.__dict__)
    except BaseException as error:
        # Python prints the error and ends as after any script; the hook only removes the calls in this file from the traceback.
        hook, trace = sys.excepthook, error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook = lambda kind, error, _: hook(kind, error.with_traceback(trace), trace)
        raise


def _find_modules_as(arguments: Sequence[str]) -> None:
    """Set ``sys.path[0]``, the first folder in which modules are searched, as ``python`` does for these arguments."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if arguments[0] == "-m" else os.path.dirname(os.path.realpath(arguments[0]))


def _open_stream(descriptor: int, name: str) -> io.TextIOWrapper:
    """Open a standard stream as ``python -u`` does; the stream object of the warm parent has cached facts of another file."""
    mode, before = "r" if descriptor == 0 else "w", getattr(sys, name)
    raw: Any = io.FileIO(descriptor, mode, closefd=False)
    raw.name = f"<{name}>"
    buffer, newline = (io.BufferedReader(raw), None) if descriptor == 0 else (raw, "\n")
    stream: Any = io.TextIOWrapper(buffer, before.encoding, before.errors, newline, write_through=True)
    stream.mode = mode
    return stream  # type: ignore[no-any-return]


def _import(modules: Sequence[str]) -> str:
    """Import torch, which ranks need, and these modules; return why no rank can be forked afterwards; "" if one can."""
    try:
        import torch

        import guozhuang.launch.rank  # noqa: F401
        from guozhuang.watch.processes import open_descriptors, path_of
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # the first optimizer imports 800 modules
    between = os.fork()
    if between == 0:
        os._exit(0)
    os.waitpid(between, 0)
    num_threads = len(os.listdir(path_of("task")))
    if num_threads != 1:
        return f"{num_threads} threads run after the imports"
    uses_driver = any(target.startswith("/dev/nvidia") for target in open_descriptors().values())
    return "CUDA is initialized after the imports" if uses_driver or torch.cuda.is_initialized() else ""


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Import modules, report to the agent, and serve its requests; return in each forked rank, with its request."""
    channel, words, loaded_with = socket.socket(fileno=int(arguments[0])), arguments[1:], dict(os.environ)
    _find_modules_as(words)
    why_not = _import(json.load(sys.stdin))
    channel.send(why_not.encode() or _READY)
    if why_not:
        sys.exit(1)
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a rank would copy all pages of the objects that exist now
    return _serve(channel, loaded_with)


if __name__ == "__main__":
    _run(main(sys.argv[1:]))
