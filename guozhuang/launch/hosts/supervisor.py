"""The supervisor of one host: it starts the agent there, and kills every process of the run when the launcher is gone.

The supervisor runs as ``python -c`` on the host, and its source is sent through ssh's stdin. So a host with an interpreter can
report what else it lacks, such as this package. Therefore it imports the standard library only, and one file that is sent with
it (``preload``).

[Note: the wire] A message is a dataclass that both ends share, written as a line (``encode``). The launcher writes lines to
the supervisor's stdin: a ``SupervisorConfig``, then requests; the supervisor forwards those that are not its own to the
program that it started; an empty line is a heartbeat of the launcher. The supervisor writes to its stdout a line with a token,
which separates earlier output of a login shell, then frames: a byte for the kind, four for the length (big-endian), and the
payload. "O" and "E" are output of the agent and its ranks on stdout and stderr, "J" is a message. The last message is
``AgentEnded``: without it the connection broke; ssh's own exit code does not distinguish that from a rank killed by a signal.

[Note: nothing stays] stdin closes when the launcher ends, however it ends, because the ssh client ends with the pipe to it. If
the network is cut, stdin does not close, so silence longer than ``lost_after_s`` counts as the end of the launcher too, unless
it has sent "pause" (Ctrl-Z). Then, and when the agent has ended, every descendant of the supervisor is killed. Ranks have
sessions of their own; but the supervisor is the reaper of orphans (PR_SET_CHILD_SUBREAPER), so a walk over its tree of
processes finds them all. Unlike ``watch``, the supervisor listens to a pipe and not to a store, because it runs before the
rendezvous, and also on a host that lacks the package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guozhuang.watch.processes import SET_CHILD_SUBREAPER, SET_PDEATHSIG, descendants, environment, has_proc, prctl

_CHUNK_BYTES = 1 << 16
# Bytes; while so much output waits for the launcher, no more is read from the ranks, which then block as on a slow terminal.
_MAX_WAITING_BYTES = 1 << 20
# Seconds that the guard of a killed agent gets to kill the ranks and remove the agent's folder.
_TIDY_S = 1.0
_DRAIN_S = 2.0
_KILL_S = 10.0
_OF_GUARDS = b"GUOZHUANG_GUARD="  # the environment variable that marks a guard; see guard.py


@dataclass(frozen=True)
class SupervisorConfig:
    """The launcher's first message to a supervisor: how to start the agent on the host, and when the launcher counts as gone.

    Attributes:
        folder: the working directory of the agent.
        is_remote: whether the host is another machine than the launcher's, so that it lacks ``environment``.
        environment: variables of the launcher.
        asked_environment: variables that the user gave for every host.
        lists: variables with lists of folders: the host's own folders are kept after those of ``environment``.
        package: the package that must be installed on the host.
        command: the arguments of the interpreter that make it the agent.
        first_line: the first line of the agent's input.
        lost_after_s: a launcher that is silent for longer is gone, in seconds.
        lost_grace_s: the time between SIGTERM and SIGKILL for the agent once the launcher is gone, in seconds.
    """

    folder: str
    is_remote: bool
    environment: Mapping[str, str]
    asked_environment: Mapping[str, str]
    lists: Sequence[str]
    package: str
    command: Sequence[str]
    first_line: str
    lost_after_s: float
    lost_grace_s: float


@dataclass(frozen=True)
class EndAgent:
    """A request to end the agent by ``signal``, and by SIGKILL after ``grace_s`` seconds."""

    grace_s: float
    signal: int = signal.SIGTERM


@dataclass(frozen=True)
class PauseHost:
    """A request to tolerate a launcher without heartbeats, as Ctrl-Z stopped it; ``is_paused`` False: no longer."""

    is_paused: bool


@dataclass(frozen=True)
class AgentStarted:
    """The supervisor's message that it has started the agent, with the process ids of both."""

    supervisor: int
    agent: int


@dataclass(frozen=True)
class AgentEnded:
    """The supervisor's last message: the agent's exit code, or minus the number of the signal that ended it."""

    code: int


@dataclass(frozen=True)
class HostLacks:
    """The supervisor's message that the host lacks something; ``what`` is a sentence without its subject, the host."""

    what: str


TO_SUPERVISOR = (EndAgent, PauseHost)


def encode(message: Any) -> bytes:
    """Return a message (a dataclass) as a line: the name of its class, and its fields as JSON."""
    return json.dumps([type(message).__name__, dataclasses.asdict(message)]).encode() + b"\n"


def decode(line: bytes, kinds: Iterable[type]) -> Any:
    """Return the message that ``encode`` wrote, with lists in the place of tuples; None if it is none of ``kinds``."""
    name, fields = json.loads(line)
    kind = next((kind for kind in kinds if kind.__name__ == name), None)
    return None if kind is None else kind(**fields)


