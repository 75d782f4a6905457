"""The search for rank 0 when the launcher gives the ranks no port: rank 0 opens a ``Door``, and the others look for it.

[Note: meeting without a message] Every rank computes the same sequence of ports and the same secret (``net.meeting_point``).
Rank 0 opens its door (``net.door``) at the first port of the sequence that it can bind. The other ranks do not know which port
that is, when it will be open, or whether the program that listens at a port is rank 0: so they knock (``door.knock``) at
each port in turn, again and again until the time is over, until both sides have proved that they know the secret.
A program that is silent costs a knock a second or so; the door of another run refuses at once. No rank
decides anything from a port being free or busy *now*: such a decision would be wrong for a rank that starts late.

Where rank 0's host is uncertain there are several candidates, each with a thread that knocks at all ports. Where the launcher
does not name the host, rank 0 writes a note into a folder that the nodes share. A note carries a proof of the secret too, and
its address is knocked at like any other, so a note left by a run that died does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import queue
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net import client, interfaces
from guozhuang.net.door import NotOurDoorError, OpenDoor, knock
from guozhuang.net.meeting_point import PortSequence

# The limit of one try to connect grows per round: a silent foreign program must not cost much, a busy rank 0 may be slow.
_FIRST_KNOCK_S, _LONGEST_KNOCK_S = 1.0, 5.0
_STALE_NOTE_S = 24 * 3600.0
_log = logging.getLogger("guozhuang")


def listener_of(point: PortSequence) -> socket.socket:
    """Listen, on rank 0, at the first free port of the sequence, on the interface that other nodes can reach.

    Raises:
        UsageError: none of the ports can be bound; the text names them.
    """
    address = interfaces.LOOPBACK if point.is_one_node else interfaces.own_address(point.hosts, point.others)
    why: OSError | None = None
    for port in point.ports:
        try:
            return interfaces.listen_at(address, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = error
    tried = ", ".join(map(str, point.ports))
    what = f"rank 0 could listen on none of the ports {tried} of {address} that its launcher's numbers lead to: {why}"
    raise UsageError(explain(what, rank=0, fix="end what holds them, or export MASTER_PORT with a port that is free"))


def find(point: PortSequence, rank: int, timeout_s: float, *, log_notices: bool = True) -> OpenDoor:
    """Try all addresses at which rank 0's ``Door`` may listen, until it answers; every rank but 0 must call this.

    Args:
        point: the hosts and ports to try.
        rank: the rank of this process, for log and errors.
        timeout_s: time limit in seconds.
        log_notices: whether to log the results so far when the search takes long.

    Raises:
        WorldError: no door answered within ``timeout_s``; the text gives the result for each port of each host.
    """
    search = _Search(point, time.monotonic() + timeout_s, rank if log_notices else None)
    try:
        return search.run()
    except TimeoutError:
        what = f"found no door of rank 0 within {timeout_s:g} s; {search.report()}"
        fix = "look at the output of rank 0 for the first error, and check that no firewall stands between the nodes"
        if search.unresolved:
            names = ", ".join(search.unresolved)
            fix += (
                f"; put {names} into DNS or /etc/hosts of this node, or export MASTER_ADDR with the address of rank 0"
            )
        elif not point.is_one_node:
            fix += "; where rank 0 is on another node than those, export MASTER_ADDR with its address"
        raise WorldError(explain(what, rank=rank, fix=fix)) from None


@dataclass
class _Search:
    point: PortSequence
    deadline: float
    log_rank: int | None
    seen: dict[tuple[str, int], str] = field(default_factory=dict)
    unresolved: dict[str, str] = field(default_factory=dict)
    _answers: queue.SimpleQueue[OpenDoor] = field(default_factory=queue.SimpleQueue)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> OpenDoor:
        threads, notices = [], client.Notices()
        try:
            for host in dict.fromkeys(self.point.hosts):
                threads.append(self._start(host, self.point.ports))
            if not self.point.is_one_node:
                # "" stands for the result of `own_address`: if this rank runs on rank 0's node, rank 0 listens there, though
                # the node's name may mean loopback here.
                threads.append(self._start("", self.point.ports))
            followed: set[tuple[str, int]] = set()
            while True:
                noted = read_note(self.point)
                if noted is not None and noted not in followed:
                    followed.add(noted)
                    threads.append(self._start(noted[0], (noted[1],)))
                left_s = self.deadline - time.monotonic()
                try:
                    wait_s = min(left_s, notices.left_s(), 0.3 if self.point.note else left_s)
                    return self._answers.get(timeout=max(wait_s, 0.001))
                except queue.Empty:
                    if left_s <= 0:
                        raise TimeoutError from None
                if notices.are_due() and self.log_rank is not None:
                    notices.say(f"rank {self.log_rank} found no door of rank 0 yet; {self.report()}")
        finally:
            with self._lock:
                self._over.set()
            for thread in threads:
                thread.join(0.2)  # a thread that waits for a silent host ends later by itself, and drops its result
            while not self._answers.empty():
                self._answers.get().connection.close()

    def report(self) -> str:
        where: dict[str, dict[str, list[int]]] = {}
        for (host, port), why in sorted(self.seen.copy().items()):
            where.setdefault(host, {}).setdefault(why, []).append(port)
        parts = [
            f"{host}: " + "; ".join(f"{why} (port {', '.join(map(str, ports))})" for why, ports in reasons.items())
            for host, reasons in where.items()
        ]
        parts += [f"{host}: {why}" for host, why in self.unresolved.copy().items() if host not in where]
        if self.point.note and read_note(self.point) is None:
            parts.append(f"no note of rank 0 at {self.point.note}")
        return "knocked at " + " | ".join(parts) if parts else "no host to knock at is known"

    def _start(self, host: str, ports: Sequence[int]) -> threading.Thread:
        thread = threading.Thread(
            target=self._knock_at_all, args=(host, ports), name=f"guozhuang search {host}", daemon=True
        )
        thread.start()
        return thread

    def _knock_at_all(self, host: str, ports: Sequence[int]) -> None:
        if not host:  # computed in this thread, because looking up names can take long
            host = interfaces.own_address(self.point.hosts, self.point.others)
            if host in self.point.hosts:
                return
        limit_s = _FIRST_KNOCK_S
        for _ in client.tries(self.deadline, self._over):
            for port in ports:
                left_s = self.deadline - time.monotonic()
                if self._over.is_set() or left_s <= 0:
                    return
                try:
                    found = knock(host, port, self.point.secret, min(limit_s, left_s))
                except socket.gaierror as error:
                    self.unresolved[host] = client.why_no_connection(error)
                    break
                except OSError as error:
                    self.seen[host, port] = client.why_no_connection(error)
                except NotOurDoorError as error:
                    self.seen[host, port] = str(error)
                else:
                    self._hand_over(found)
                    return
            limit_s = min(2 * limit_s, _LONGEST_KNOCK_S)

    def _hand_over(self, found: OpenDoor) -> None:
        with self._lock:
            if not self._over.is_set():
                self._answers.put(found)
                return
        found.connection.close()


def write_note(point: PortSequence, address: tuple[str, int]) -> bool:
    """Write the address of rank 0's door into a file of the shared folder, atomically and readable by this user alone.

    Returns:
        Whether the file was written. If not, the log says why; the other ranks may find the door by the launcher's hints.
    """
    path = Path(point.note)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_stale(path.parent)
        handle, temporary = tempfile.mkstemp(prefix=".meet-", dir=path.parent)  # readable by this user alone: mode 0600
        try:
            with os.fdopen(handle, "w") as file:
                host, port = address
                json.dump({"host": host, "port": port, "proof": _proof_of_note(point.secret, host, port)}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _log.warning(
            "could not write where rank 0 is to %s: %s; set GUOZHUANG_MEETING_DIR to a shared folder", path, error
        )
        return False
    return True


def read_note(point: PortSequence) -> tuple[str, int] | None:
    """Return host and port from the file of ``write_note``; None if there is none yet, or another run or user wrote it."""
    if not point.note:
        return None
    try:
        with open(point.note) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            content = json.loads(file.read(4096))
        host, port, proof = str(content["host"]), int(content["port"]), str(content["proof"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (host, port) if hmac.compare_digest(proof, _proof_of_note(point.secret, host, port)) else None


def remove_note(point: PortSequence) -> None:
    """Remove the file with rank 0's address that ``write_note`` wrote, because all ranks have joined."""
    if read_note(point) is not None:
        with contextlib.suppress(OSError):
            os.unlink(point.note)


def _remove_stale(folder: Path) -> None:
    for each in folder.glob("meet-*"):
        with contextlib.suppress(OSError):
            if time.time() - each.stat().st_mtime > _STALE_NOTE_S:
                each.unlink()


def _proof_of_note(secret: bytes, host: str, port: int) -> str:
    return hmac.new(secret, f"note {host} {port}".encode(), hashlib.sha256).hexdigest()
