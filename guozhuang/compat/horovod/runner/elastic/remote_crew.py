"""The driver's end of another host: ssh, the supervisor there, and what it tells of its workers.

See ``remote_host`` for what runs there. Each host has a thread here, which reads what comes and gives signs of life.
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
    """What every host is told.

    Attributes:
        doors: address and port of each door of the driver's host.
        secret: of the run.
        same: the identity of the driver's host.
        timeout_s: of the elastic job.
        start_timeout_s: limit for a host to be reached.
        environment: what workers there get besides what they find.
        ssh: how to connect.
    """

    doors: Sequence[tuple[str, int]]
    secret: bytes
    same: str
    timeout_s: float
    start_timeout_s: float
    environment: Mapping[str, str]
    ssh: ssh.SshOptions


class RemoteCrew:
    """Workers on another host.

    Args:
        host: its name, for ssh.
        told: to it.
        events: where all that happens goes; see [Note: one queue] in ``crew``.
        room: for what workers print, as in ``LocalWorkers``.

    Attributes:
        host: as above.
        is_lost: nothing can be started there by this object any more.
    """

    def __init__(self, host: str, told: HostConfig, events: queue.Queue[Event], room: Room) -> None:
        self.host, self._told, self._events, self._room = host, told, events, room
        self._link = Link(host, 0, False)
        self._lock = threading.Lock()  # for the two that follow
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
        """Start a worker there, at once or as soon as the host is reached.

        Args:
            worker: its number.
            command: the program and its arguments.
            num_local: how many workers the host may have.
        """
        with self._lock:
            if self.is_lost:
                self._events.put(Ended(worker, hosts_failure.LOST))
                return
            self._running.add(worker)
        self._link.say({"worker": worker, "command": list(command), "num_local": num_local})

    def end(self, worker: int, grace_s: float) -> None:
        """Ask a worker to end; it is killed after the grace."""
        self._link.say({"worker": worker, "stop": grace_s})

    def close(self) -> None:
        """End the host's part of the run: its workers are killed, also where the connection is gone, a little later."""
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
                # A host that is being reached has nothing to print, and a limit.
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
