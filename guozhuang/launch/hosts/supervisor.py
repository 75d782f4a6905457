"""The supervisor of one host: holds the agent there, and ends all it started when the launcher is gone.

It runs as ``python -c`` on the host, its source having come over ssh's stdin, so a host needs nothing but the interpreter
to say what else it lacks. Therefore it imports the standard library, and one file that is sent along (``preload``).

[Note: the wire] The launcher writes lines to the supervisor's stdin: a header, then requests, each a JSON object; an empty
line only says that the launcher lives. The supervisor writes to its stdout a line with a token (so that what a login shell
prints before is told apart), then frames: a byte for the kind, four for the length (big-endian), and the payload. "O" and
"E" are what the agent and its ranks wrote to stdout and stderr, "J" is a JSON object. The last frame says how the agent
ended: where it is missing, the connection broke; ssh's own exit code cannot tell that from a rank killed by a signal.

[Note: nothing stays] stdin ends when the launcher ends, however it ends, because its ssh client goes on only as long as the
pipe between them. Where the network is cut nothing ends, so silence longer than ``lost_after_s`` means the same, unless the
launcher has said that it will be stopped for a while (Ctrl-Z). Then, and when the agent itself is gone, every descendant is
killed: ranks have sessions of their own, and orphans come to the supervisor, because it asked to be their reaper; so none
escapes a walk over the tree of processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from typing import Any

from guozhuang.watch.processes import descendants, environment, has_proc

_CHUNK_BYTES = 1 << 16
# While so much waits for the launcher no more is read from the ranks: they wait, as they would for a slow terminal.
_MAX_WAITING_BYTES = 1 << 20
# An agent that was killed has a guard of its own, which ends the ranks and removes their folder.
_TIDY_S = 1.0
_DRAIN_S = 2.0
_KILL_S = 10.0
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_OF_GUARDS = b"GUOZHUANG_GUARD="  # see guard.py
NO_FOLDER, NO_PACKAGE = "no folder", "no package"


class Supervisor:
    """See [Note: the wire] and [Note: nothing stays]."""

    def __init__(self, header: dict[str, Any]) -> None:
        self._lost_after_s = float(header["lost_after_s"])
        self._lost_grace_s = float(header["lost_grace_s"])
        self._heard = time.monotonic()
        self._waiting = bytearray()
        self._received = bytearray()
        self._from_node = bytearray()
        self._selector = selectors.DefaultSelector()
        self._agent: subprocess.Popen[bytes] | None = None
        self._pipes: dict[int, bytes] = {}
        self._to_node = -1
        self._kill_at: float | None = None
        self._is_paused = False
        self._launcher_is_gone = False

    def run(self, header: dict[str, Any]) -> int:
        """Start the agent, carry its words, and end with it."""
        _prctl(_SET_CHILD_SUBREAPER)
        waker, wake = os.pipe()
        for end in (waker, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        asked_to_end: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: asked_to_end.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self._start(header)
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(waker, selectors.EVENT_READ)
        assert self._agent is not None
        while self._agent.poll() is None:
            self._turn(waker)
            if asked_to_end:
                asked_to_end.clear()
                self._end(self._lost_grace_s)
            if time.monotonic() - self._heard > self._lost_after_s and not self._is_paused:
                self._lose_launcher()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                _kill_descendants(self._agent.pid)
        deadline = time.monotonic() + _TIDY_S
        while descendants(os.getpid()) and time.monotonic() < deadline:
            self._turn(waker)
        _kill_descendants(self._agent.pid)
        deadline = time.monotonic() + _DRAIN_S
        while self._pipes and time.monotonic() < deadline:
            self._turn(waker)
        code = self._agent.returncode
        self._say({"ended": code} if code >= 0 else {"killed": -code})
        deadline = time.monotonic() + _KILL_S
        while self._waiting and not self._launcher_is_gone and time.monotonic() < deadline:
            self._turn(waker)
        return 0

    def _start(self, header: dict[str, Any]) -> None:
        in_node, self._to_node = os.pipe()
        from_node, out_node = os.pipe()
        self._agent = subprocess.Popen(
            [sys.executable, *header["command"], str(in_node), str(out_node)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(in_node, out_node),
            start_new_session=True,
            # Should the supervisor be killed, the agent ends its ranks. This process has one thread, which forks safely.
            preexec_fn=lambda: _prctl(_SET_PDEATHSIG, signal.SIGTERM),
        )
        os.close(in_node)
        os.close(out_node)
        with contextlib.suppress(OSError):  # it is gone already; how, is said at its end
            os.write(self._to_node, json.dumps(header["node"]).encode() + b"\n")
        assert self._agent.stdout is not None and self._agent.stderr is not None
        self._pipes = {self._agent.stdout.fileno(): b"O", self._agent.stderr.fileno(): b"E", from_node: b"J"}
        for pipe in self._pipes:
            self._selector.register(pipe, selectors.EVENT_READ)
        self._say({"supervisor": os.getpid(), "agent": self._agent.pid})

    def _turn(self, waker: int) -> None:
        """Wait for what comes, at most a moment, and pass it on."""
        takes_more = len(self._waiting) < _MAX_WAITING_BYTES
        for pipe in self._pipes:
            watched = pipe in self._selector.get_map()
            if takes_more and not watched:
                self._selector.register(pipe, selectors.EVENT_READ)
            elif watched and not takes_more:
                self._selector.unregister(pipe)
        self._watch_stdout()
        for key, _ in self._selector.select(0.1):
            if key.fd == waker:
                with contextlib.suppress(BlockingIOError):
                    os.read(waker, _CHUNK_BYTES)
            elif key.fd == 0:
                self._hear()
            elif key.fd in self._pipes:
                self._pass_on(key.fd)
        self._flush()

    def _watch_stdout(self) -> None:
        watched = 1 in self._selector.get_map()
        if self._waiting and not watched and not self._launcher_is_gone:
            self._selector.register(1, selectors.EVENT_WRITE)
        elif watched and (not self._waiting or self._launcher_is_gone):
            self._selector.unregister(1)

    def _pass_on(self, pipe: int) -> None:
        kind, data = self._pipes[pipe], os.read(pipe, _CHUNK_BYTES)
        if not data:
            self._selector.unregister(pipe)
            del self._pipes[pipe]
        elif kind == b"J":
            self._from_node += data
            while b"\n" in self._from_node:
                line, _, rest = bytes(self._from_node).partition(b"\n")
                self._from_node = bytearray(rest)
                self._frame(b"J", line)
        else:
            self._frame(kind, data)

    def _say(self, message: dict[str, Any]) -> None:
        self._frame(b"J", json.dumps(message).encode())

    def _frame(self, kind: bytes, payload: bytes) -> None:
        if not self._launcher_is_gone:
            self._waiting += kind + struct.pack(">I", len(payload)) + payload
            self._flush()

    def _flush(self) -> None:
        while self._waiting and not self._launcher_is_gone:
            try:
                del self._waiting[: os.write(1, self._waiting[:_CHUNK_BYTES])]
            except BlockingIOError:
                return
            except OSError:
                self._lose_launcher()

    def _hear(self) -> None:
        try:
            data = os.read(0, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(0)
            self._lose_launcher()
            return
        self._heard = time.monotonic()
        self._received += data
        while b"\n" in self._received:
            line, _, rest = bytes(self._received).partition(b"\n")
            self._received = bytearray(rest)
            if line:
                self._obey(json.loads(line))

    def _obey(self, request: dict[str, Any]) -> None:
        if "end" in request:
            self._end(float(request["end"]), int(request.get("signal", signal.SIGTERM)))
        elif "pause" in request:
            self._is_paused = bool(request["pause"])
        else:
            with contextlib.suppress(OSError):
                os.write(self._to_node, json.dumps(request).encode() + b"\n")

    def _lose_launcher(self) -> None:
        if not self._launcher_is_gone:
            self._launcher_is_gone = True
            self._waiting.clear()
            self._end(self._lost_grace_s)
        self._heard = time.monotonic()

    def _end(self, grace_s: float, number: int = signal.SIGTERM) -> None:
        """Ask the agent to end its ranks and itself; kill what is left after the grace. Asked again: whichever is sooner."""
        assert self._agent is not None
        if self._kill_at is None and grace_s > 0:
            with contextlib.suppress(OSError):
                self._agent.send_signal(number)
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)


def _prctl(option: int, value: int = 1) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _is_guard(pid: int) -> bool:
    """Whether a process is an agent's guard (guard.py), which is about to end the ranks and remove their folder."""
    return any(each.startswith(_OF_GUARDS) for each in environment(pid))


