"""The program on a remote host of an elastic run: connects to the driver's store, and starts and ends the workers there.

The supervisor runs ``python -m guozhuang.compat.horovod.runner.elastic.remote_host IN OUT``, where IN is a descriptor for lines
of JSON from the driver: first the settings, then requests. Each event is written to standard output as a line of JSON, which
``remote_crew`` reads. Both streams travel over the connection of ``guozhuang.launch.hosts.supervisor``; the program ends when
the other end of IN is closed.

The driver opens a door on each of its addresses; this program uses the first that lets it in. A passage then leads from
loopback here through that door to the store, so workers reach the store on loopback on every host.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from guozhuang.compat.horovod.common import elastic_variables
from guozhuang.compat.horovod.common.extension import EXTENSION
from guozhuang.compat.horovod.runner.elastic.crew import Ended, Event, LocalWorkers, Printed, Started
from guozhuang.compat.horovod.runner.elastic.writing import Room
from guozhuang.errors import WorldError, explain
from guozhuang.launch.request import with_folders
from guozhuang.net.door import NotOurDoorError, Passage, knock, passage_from
from guozhuang.watch.processes import node_identity

_KNOCK_S = 5.0
_LOOK_S = 0.1
_MOST_AT_ONCE = 1000  # a worker that never stops printing must not keep requests waiting


def come_through(doors: Sequence[tuple[str, int]], secret: bytes) -> tuple[Passage, str]:
    """Connect to the driver's host; return the passage to its store, and the address by which it was reached.

    Args:
        doors: address and port of each door, in the order in which to try them.
        secret: the secret of the run.

    Raises:
        WorldError: no door lets this host in; the text gives the reason for each.
    """
    why = []
    for host, port in doors:
        try:
            return passage_from(knock(host, port, secret, _KNOCK_S), host, port, secret), host
        except (OSError, NotOurDoorError) as error:
            why.append(f"{host} port {port}: {error}")
    fix = "open the firewall between them, or name the network by --network-interfaces"
    raise WorldError(explain(f"the driver's host cannot be reached from here ({'; '.join(why)})", fix=fix))


def main(arguments: Sequence[str]) -> int:
    """Start and end workers at the driver's requests, until the driver or a signal ends it; return the exit code."""
    told_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told_to_end.append(number))
    requests: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_hear, args=(int(arguments[0]), requests), name="horovod requests", daemon=True).start()
    told = requests.get()
    if told is None:
        return 1
    doors = [(str(host), int(port)) for host, port in told["doors"]]
    if told["same"] == node_identity():
        doors.sort(key=lambda door: door[0] != "127.0.0.1")
    try:
        passage, address = come_through(doors, bytes.fromhex(told["secret"]))
    except WorldError as error:
        _say({"failed": str(error)})
        return 1
    events: queue.Queue[Event] = queue.Queue()
    room = Room()
    crew = LocalWorkers(events, room)

    def pass_on(event: Event) -> None:
        _tell(event)
        if isinstance(event, Printed):
            room.give(len(event.data))

    with contextlib.closing(passage), contextlib.closing(crew):
        _say({"reached": address})
        is_over = False
        while not (is_over or told_to_end):
            crew.look()
            with contextlib.suppress(queue.Empty):
                pass_on(events.get(timeout=_LOOK_S))
                for _ in range(_MOST_AT_ONCE):
                    pass_on(events.get_nowait())
            with contextlib.suppress(queue.Empty):
                while not is_over:
                    request = requests.get_nowait()
                    is_over = request is None
                    if request is not None:
                        _obey(crew, passage, request, told)
    return 0


def _obey(crew: LocalWorkers, passage: Passage, request: dict[str, Any], told: dict[str, Any]) -> None:
    worker = int(request["worker"])
    if "stop" in request:
        crew.end(worker, float(request["stop"]))
        return
    environ = elastic_variables.environment_of_workers({})
    environ |= with_folders(environ.get("PYTHONPATH", ""), EXTENSION.python_path)
    driver = elastic_variables.Driver(passage.host, passage.port, worker, float(told["timeout_s"]))
    environ |= elastic_variables.variables(driver, str(told["host"]), int(request["num_local"]), environ)
    crew.start(worker, [str(word) for word in request["command"]], environ)


def _hear(descriptor: int, requests: queue.Queue[dict[str, Any] | None]) -> None:
    with os.fdopen(descriptor, "rb") as lines:
        for line in lines:
            requests.put(json.loads(line))
    requests.put(None)


def _tell(event: Event) -> None:
    if isinstance(event, Started):
        _say({"worker": event.worker, "pid": event.pid})
    elif isinstance(event, Printed):
        _say({"worker": event.worker, "stream": event.stream, "data": base64.b64encode(event.data).decode()})
    elif isinstance(event, Ended):
        _say({"worker": event.worker, "code": event.code})


def _say(message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    with contextlib.suppress(OSError):  # the supervisor is gone, and will end this process
        while data:
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
