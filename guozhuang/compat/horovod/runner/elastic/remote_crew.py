"""Controls the workers on another host for the driver: starts ``remote_host`` there by ssh, and exchanges messages with it.

The output of a worker there is written into the pipe that a worker of this machine would write into, so ``launch.console``
shows both alike. While a pipe is full the host is not read, so its workers block when they print, as on a slow terminal.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from guozhuang.compat.horovod.runner.elastic import remote_host as there
from guozhuang.launch.console.output import RankPlaces
from guozhuang.launch.hosts import failure as hosts_failure
from guozhuang.launch.hosts import ssh
from guozhuang.launch.hosts.link import PING_S, EndAgent, Link

_PROGRAM = "guozhuang.compat.horovod.runner.elastic.remote_host"
_KINDS = (there.HostReached, there.WorkerStarted, there.WorkerPrinted, there.WorkerEnded)


class WorkerEvents(Protocol):
    """The interface through which the driver receives the events of workers."""

    def started(self, worker: int, pid: int) -> None:
        """Record that the process of a worker was started."""

    def ended(self, worker: int, code: int) -> None:
        """Record that the process of a worker has ended, and that its pipes have got all its output."""

    def say(self, text: str) -> None:
        """Show a message to the user."""


class _Pipe:
    """The driver's writing end of the pipe of a remote worker, and the bytes that it has no room for yet."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self.unsent = bytearray()

    def send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: os.write(self.descriptor, self.unsent)]


class RemoteWorkers:
    """The workers on another host. The constructor opens the connection to that host.

    Args:
        settings: the first message to the host, with its name for ssh.
        environment: variables that workers on the host get besides those of the host itself.
        options: the options of ssh.
        start_timeout_s: limit in seconds for the host to be reached, and to reach the driver.
        events: called in ``turn``.

    Attributes:
        is_lost: the connection is gone for good; a new object is needed to start workers on the host.
        address: the address by which the host reached this one; "" until it has.
    """

    def __init__(
        self,
        settings: there.HostSettings,
        environment: Mapping[str, str],
        options: ssh.SshOptions,
        start_timeout_s: float,
        events: WorkerEvents,
    ) -> None:
        self._host, self._start_timeout_s, self._events = settings.host, start_timeout_s, events
        self.is_lost, self.address = False, ""
        self._pipes: dict[int, dict[str, _Pipe]] = {}
        self._codes: dict[int, int] = {}  # exit codes of ended workers whose output is not all in the pipes yet
        self._is_over = False
        self._began = self._pinged = time.monotonic()
        self._link = Link(settings.host, 0, False, on_message=self._understand, kinds=_KINDS)
        self._link.connect(_PROGRAM, settings, environment, {}, options, start_timeout_s, self._show)

    def start(self, worker: int, command: Sequence[str], num_local: int, places: RankPlaces) -> None:
        """Start a worker on the host, at once or as soon as the host is reached.

        Args:
            worker: the number of the worker.
            command: the program and its arguments.
            num_local: the largest number of workers on the host, which share its cores.
            places: the pipes that get its output.
        """
        paths = {"stdout": places.stdout, "stderr": places.stderr}
        self._pipes[worker] = {name: _Pipe(path) for name, path in paths.items()}
        streams = ["stdout"] if places.stdout == places.stderr else list(paths)
        self._link.say(there.StartWorker(worker, command, num_local, streams))

    def end(self, worker: int, at_once: bool) -> None:
        """Ask the host to send a worker SIGTERM, and SIGKILL after a grace period or, if ``at_once``, immediately."""
        self._link.say(there.EndWorker(worker, at_once))

    @property
    def _all_pipes(self) -> list[_Pipe]:
        return [pipe for pipes in self._pipes.values() for pipe in pipes.values()]

    @property
    def reading(self) -> list[int]:
        """Return the descriptors on which to watch for messages of the host; none while a worker's output pipe is full."""
        return [] if any(pipe.unsent for pipe in self._all_pipes) else self._link.reading()

    @property
    def writing(self) -> list[int]:
        """Return the descriptors, of output pipes and of the connection to the host, for which data waits to be written."""
        stdin = self._link.writing()
        return [pipe.descriptor for pipe in self._all_pipes if pipe.unsent] + ([] if stdin is None else [stdin])

    def turn(self) -> None:
        """Send and receive as much as is possible without waiting, and report the events of workers to the driver."""
        link, now = self._link, time.monotonic()
        for pipe in self._all_pipes:
            pipe.send()
        for descriptor in self.reading:
            link.receive(descriptor)
        link.send_more()
        if now > self._pinged + PING_S:
            self._pinged = now
            link.ping()
        for worker in [each for each in self._codes if not any(p.unsent for p in self._pipes[each].values())]:
            self._end(worker, self._codes.pop(worker))
        if not self.address and now > self._began + self._start_timeout_s:
            doing = "was reached, but did not come to the driver" if link.messages else "could not be reached"
            self._lose(f"{doing} within {self._start_timeout_s:g} s (--start-timeout){hosts_failure.last_words(link)}")
        elif link.look():
            self._lose(hosts_failure.of(link).text)

    def stop(self) -> None:
        """Ask the host to kill its workers; if the connection is lost, the host does so by itself a little later."""
        self._is_over = True
        self._link.say(EndAgent(0.0))

    def close(self) -> None:
        """Close the connection, without waiting for the host."""
        self._is_over = True
        self._lose("")

    def _lose(self, why: str) -> None:
        if not self._link.is_closed:
            self._link.abandon()
        self.is_lost = True
        if not self._is_over:
            self._events.say(f"host {self._host} {why}")
        for worker in sorted(self._pipes):
            self._end(worker, self._codes.get(worker, hosts_failure.LOST))

    def _end(self, worker: int, code: int) -> None:
        for pipe in self._pipes.pop(worker).values():
            os.close(pipe.descriptor)
        self._events.ended(worker, code)

    def _show(self, link: Link, stream: str, data: bytes) -> None:
        for line in data.decode(errors="replace").splitlines():
            self._events.say(f"{self._host}: {line}")

    def _understand(self, message: object) -> None:
        if isinstance(message, there.HostReached):
            self.address = message.address
        elif isinstance(message, there.WorkerStarted):
            self._events.started(message.worker, message.pid)
        elif isinstance(message, there.WorkerPrinted):
            self._pipes[message.worker][message.stream].unsent += base64.b64decode(message.data)
        elif isinstance(message, there.WorkerEnded):
            self._codes[message.worker] = message.code
