"""How ranks meet whose launcher tells them no port: rank 0 opens a door, and the others look for it.

[Note: meeting without a message] Every rank comes by itself to the same sequence of ports and to the same secret (``ports``).
Rank 0 opens its door (``door``) at the first port of the sequence that it can bind, and never looks whether others listen
there. The others do not know which one that is, when it will be there, or whether what listens at a port is it: so they knock
at each port in turn, again and again until the time is over, and stay where both sides prove that they know the secret.
A stranger who is silent costs a knock a second or so, and another run's door tells at once that it is the wrong one. Nobody
decides anything from a port being free or busy *now*, which is where the rank that comes late goes wrong.

Where rank 0's host is uncertain there are several guesses, each with a thread that goes round the ports. Where no launcher
tells it, rank 0 leaves a note in a folder that the nodes share. Notes carry a proof too, and what they point to is knocked
at like the rest, so that one left from a run that died misleads nobody.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import queue
import random
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
from guozhuang.net.door import NotOurDoorError, Passage, enter, passage_from
from guozhuang.net.meeting_point import PortSequence

# A knock gets more time in each round: a stranger's silence must not cost much, a busy rank 0 may need a moment.
_FIRST_KNOCK_S, _LONGEST_KNOCK_S = 1.0, 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_STALE_NOTE_S = 24 * 3600.0
LOOPBACK = "127.0.0.1"
# Addresses of the documentation's networks: only the kernel's table of routes is asked, nothing is sent.
_SOMEWHERE = ("198.51.100.1", "2001:db8::1")
_log = logging.getLogger("guozhuang")


@dataclass(frozen=True)
class OpenDoor:
    """Rank 0's door, and a connection through it.

    Attributes:
        connection: a connection that passed the door's handshake.
        host: where the door is.
        port: its TCP port.
        store_port: of the store behind it, on rank 0's node.
    """

    connection: socket.socket
    host: str
    port: int
    store_port: int


def listener_of(point: PortSequence) -> socket.socket:
    """On rank 0: listen on the first port of the sequence that is free, on the interface that other nodes reach it by.

    Raises:
        UsageError: none of the ports can be had; the text names them.
    """
    address = LOOPBACK if point.is_one_node else own_address(point.hosts, point.others)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    why: OSError | None = None
    for port in point.ports:
        try:
            return socket.create_server((address, port), family=family)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = error
    tried = ", ".join(map(str, point.ports))
    what = f"rank 0 could listen on none of the ports {tried} of {address} that its launcher's numbers lead to: {why}"
    raise UsageError(explain(what, rank=0, fix="end what holds them, or export MASTER_PORT with a port that is free"))


def own_address(hints: Sequence[str], others: Sequence[str]) -> str:
    """The address of this node that other nodes reach it by; loopback only if there is no sign of any other.

    Args:
        hints: names and addresses by which this node may be known to the others.
        others: names of some of them.

    Bridges to containers and virtual machines lead nowhere outside of their node, and have the same address on many nodes.
    """
    mine, inner = _own_addresses()
    for hint in hints:
        known = [each for each in resolve(hint) if not is_loopback(each) and each not in inner]
        found = next((each for each in known if each in mine), None)
        if found is not None:
            return found
        if known:
            break  # another node's, or a translated one: those that follow are less likely, and may be mine by chance
    # A name that leads to loopback on its own node (as Debian's 127.0.1.1) leads the others elsewhere: take their direction.
    for other in (*others, *hints):
        with contextlib.suppress(WorldError):
            address = interfaces.own_address_towards(other)
            if not is_loopback(address) and address not in inner:
                return address
    if any(interfaces.is_address(hint) and is_loopback(hint) for hint in hints):
        return LOOPBACK  # where the others look: nodes that are all on this machine
    return _outward_address(mine)


def find(point: PortSequence, rank: int, timeout_s: float, *, says: bool = True) -> OpenDoor:
    """On every rank but 0: knock at all places where rank 0 may be until a door opens.

    Args:
        point: where it may open.
        rank: of this process, for the texts.
        timeout_s: for how long, in seconds.
        says: whether to log what was found so far when it takes long.

    Raises:
        WorldError: none did within ``timeout_s``; the text says what was found at each port of each host.
    """
    search = _Search(point, time.monotonic() + timeout_s, rank if says else None)
    try:
        return search.run()
    except TimeoutError:
        what = f"found no door of rank 0 within {timeout_s:g} s; {search.report()}"
        fix = "look at the output of rank 0 for the first error, and check that no firewall stands between the nodes"
        if search.said_of_hosts:
            names = ", ".join(search.said_of_hosts)
            fix += (
                f"; put {names} into DNS or /etc/hosts of this node, or export MASTER_ADDR with the address of rank 0"
            )
        elif not point.is_one_node:
            fix += "; where rank 0 is on another node than those, export MASTER_ADDR with its address"
        raise WorldError(explain(what, rank=rank, fix=fix)) from None


def passage_to_rank_0(point: PortSequence, rank: int, timeout_s: float) -> Passage:
    """Find the door of rank 0, and open a passage to the store behind it, for any number of clients on this node.

    Raises:
        WorldError: there was none within ``timeout_s``.
    """
    found = find(point, rank, timeout_s)
    return passage_from(found.connection, found.host, found.port, point.secret)


@dataclass
class _Search:
    point: PortSequence
    deadline: float
    speaker: int | None
    seen: dict[tuple[str, int], str] = field(default_factory=dict)
    said_of_hosts: dict[str, str] = field(default_factory=dict)
    _answers: queue.SimpleQueue[OpenDoor] = field(default_factory=queue.SimpleQueue)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> OpenDoor:
        threads, notices = [], client.Notices()
        try:
            for host in dict.fromkeys(self.point.hosts):
                threads.append(self._start(host, self.point.ports))
            if not self.point.is_one_node:
                # On rank 0's own node its name may lead to loopback, where its door is not: come to it as it did itself.
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
                if notices.are_due() and self.speaker is not None:
                    notices.say(f"rank {self.speaker} found no door of rank 0 yet; {self.report()}")
        finally:
            with self._lock:
                self._over.set()
            for thread in threads:
                thread.join(0.2)  # one that waits for a silent host ends by itself, and hands nothing over any more
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
        parts += [f"{host}: {why}" for host, why in self.said_of_hosts.copy().items() if host not in where]
        if self.point.note and read_note(self.point) is None:
            parts.append(f"no note of rank 0 at {self.point.note}")
        return "knocked at " + " | ".join(parts) if parts else "no host to knock at is known"

    def _start(self, host: str, ports: Sequence[int]) -> threading.Thread:
        thread = threading.Thread(
            target=self._go_round, args=(host, ports), name=f"guozhuang search {host}", daemon=True
        )
        thread.start()
        return thread

    def _go_round(self, host: str, ports: Sequence[int]) -> None:
        if not host:  # here, where names are looked up, it delays nobody
            host = own_address(self.point.hosts, self.point.others)
            if host in self.point.hosts:
                return
        limit_s, pause_s = _FIRST_KNOCK_S, _FIRST_PAUSE_S
        while not self._over.is_set():
            for port in ports:
                left_s = self.deadline - time.monotonic()
                if self._over.is_set() or left_s <= 0:
                    return
                try:
                    connection, store_port = enter(host, port, self.point.secret, min(limit_s, left_s))
                except socket.gaierror as error:
                    self.said_of_hosts[host] = client.why_no_connection(error)
                    break
                except OSError as error:
                    self.seen[host, port] = client.why_no_connection(error)
                except NotOurDoorError as error:
                    self.seen[host, port] = str(error)
                else:
                    self._hand_over(OpenDoor(connection, host, port, store_port))
                    return
            limit_s = min(2 * limit_s, _LONGEST_KNOCK_S)
            # Not all at once: thousands of ranks may be knocking at one node.
            self._over.wait(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def _hand_over(self, found: OpenDoor) -> None:
        with self._lock:
            if not self._over.is_set():
                self._answers.put(found)
                return
        found.connection.close()


def write_note(point: PortSequence, address: tuple[str, int]) -> bool:
    """Write into the shared folder where the door is, in a file that this user alone can read and that appears whole.

    Returns:
        Whether it was written. If not, the log says why; the other ranks may find the door by the launcher's hints.
    """
    path = Path(point.note)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_stale(path.parent)
        handle, temporary = tempfile.mkstemp(prefix=".meet-", dir=path.parent)  # mode 0600
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
    """Host and port in the note of rank 0 of this very run; None if there is no note yet, or another run or user wrote it."""
    if not point.note:
        return None
    try:
        with open(point.note) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            told = json.loads(file.read(4096))
        host, port, proof = str(told["host"]), int(told["port"]), str(told["proof"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (host, port) if hmac.compare_digest(proof, _proof_of_note(point.secret, host, port)) else None


def remove_note(point: PortSequence) -> None:
    """Remove the note of ``write_note``, because all ranks have come."""
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


def resolve(host: str) -> list[str]:
    """The addresses that a name resolves to on this node, IPv4 first; empty where it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted(dict.fromkeys(str(info[4][0]) for info in found), key=lambda a: ":" in a)


def _own_addresses() -> tuple[set[str], set[str]]:
    """Addresses of this node that other nodes may reach, and addresses of bridges within this node."""
    mine: set[str] = set()
    inner: set[str] = set()
    for name, known in interfaces.addresses().items():
        (inner if interfaces.is_local_bridge(name) else mine).update(known)
    return mine, inner


def _outward_address(mine: set[str]) -> str:
    """The address that the default route leaves from; without a route the first that is not loopback, IPv4 before IPv6."""
    for somewhere in _SOMEWHERE:
        with contextlib.suppress(WorldError):
            return interfaces.own_address_towards(somewhere)
    usable = [
        each for each in mine if not (is_loopback(each) or ipaddress.ip_address(each.partition("%")[0]).is_link_local)
    ]
    return min(usable, key=lambda a: (":" in a, a), default=LOOPBACK)


def is_loopback(address: str) -> bool:
    """Whether only processes of the same node reach the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
