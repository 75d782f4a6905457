"""The driver's side of the workers on another host: starts ``remote_host`` there by ssh, and turns its messages into events.

Each host has a thread here, which reads the messages and sends heartbeats.
"""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import secrets
import select
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guozhuang.compat.horovod.runner.elastic.crew import Ended, Event, Lost, Printed, Reached, Said, Started
from guozhuang.compat.horovod.runner.elastic.writing import Room
from guozhuang.launch.hosts import failure as hosts_failure
from guozhuang.launch.hosts import ssh
from guozhuang.launch.hosts.link import Link
from guozhuang.launch.hosts.run import LOST_AFTER_S

_PING_S = 2.0
_LOOK_S = 0.1
_LOST_GRACE_S = 10.0
_CLOSE_S = 10.0


@dataclass(frozen=True)
class HostConfig:
    """The settings that all remote hosts of a run share.

    Attributes:
        doors: address and port of each door of the driver's host.
        secret: the secret of the run, which opens the doors.
        same: the identity of the driver's host, by which a remote host sees that it is that very machine.
        timeout_s: how long the driver may be silent before workers give up (--elastic-timeout).
        start_timeout_s: limit in seconds for a host to be reached, and to reach the driver.
        environment: variables that workers there get besides those of their host.
        ssh: the options of ssh.
    """

    doors: Sequence[tuple[str, int]]
    secret: bytes
    same: str
    timeout_s: float
    start_timeout_s: float
    environment: Mapping[str, str]
    ssh: ssh.SshOptions


class RemoteCrew:
    """The workers on another host. The connection is opened when the object is made.

    Args:
        host: the name of the host, for ssh.
        told: the settings that are sent to the host.
        events: the queue that gets all events; see [Note: one queue] in ``crew``.
        room: counts bytes that were read from workers, as in ``LocalWorkers``.

    Attributes:
        host: the name of the host.
        is_lost: the connection is gone for good; a new object is needed to start workers there.
    """

    def __init__(self, host: str, told: HostConfig, events: queue.Queue[Event], room: Room) -> None:
        self.host, self._told, self._events, self._room = host, told, events, room
        self._link = Link(host, 0, False)
        self._lock = threading.Lock()  # guards the next two attributes
        self._running: set[int] = set()
        self.is_lost = False
        self._unread = bytearray()
        self._failed = ""
        self._is_reached = self._is_over = False
        token = f"guozhuang-{secrets.token_hex(8)}"
        header = {
            "folder": ssh.folder(),
            "is_remote": True,
            "environment": told.environment,
            "asked_environment": {},
            "lists": ssh.LISTS,
            "package": "guozhuang",
            "lost_after_s": LOST_AFTER_S,
            "lost_grace_s": _LOST_GRACE_S,
            "command": ["-m", "guozhuang.compat.horovod.runner.elastic.remote_host"],
            "node": {
                "host": host,
                "doors": [list(door) for door in told.doors],
                "secret": told.secret.hex(),
                "same": told.same,
                "timeout_s": told.timeout_s,
            },
        }
        command = ssh.command(host, told.ssh, 0.75 * told.start_timeout_s, token)
        self._link.start(command, token, header, self._take)
        self._thread = threading.Thread(target=self._run, name=f"horovod host {host}", daemon=True)
        self._thread.start()

    def start(self, worker: int, command: Sequence[str], num_local: int) -> None:
        """Start a worker on the host, at once or as soon as the host is reached.

        Args:
            worker: the number of the worker.
            command: the program and its arguments.
            num_local: the largest number of workers on the host, by which they share its cores.
        """
        with self._lock:
            if self.is_lost:
                self._events.put(Ended(worker, hosts_failure.LOST))
                return
            self._running.add(worker)
        self._link.say({"worker": worker, "command": list(command), "num_local": num_local})

    def end(self, worker: int, grace_s: float) -> None:
        """Send a worker SIGTERM, and SIGKILL after the grace."""
        self._link.say({"worker": worker, "stop": grace_s})

    def close(self) -> None:
        """End the run on the host: its workers are killed, a little later if the connection is lost."""
        self._is_over = True
        if not self._link.is_closed:
            self._link.say({"end": 0})
        self._thread.join(_CLOSE_S)
        if not self._link.is_closed:
            self._link.abandon()

    def _run(self) -> None:
        link, began, pinged = self._link, time.monotonic(), time.monotonic()
        while not link.is_closed:
            writing = link.writing()
            with contextlib.suppress(OSError, ValueError):
                # Before the host is reached its messages are always read: they are no output, and its time is limited.
                reading = [] if self._is_reached and self._room.is_full() else link.reading()
                found = select.select(reading, [] if writing is None else [writing], [], _LOOK_S)
                for descriptor in found[0]:
                    link.receive(descriptor)
                if found[1]:
                    link.send_more()
            now = time.monotonic()
            if now > pinged + _PING_S:
                pinged = now
                link.ping()
            if not (self._is_reached or self._failed) and now > began + self._told.start_timeout_s:
                doing = "was reached, but did not come to the driver" if link.messages else "could not be reached"
                self._failed = (
                    f"{doing} within {self._told.start_timeout_s:g} s (--start-timeout){hosts_failure.said(link)}"
                )
                link.abandon()
                break
            if link.look():
                break
        if not self._is_over:
            self._events.put(Lost(self.host, self._failed or hosts_failure.of(link).text))
        with self._lock:
            self.is_lost = True
            for worker in sorted(self._running):
                self._events.put(Ended(worker, hosts_failure.LOST))

    def _take(self, link: Link, stream: str, data: bytes) -> None:
        if stream == "stderr":
            for said in data.decode(errors="replace").splitlines():
                self._events.put(Said(self.host, said))
            return
        self._unread += data
        while b"\n" in self._unread:
            line, _, rest = bytes(self._unread).partition(b"\n")
            self._unread = bytearray(rest)
            self._understand(json.loads(line))

    def _understand(self, message: dict[str, Any]) -> None:
        if "reached" in message:
            self._is_reached = True
            self._events.put(Reached(self.host, str(message["reached"])))
        elif "failed" in message:
            self._failed = f"could not start: {message['failed']}"
        elif "pid" in message:
            self._events.put(Started(int(message["worker"]), int(message["pid"])))
        elif "stream" in message:
            data = base64.b64decode(message["data"])
            self._room.take(len(data))
            self._events.put(Printed(int(message["worker"]), str(message["stream"]), data))
        else:
            self._running.discard(int(message["worker"]))
            self._events.put(Ended(int(message["worker"]), int(message["code"])))
