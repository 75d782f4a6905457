"""The program on a remote host of an elastic run: connects to the driver's store, and starts and ends the workers there.

The supervisor of the host (``guozhuang.launch.hosts.supervisor``) runs ``python -m
guozhuang.compat.horovod.runner.elastic.remote_host IN OUT``. IN is a descriptor for messages of the driver: first
``HostSettings``, then ``StartWorker`` and ``EndWorker``. Each event is written to OUT as a message, which ``remote_crew``
reads. The program ends when the other end of IN is closed.

The driver opens a door on each of its addresses; this program uses the first that lets it in. A passage then leads from
loopback here through that door to the store, so workers reach the store on loopback on every host.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from guozhuang.compat.horovod.runner.elastic.crew import CANNOT_BE_STARTED, LocalWorkers, environment_of_workers
from guozhuang.errors import explain
from guozhuang.launch.console.streams import NamedPipe
from guozhuang.launch.hosts.link import NodeRefused, decode, encode
from guozhuang.launch.signals import ENDING, Signals
from guozhuang.net.door import NotOurDoorError
from guozhuang.net.doors import enter
from guozhuang.watch.processes import node_identity

_TURN_S = 0.05
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class HostSettings:
    """The driver's first message to ``remote_host``: the name of the host, and the addresses of the driver's doors.

    Attributes:
        host: the name of this host, as the user wrote it.
        doors: address and port of each door of the driver's host.
        secret: the secret of the run, in hexadecimal digits.
        same: the identity of the driver's host, which equals this host's if both are one machine.
        timeout_s: how long the driver may be silent before workers end, in seconds.
    """

    host: str
    doors: Sequence[tuple[str, int]]
    secret: str
    same: str
    timeout_s: float


@dataclass(frozen=True)
class StartWorker:
    """The driver's request to start a worker, one of at most ``num_local`` on the host, and to send its ``streams`` back."""

    worker: int
    command: Sequence[str]
    num_local: int
    streams: Sequence[str]


@dataclass(frozen=True)
class EndWorker:
    """The driver's request to send a worker SIGTERM, and SIGKILL after a grace period or, if ``at_once``, immediately."""

    worker: int
    at_once: bool


@dataclass(frozen=True)
class HostReached:
    """The host's report that it has connected to the driver's host, at this address of the driver's host."""

    address: str


@dataclass(frozen=True)
class WorkerStarted:
    """The host's report that a worker was started; ``pid`` is its process id."""

    worker: int
    pid: int


@dataclass(frozen=True)
class WorkerPrinted:
    """The host's report that a worker wrote ``data`` (in base64) to its stream "stdout" or "stderr"."""

    worker: int
    stream: str
    data: str


@dataclass(frozen=True)
class WorkerEnded:
    """The host's report that a worker has ended, with its exit code or minus the number of the signal that ended it."""

    worker: int
    code: int


class WorkerHost:
    """The workers of this host, and the connection to the driver.

    Args:
        reading, writing: the descriptors IN and OUT.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._received = bytearray()
        self._pipes: dict[int, dict[str, NamedPipe]] = {}
        self.is_over = False

    def requests(self) -> Iterator[Any]:
        """Wait until the driver has sent data or closed the connection; return the requests that are complete."""
        data = os.read(self._reading, _CHUNK_BYTES)
        self.is_over = self.is_over or not data
        *lines, self._received = (self._received + data).split(b"\n")
        return (decode(bytes(line), [StartWorker, EndWorker]) for line in lines)

    def say(self, message: Any) -> None:
        """Send the driver a message."""
        data = encode(message)
        with contextlib.suppress(OSError):  # the supervisor is gone: then IN ends, and with it this program
            while data:
                data = data[os.write(self._writing, data) :]

    def run(self, host: str, workers: LocalWorkers, folder: str, ending: Sequence[int]) -> None:
        """Carry out the driver's requests until the driver is gone, or until a signal has been added to ``ending``."""
        while not (self.is_over or ending):
            sources = {pipe.source: (n, name, pipe) for n, pipes in self._pipes.items() for name, pipe in pipes.items()}
            ready = select.select([self._reading, *sources], [], [], _TURN_S)[0]
            for source in ready:
                if source in sources:
                    self._pass_on(*sources[source])
            for worker, code in workers.wait(0.0).items():
                self._ended(worker, code)
            for request in self.requests() if self._reading in ready else ():
                if isinstance(request, EndWorker):
                    workers.end(request.worker, request.at_once)
                else:
                    self._start(host, workers, folder, request)

    def _start(self, host: str, workers: LocalWorkers, folder: str, request: StartWorker) -> None:
        worker = request.worker
        paths = {name: os.path.join(folder, f"{worker}.{name}") for name in request.streams}
        self._pipes[worker] = {name: NamedPipe(path) for name, path in paths.items()}
        out = paths["stdout"]
        try:
            pid = workers.start(worker, host, request.num_local, request.command, out, paths.get("stderr", out))
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
            self._ended(worker, CANNOT_BE_STARTED)
        else:
            self.say(WorkerStarted(worker, pid))

    def _pass_on(self, worker: int, name: str, pipe: NamedPipe) -> bool:
        with contextlib.suppress(BlockingIOError):
            data = os.read(pipe.source, _CHUNK_BYTES)
            self.say(WorkerPrinted(worker, name, base64.b64encode(data).decode()))
            return True
        return False

    def _ended(self, worker: int, code: int) -> None:
        for name, pipe in self._pipes.pop(worker).items():
            while self._pass_on(worker, name, pipe):
                pass
            pipe.close()
            os.unlink(pipe.path)
        self.say(WorkerEnded(worker, code))


def main(arguments: Sequence[str]) -> int:
    """Start and end workers at the driver's requests, until the driver or a signal ends it; return the exit code."""
    signals = Signals(ENDING)
    signals.note()
    with signals:
        return _run(arguments, signals.noted)


def _run(arguments: Sequence[str], ending: Sequence[int]) -> int:
    reading, writing = map(int, arguments)
    for descriptor in (reading, writing):
        os.set_inheritable(descriptor, False)
    here = WorkerHost(reading, writing)
    with open(reading, "rb", buffering=0, closefd=False) as lines:  # unbuffered: consumes nothing after the first line
        line = lines.readline()
    if not line:
        return 1
    config: HostSettings = decode(line, [HostSettings])
    doors = [(host, port) for host, port in config.doors]
    if config.same == node_identity():
        doors.sort(key=lambda door: door[0] != "127.0.0.1")
    try:
        passage, address = enter(doors, bytes.fromhex(config.secret))
    except NotOurDoorError as error:
        fix = "open the firewall between them, or name the network by --network-interfaces"
        here.say(NodeRefused(explain(f"the driver's host cannot be reached from here ({error})", fix=fix)))
        return 1
    folder = tempfile.mkdtemp(prefix="guozhuang-run-")
    environment = environment_of_workers({})
    with contextlib.closing(passage), contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        workers = stack.enter_context(
            contextlib.closing(LocalWorkers(folder, (passage.host, passage.port), config.timeout_s, environment))
        )
        here.say(HostReached(address))
        here.run(config.host, workers, folder, ending)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