class Supervisor:
    """Passes messages and output between the launcher and the agent. See [Note: the wire] and [Note: nothing stays]."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._heard = time.monotonic()
        self._waiting = bytearray()
        self._received = self._from_node = b""  # the unfinished line from the launcher, and from the agent
        self._selector = selectors.DefaultSelector()
        self._agent: subprocess.Popen[bytes] | None = None
        self._pipes: dict[int, bytes] = {}
        self._to_node = -1
        self._kill_at: float | None = None
        self._is_paused = False
        self._launcher_is_gone = False

    def run(self) -> int:
        """Start the agent, pass messages and output between it and the launcher, and return when it has ended."""
        prctl(SET_CHILD_SUBREAPER, 1)
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
        self._start()
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(waker, selectors.EVENT_READ)
        assert self._agent is not None
        while self._agent.poll() is None:
            self._turn(waker)
            if asked_to_end:
                asked_to_end.clear()
                self._end(self._config.lost_grace_s)
            if time.monotonic() - self._heard > self._config.lost_after_s and not self._is_paused:
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
        self.say(AgentEnded(self._agent.returncode))
        deadline = time.monotonic() + _KILL_S
        while self._waiting and not self._launcher_is_gone and time.monotonic() < deadline:
            self._turn(waker)
        return 0

    def _start(self) -> None:
        in_node, self._to_node = os.pipe()
        from_node, out_node = os.pipe()
        self._agent = subprocess.Popen(
            [sys.executable, *self._config.command, str(in_node), str(out_node)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(in_node, out_node),
            start_new_session=True,
            # If the supervisor is killed, the agent gets SIGTERM. preexec_fn is safe here: this process has one thread.
            preexec_fn=lambda: prctl(SET_PDEATHSIG, signal.SIGTERM),
        )
        os.close(in_node)
        os.close(out_node)
        with contextlib.suppress(OSError):  # the write fails if the agent has already ended; ``run`` reports how
            os.write(self._to_node, self._config.first_line.encode())
        assert self._agent.stdout is not None and self._agent.stderr is not None
        self._pipes = {self._agent.stdout.fileno(): b"O", self._agent.stderr.fileno(): b"E", from_node: b"J"}
        for pipe in self._pipes:
            self._selector.register(pipe, selectors.EVENT_READ)
        self.say(AgentStarted(os.getpid(), self._agent.pid))

    def _turn(self, waker: int) -> None:
        """Wait up to 0.1 s for data from the launcher or the agent, and pass it on."""
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
            *lines, self._from_node = (self._from_node + data).split(b"\n")
            for line in lines:
                self._frame(b"J", line)
        else:
            self._frame(kind, data)

    def say(self, message: Any) -> None:
        """Send the launcher a message, which may wait in a buffer until the pipe can take it."""
        self._frame(b"J", encode(message))

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
        *lines, self._received = (self._received + data).split(b"\n")
        for line in filter(None, lines):
            self._obey(line)

    def _obey(self, line: bytes) -> None:
        request = decode(line, TO_SUPERVISOR)
        if isinstance(request, EndAgent):
            self._end(request.grace_s, request.signal)
        elif isinstance(request, PauseHost):
            self._is_paused = request.is_paused
        else:
            with contextlib.suppress(OSError):
                os.write(self._to_node, line + b"\n")

    def _lose_launcher(self) -> None:
        if not self._launcher_is_gone:
            self._launcher_is_gone = True
            self._waiting.clear()
            self._end(self._config.lost_grace_s)
        self._heard = time.monotonic()

    def _end(self, grace_s: float, number: int = signal.SIGTERM) -> None:
        """Send the agent a signal; ``run`` kills all processes after the grace time, which a later call can only shorten."""
        assert self._agent is not None
        if self._kill_at is None and grace_s > 0:
            with contextlib.suppress(OSError):
                self._agent.send_signal(number)
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)


def _is_guard(pid: int) -> bool:
    """Return whether a process is an agent's guard (guard.py), which needs a moment to kill the ranks and remove a folder."""
    return any(each.startswith(_OF_GUARDS) for each in environment(pid))


def _kill_descendants(session: int) -> None:
    if not has_proc():  # without /proc (not Linux) only the agent's process group can be found
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


def _read_config() -> SupervisorConfig:
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            raise SystemExit(1)
        line += data
    config: SupervisorConfig = decode(bytes(line), [SupervisorConfig])
    return config


def _prepare(config: SupervisorConfig) -> HostLacks | None:
    """Change to the folder and set the environment; return a message if the folder or the package is missing, else None."""
    try:
        os.chdir(config.folder)
    except OSError as error:
        return HostLacks(f"has no such working directory: {config.folder!r}: {error.strerror}")
    if config.is_remote:
        for name, value in config.environment.items():
            own = os.environ.get(name, "")
            if name in config.lists and own:
                entries = value.split(os.pathsep)
                value = os.pathsep.join([*entries, *(e for e in own.split(os.pathsep) if e not in entries)])
            os.environ[name] = value
    os.environ.update(config.asked_environment)
    os.environ["PWD"] = config.folder
    searched = [entry or "." for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:0] = [".", *(entry for entry in searched if entry != ".")]
    if importlib.util.find_spec(config.package) is None:
        why = f"{sys.executable} finds no package {config.package!r}"
        return HostLacks(f"has Python, but not this package: {why}")
    return None


def main() -> int:
    """Run the supervisor as a program, with the token as its only argument; return the exit code."""
    os.write(1, f"\n{sys.argv[1]}\n".encode())
    config = _read_config()
    missing = _prepare(config)
    supervisor = Supervisor(config)
    if missing is not None:
        supervisor.say(missing)
        return 0
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