def _kill_descendants(session: int) -> None:
    if not has_proc():  # not Linux: the agent's session is all that can be found
        with contextlib.suppress(OSError):
            os.killpg(session, signal.SIGKILL)
    begin = time.monotonic()
    while (pids := descendants(os.getpid())) and time.monotonic() < begin + _KILL_S:
        is_tidying = time.monotonic() < begin + _TIDY_S
        for pid in pids:
            with contextlib.suppress(OSError):
                if not (is_tidying and _is_guard(pid)):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _read_header() -> dict[str, Any]:
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            raise SystemExit(1)
        line += data
    header: dict[str, Any] = json.loads(line)
    return header


def _prepare(header: dict[str, Any]) -> dict[str, Any] | None:
    """Take on folder and environment; what is missing, if anything is."""
    try:
        os.chdir(header["folder"])
    except OSError as error:
        return {"missing": NO_FOLDER, "why": f"{header['folder']!r}: {error.strerror}"}
    if header["is_remote"]:
        for name, value in header["environment"].items():
            own = os.environ.get(name, "")
            if name in header["lists"] and own:
                entries = value.split(os.pathsep)
                value = os.pathsep.join([*entries, *(e for e in own.split(os.pathsep) if e not in entries)])
            os.environ[name] = value
    os.environ.update(header["asked_environment"])
    os.environ["PWD"] = header["folder"]
    searched = [entry or "." for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:0] = [".", *(entry for entry in searched if entry != ".")]
    if importlib.util.find_spec(header["package"]) is None:
        return {"missing": NO_PACKAGE, "why": f"{sys.executable} finds no package {header['package']!r}"}
    return None


def main() -> int:
    """Run the supervisor: ``python -c ...`` with the token as its only argument."""
    os.write(1, f"\n{sys.argv[1]}\n".encode())
    header = _read_header()
    missing = _prepare(header)
    supervisor = Supervisor(header)
    if missing is not None:
        supervisor._say(missing)
        return 0
    return supervisor.run(header)


if __name__ == "__main__":
    sys.exit(main())
