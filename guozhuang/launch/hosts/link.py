"""The launcher's connection to the supervisor of one host, through an ssh client or, on this machine, directly.

See [Note: the wire] in supervisor.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from guozhuang.launch.hosts import ssh
from guozhuang.launch.hosts.frames import TO_LAUNCHER
from guozhuang.launch.hosts.frames import NodeRefused as NodeRefused
from guozhuang.launch.hosts.supervisor import AgentEnded, SupervisorConfig
from guozhuang.launch.hosts.supervisor import EndAgent as EndAgent
from guozhuang.launch.hosts.supervisor import decode as decode
from guozhuang.launch.hosts.supervisor import encode as encode

_Message = TypeVar("_Message")

# A host that receives nothing from the launcher for LOST_AFTER_S seconds ends its ranks, with LOST_GRACE_S seconds between
# SIGTERM and SIGKILL. Shorter gaps of the network are tolerated.
LOST_AFTER_S, LOST_GRACE_S = 20.0, 10.0
PING_S = 2.0  # seconds between two heartbeats of the launcher
_HEAD_BYTES = 5
_CHUNK_BYTES = 1 << 16
_MAX_WORDS_BYTES = 1 << 14
_END_S = 5.0
_DRAIN_S = 2.0


@dataclass(eq=False)
class Link:
    """The launcher's connection to one host of a run, with the last messages of the host.

    Attributes:
        name: name of the host, as the user wrote it.
        node_rank: its index among the links.
        is_local: whether the host is this machine, which needs no ssh.
        serves: the numbers of the parameter servers that this link runs instead of ranks.
        messages: the last message of each class that the host sent.
        code: the agent's exit code, or minus the number of the signal that ended it; None until the supervisor sends it.
        words: the last text that ssh and the host's shell wrote to stderr.
        has_started: whether the client's process (ssh, or the local supervisor) was started.
        is_closed: whether the client's process has ended and all its output was read.
        on_message: called with each message of the host.
        kinds: the classes of messages that the host may send besides those of ``frames.TO_LAUNCHER``.
    """

    name: str
    node_rank: int
    is_local: bool
    messages: dict[type, Any] = field(default_factory=dict)
    code: int | None = None
    words: str = ""
    has_started: bool = False
    is_closed: bool = False
    serves: Sequence[int] = ()
    on_message: Callable[[object], object] = field(default=lambda message: None)
    kinds: Sequence[type] = ()

    @property
    def what(self) -> str:
        """Return "servers" or "ranks", whichever this link runs."""
        return "servers" if self.serves else "ranks"

    @property
    def title(self) -> str:
        """Return the name of the host for messages to the user, with the numbers of this link's parameter servers."""
        if not self.serves:
            return f"host {self.name}"
        first, last = self.serves[0], self.serves[-1]
        servers = f"parameter server {first}" if first == last else f"parameter servers {first} to {last}"
        return f"host {self.name} ({servers})"

    def last(self, kind: type[_Message]) -> _Message | None:
        """Return the last message of this class that the host sent; None if it has sent none."""
        return self.messages.get(kind)

    def connect(
        self,
        module: str,
        node: Any,
        environment: Mapping[str, str],
        asked_environment: Mapping[str, str],
        options: ssh.SshOptions,
        start_timeout_s: float,
        output: Callable[[Link, str, bytes], None],
    ) -> None:
        """Have the host's supervisor run a module of this package.

        Args:
            module: the name of the module; its arguments are the descriptors IN and OUT, which lead to the launcher.
            node: the first message to the module.
            environment: variables of this machine, which a host that is this machine has already.
            asked_environment: variables that the user asked for.
            options: the options of ssh.
            start_timeout_s: the launcher's limit in seconds; ssh's own is shorter, so that its message is shown.
            output: see ``start``.
        """
        token = f"guozhuang-{secrets.token_hex(8)}"
        config = SupervisorConfig(
            folder=ssh.folder(),
            is_remote=not self.is_local,
            environment=environment,
            asked_environment=asked_environment,
            lists=ssh.LISTS,
            package="guozhuang",
            command=["-m", module],
            first_line=encode(node).decode(),
            lost_after_s=LOST_AFTER_S,
            lost_grace_s=LOST_GRACE_S,
        )
        command = ssh.local_command(token)
        if not self.is_local:
            command = ssh.command(self.name, options, 0.75 * start_timeout_s, token)
        self.start(command, token, config, output)

    def start(
        self,
        command: Sequence[str],
        token: str,
        config: SupervisorConfig,
        output: Callable[[Link, str, bytes], None],
    ) -> None:
        """Run the command that starts the supervisor, and send it the supervisor's source and config.

        Args:
            command: the command of the supervisor, or of the ssh client that starts it.
            token: the first line of the supervisor; earlier output was written by a login shell.
            config: the first message to the supervisor.
            output: called with this link, "stdout" or "stderr", and the bytes that the ranks wrote there.
        """
        self._ended: float | None
        self._token, self._output = f"\n{token}\n".encode(), output
        self._received, self._stderr = bytearray(), bytearray()
        self._has_begun, self._ended = False, None
        self._lock = threading.Lock()
        self._unsent = bytearray(ssh.supervisor_source() + encode(config))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True,  # Ctrl-C must reach only the launcher, which then ends the hosts in order
        )  # fmt: skip
        self.has_started = True
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._open = {self._process.stdout.fileno(): self._take, self._process.stderr.fileno(): self._take_words}
        for descriptor in (self._process.stdin.fileno(), *self._open):
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        self.send_more()

    def reading(self) -> list[int]:
        """Return the descriptors on which the host's messages and output arrive, for a selector."""
        return list(self._open)

    def writing(self) -> int | None:
        """Return the descriptor to which ``send_more`` must write as soon as it can; None if there is nothing to write."""
        stdin = self._process.stdin
        return stdin.fileno() if self._unsent and stdin is not None and not stdin.closed else None

    def say(self, request: Any) -> None:
        """Send a request (a dataclass) to the supervisor, which forwards requests that are for the agent."""
        with self._lock:
            self._unsent += encode(request)
        self.send_more()

    def send_more(self) -> None:
        """Write as much of the unsent data as the pipe takes without blocking."""
        with self._lock:
            self._send()

    def ping(self) -> None:
        """Send a heartbeat of the launcher. A separate thread calls this, so that a blocked terminal does not end the run."""
        with self._lock:
            if not self._unsent:
                self._unsent += b"\n"
            self._send()

    def _send(self) -> None:
        stdin = self._process.stdin
        while self._unsent and stdin is not None and not stdin.closed:
            try:
                del self._unsent[: os.write(stdin.fileno(), self._unsent[:_CHUNK_BYTES])]
            except BlockingIOError:
                return
            except OSError:  # the client has ended: drop the data; ``look`` will notice the end
                self._unsent.clear()

    def receive(self, descriptor: int) -> None:
        """Read from one of the descriptors of ``reading()``, and process the data."""
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            self._open[descriptor](data)
        else:
            del self._open[descriptor]

    def look(self) -> bool:
        """Check whether the client has ended and its output was read; if so, close this link and return True, once."""
        if self.is_closed or self._process.poll() is None:
            return False
        if self._ended is None:
            self._ended = time.monotonic()
        # A process that the client left running, such as a master connection of ssh, may hold the client's pipes open for ever.
        if self._open and time.monotonic() < self._ended + _DRAIN_S:
            return False
        self._open.clear()
        self._close()
        return True

    @property
    def client_code(self) -> int | None:
        """Return the exit code of the ssh client, or of the local supervisor; None while it runs."""
        return self._process.returncode

    def hang_up(self) -> None:
        """Close the supervisor's stdin, so that the supervisor considers the launcher lost and ends its ranks."""
        with self._lock, contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def abandon(self) -> None:
        """Kill the ssh client (or the local supervisor) without waiting for the host's last messages."""
        self.hang_up()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._open.clear()
        self._close()

    def _close(self) -> None:
        self.is_closed = True
        self.hang_up()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _take_words(self, data: bytes) -> None:
        self._stderr += data
        del self._stderr[:-_MAX_WORDS_BYTES]
        self.words = self._stderr.decode(errors="replace")

    def _take(self, data: bytes) -> None:
        self._received += data
        if not self._has_begun:
            # A login shell may have written a text without a line end before the token, so the token may begin inside a line.
            before, found, rest = bytes(b"\n" + self._received).partition(self._token)
            if not found:
                return
            self._has_begun, self._received = True, bytearray(rest)
            if before.strip():
                self._take_words(before.strip() + b"\n")
        while len(self._received) >= _HEAD_BYTES:
            kind, length = bytes(self._received[:1]), struct.unpack(">I", self._received[1:_HEAD_BYTES])[0]
            if len(self._received) < _HEAD_BYTES + length:
                return
            payload = bytes(self._received[_HEAD_BYTES : _HEAD_BYTES + length])
            del self._received[: _HEAD_BYTES + length]
            if kind == b"J":
                self._understand(decode(payload, (*TO_LAUNCHER, *self.kinds)))
            else:
                self._output(self, "stdout" if kind == b"O" else "stderr", payload)

    def _understand(self, message: object) -> None:
        self.messages[type(message)] = message
        self.on_message(message)
        if isinstance(message, AgentEnded):
            self.code = message.code
