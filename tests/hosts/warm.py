"""A host on which Python starts at once: a stand-in for its interpreter that has PyTorch imported already.

    with Warm(tmp_path) as warm:
        monkeypatch.setattr(sys, "executable", warm.python)     # what the launcher asks hosts for
        cli.main(["run", "--ssh-config", ..., "-H", "a0:1,a1:1", "script.py"])

ssh, the supervisor, the agent's code, its guard and its ranks are the real ones, and the tree of processes is the same. Only
supervisor and agent are forked from a process that has imported what they import, which would take them seconds each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.forking import fork_server
from tests.waiting import LIMIT_S, NEVER_S, until

_AGENT = "guozhuang.launch.hosts.node"
# The stand-in: hands its streams and arguments to the server, and ends as the process there does.
_CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
told = {{"argv": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(server, [json.dumps(told).encode() + b"\\n"], [0, 1, 2])
code = server.recv(1)
os._exit(code[0] if code else 137)
"""


class Warm:
    """The process that is forked, and the stand-in that asks it to. ``python`` is the path of the stand-in."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "warm")
        self.python = str(folder / "python")
        Path(self.python).write_text(_CLIENT.format(python=sys.executable, path=self._path))
        os.chmod(self.python, 0o755)

    def __enter__(self) -> Warm:
        context = fork_server()
        self._process = context.Process(target=_serve, args=(self._path,), daemon=True)
        self._process.start()
        until(lambda: os.path.exists(self._path), goes_on=self._process.is_alive)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


class Launcher:
    """``guozhuang run`` in a process of its own, which has imported all it needs.

    Args:
        python: what hosts are asked for as their interpreter.
        folder: the working directory.
        environment: all variables.
        arguments: after ``guozhuang run``.
        lost_after_s: when hosts miss the launcher.
    """

    def __init__(
        self, python: str, folder: Path, environment: dict[str, str], *arguments: str, lost_after_s: float = NEVER_S
    ) -> None:
        context = fork_server()
        self._said = folder.parent / "said"
        told = (python, str(folder), environment, arguments, str(self._said), lost_after_s)
        self._process = context.Process(target=_launch, args=told, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def ended(self) -> bool:
        """Whether it has."""
        return self._process.exitcode is not None

    def result(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Its exit code and all it wrote."""
        self._process.join(limit_s)
        assert self._process.exitcode is not None, f"the launcher does not end: {self._said.read_text()}"
        return self._process.exitcode, self._said.read_text()

    def stop(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.join()


def _launch(
    python: str, folder: str, environment: dict[str, str], arguments: list[str], said: str, lost_after_s: float
) -> None:
    from guozhuang import cli
    from guozhuang.launch.hosts import link as hosts_link

    os.setpgid(0, 0)  # as a shell does; in the session of its parent, so that it can be stopped
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = python
    hosts_link.LOST_AFTER_S = lost_after_s
    sys.exit(cli.main(["run", *arguments]))


def _serve(path: str) -> None:

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    server = socket.socket(socket.AF_UNIX)
    server.bind(path + ".new")
    server.listen(64)
    os.rename(path + ".new", path)
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            _be_python(connection)
        connection.close()


def _be_python(connection: socket.socket) -> None:
    """Be ``python -c CODE TOKEN`` with the streams, folder and environment of the stand-in."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        while not data.endswith(b"\n"):
            data += connection.recv(1 << 16)
        told = json.loads(data)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        _close_all_but(connection.fileno())
        os.chdir(told["folder"])
        os.environ.clear()
        os.environ.update(told["environment"])
        option, source, *sys.argv[1:] = told["argv"]
        assert option == "-c"
        subprocess.Popen = _Popen  # type: ignore[misc]
        exec(source, {"__name__": "__main__"})
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        with contextlib.suppress(OSError):
            connection.send(bytes([code]))
        os._exit(code)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Where an agent would be started, the process that is forked for it goes on as the agent instead."""

    def __init__(self, command: Any, *, preexec_fn: Any = None, pass_fds: Any = (), **more: Any) -> None:
        def be_the_agent() -> None:
            code = 1
            try:
                signal.set_wakeup_fd(-1)  # as a new program begins
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                preexec_fn()
                _close_all_but(*pass_fds)
                from guozhuang.launch.hosts import node as remote_node

                code = remote_node.main(list(map(str, pass_fds)))
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

        first = be_the_agent if _AGENT in command else preexec_fn
        super().__init__(command, preexec_fn=first, pass_fds=pass_fds, **more)


def _close_all_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
