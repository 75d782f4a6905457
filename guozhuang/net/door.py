"""A door in front of a store: it admits the ranks that know the secret of the run, and relays them to the store on loopback.

PyTorch's ``TCPStore`` has no secret: a program that reaches its port can read and set every key. So a store that several nodes
share listens on loopback only, and its node opens a ``Door`` on the network; the other nodes ``pass_through`` it.

[Note: the handshake] The client and the door each send a magic word and 32 random bytes; then the client
sends HMAC-SHA256(secret, "knock" + the door's bytes + its own), and the door, if that is right, the port of its store and
HMAC-SHA256(secret, "door" + the same + the port). So each sees that the other knows the secret now, the secret is never
sent, and no answer can be played back: not later, because the bytes are fresh, nor to its sender, because the words differ.
What follows is relayed as it is, in clear.

[Note: strangers] A client that has not proved itself costs one connection and 72 bytes for at most ``HANDSHAKE_S``; of more
than ``_MAX_STRANGERS`` at a time the oldest is dropped, because an honest one needs milliseconds. No client waits for another:
one thread serves all connections of a door by asyncio, and reads no faster than the other side takes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import threading
import time

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net import client
from guozhuang.net.relay import Relay, relay_both_ways

HANDSHAKE_S = 5.0
_MAGIC = b"GZ-DOOR1"
_NONCE_BYTES = 32
_LET_IN, _REFUSED = b"Y", b"N"
_MAX_STRANGERS = 128
_MAX_NAMED = 256
_RETRY_S = 0.1
_log = logging.getLogger("guozhuang")


class NotOurDoorError(Exception):
    """The program that listens there is no door that knows our secret; the text says what it did instead."""


class WrongSecretError(NotOurDoorError):
    """There is a door, but of another run: it does not know our secret."""


class Door:
    """Admits clients that know the secret, and relays them to a store on loopback. It has its own thread; ``close`` ends it.

    Args:
        listener: a bound and listening socket on the interface that others reach this node by; the door owns it from now on.
        store_port: the TCP port on which the store listens on 127.0.0.1.
        secret: shared by all ranks of the run, at least one byte; 16 random bytes or more are worth the name.

    Raises:
        UsageError: the secret is empty.
    """

    def __init__(self, listener: socket.socket, store_port: int, secret: bytes) -> None:
        _check_secret(secret)
        self._store_port, self._secret = store_port, secret
        self._strangers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._named: set[tuple[str, str]] = set()
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._relay = Relay(listener, self._admit, "guozhuang door")

    def close(self) -> None:
        """Stop listening, end every connection and the thread. A second call does nothing."""
        self._relay.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._strangers) >= _MAX_STRANGERS:  # see [Note: strangers]
            oldest = next(iter(self._strangers))
            self._log_once(self._strangers.pop(oldest), f"{_MAX_STRANGERS} others knocked after it, before it was done")
            oldest.cancel()
        self._strangers[task] = writer
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                why_not = await self._examine(reader, writer)
        except TimeoutError:
            why_not = f"it did not finish its knock within {HANDSHAKE_S:g} s"
        except (OSError, EOFError):
            why_not = "it went away in the middle of its knock"
        finally:
            self._strangers.pop(task, None)
        if why_not:
            self._log_once(writer, why_not)
            return
        try:
            inside = await asyncio.open_connection("127.0.0.1", self._store_port)
        except OSError:
            _log.warning("a rank came through the door, but no store listens on loopback port %d", self._store_port)
            return
        await relay_both_ways(reader, writer, inside)

    async def _examine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The door's side of [Note: the handshake]; "" if the client knows the secret, else why it is refused."""
        if await reader.readexactly(len(_MAGIC)) != _MAGIC:
            return "it does not knock as a rank does"
        theirs, ours = await reader.readexactly(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        writer.write(_MAGIC + ours)
        proof = await reader.readexactly(hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, _proof(self._secret, b"knock", ours, theirs)):
            writer.write(_REFUSED)
            return "it does not know the secret of this run"
        told = self._store_port.to_bytes(2, "big")
        writer.write(_LET_IN + told + _proof(self._secret, b"door", ours, theirs, told))
        return ""

    def _log_once(self, writer: asyncio.StreamWriter, why: str) -> None:
        peer = str((writer.get_extra_info("peername") or ("an unknown address",))[0])
        # By cause as well: a host may first have sent a scanner, and then ranks with a wrong secret.
        if (peer, why) not in self._named and len(self._named) < _MAX_NAMED:
            self._named.add((peer, why))
            where = "{}:{}".format(*self.address)
            _log.warning("refused a connection from %s to %s: %s (said once for this address)", peer, where, why)


class Passage(tuple[str, int]):
    """``(host, port)`` on loopback of this node, which lead through a door. ``close`` ends the thread behind it."""

    _relay: Relay

    @property
    def host(self) -> str:
        """The loopback address."""
        return self[0]

    @property
    def port(self) -> int:
        """The TCP port."""
        return self[1]

    def close(self) -> None:
        """Stop listening, end every connection and the thread. A second call does nothing."""
        self._relay.close()


def pass_through(
    host: str, port: int, secret: bytes, timeout_s: float, *, rank: int | None = None, says: bool = True
) -> Passage:
    """Open a listener on loopback of this node whose connections are relayed through the door at ``host:port``.

    The door need not be open yet: it is tried until the time is over. Each process may call for itself.

    Args:
        host: name or address of the node that has the door.
        port: the door's TCP port.
        secret: the one the door was given.
        timeout_s: limit in seconds for coming through the first time; each later connection has ``HANDSHAKE_S``.
        rank: of this process, for the texts.
        says: whether to log what this process waits for when it takes long.

    Returns:
        Host and port for ``torch.distributed.TCPStore``; it has a ``close`` method, and lives until that is called.

    Raises:
        UsageError: the secret is empty.
        WorldError: no door that knows the secret answered in time; at once where there is a door that refuses the secret.
    """
    deadline, over = time.monotonic() + timeout_s, threading.Event()
    why = "the name is not resolved yet"

    def come() -> socket.socket | None:
        nonlocal why
        while not over.is_set() and (left_s := deadline - time.monotonic()) > 0:
            try:
                return knock(host, port, secret, min(HANDSHAKE_S, left_s))
            except NotOurDoorError as error:
                if isinstance(error, WrongSecretError):
                    raise
                why = str(error)
            except OSError as error:
                why = client.why_no_connection(error)
            over.wait(min(_RETRY_S, left_s))
        return None

    def still() -> str:
        return f"{_me(rank)} waits for the door at {host}:{port}: {why}" if says else ""

    try:
        first = client.attempt(timeout_s + 1.0, come, still)
    except WrongSecretError as error:
        fix = "start all ranks from one launcher, or give all of them the same GUOZHUANG_SECRET"
        raise WorldError(explain(f"the door at {host}:{port} is closed to us: {error}", rank=rank, fix=fix)) from error
    except client.OverdueError:
        first = None
    finally:
        over.set()
    if first is None:
        what = f"could not come through the door at {host}:{port} within {timeout_s:g} s: {why}"
        fix = "check that the node that keeps the store is up, its name or address, and that no firewall stands between"
        raise WorldError(explain(what, rank=rank, fix=fix))
    return passage_from(first, host, port, secret)


def passage_from(first: socket.socket, host: str, port: int, secret: bytes) -> Passage:
    """A passage to the door at ``host:port`` through which ``knock`` came before.

    Args:
        first: the connection that ``knock`` returned; the passage owns it from now on, and uses it for its first client.
        host: as given to ``knock``.
        port: as given to ``knock``.
        secret: as given to ``knock``.
    """
    waiting = [first]

    async def follow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        try:
            through = (
                waiting.pop() if waiting else await loop.run_in_executor(None, knock, host, port, secret, HANDSHAKE_S)
            )
        except (OSError, NotOurDoorError) as error:
            _log.warning("could not come through the door at %s:%d again: %s", host, port, error)
            return
        await relay_both_ways(reader, writer, await asyncio.open_connection(sock=through))

    def drop() -> None:
        while waiting:
            waiting.pop().close()

    try:
        listener = socket.create_server(("127.0.0.1", 0))
    except BaseException:
        drop()
        raise
    passage = Passage(listener.getsockname()[:2])
    passage._relay = Relay(listener, follow, "guozhuang passage", drop)
    return passage


def knock(host: str, port: int, secret: bytes, timeout_s: float) -> socket.socket:
    """Connect to the door at ``host:port`` and prove to each other that both know the secret.

    Args:
        host: name or address.
        port: TCP port.
        secret: the secret of the run.
        timeout_s: limit for all of it, in seconds.

    Returns:
        The connection, which leads to the store.

    Raises:
        OSError: nobody listens there, or cannot be reached.
        WrongSecretError: a door, which does not know our secret.
        NotOurDoorError: the program there is no door: it is silent, or says something else.
        UsageError: the secret is empty.
    """
    return enter(host, port, secret, timeout_s)[0]


def enter(host: str, port: int, secret: bytes, timeout_s: float) -> tuple[socket.socket, int]:
    """Do as ``knock``, and return the port of the store too, for processes on the door's own node, which need no door."""
    _check_secret(secret)
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        if connection.getsockname() == connection.getpeername():
            # A port below the ephemeral range cannot meet itself, any other can: TCP allows a connection to itself.
            raise NotOurDoorError("nobody listens there")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(_MAGIC + ours)
        if _receive(connection, len(_MAGIC), deadline) != _MAGIC:
            raise NotOurDoorError("it answers, but not as a door of guozhuang does")
        theirs = _receive(connection, _NONCE_BYTES, deadline)
        connection.sendall(_proof(secret, b"knock", theirs, ours))
        if _receive(connection, 1, deadline) != _LET_IN:
            raise WrongSecretError("it belongs to another run (the secrets differ)")
        told = _receive(connection, 2, deadline)
        proof = _receive(connection, hashlib.sha256().digest_size, deadline)
        if not hmac.compare_digest(proof, _proof(secret, b"door", theirs, ours, told)):
            raise WrongSecretError("it claims to know the secret of this run, and does not")
        connection.settimeout(None)
        return connection, int.from_bytes(told, "big")
    except TimeoutError as error:
        connection.close()
        raise NotOurDoorError(f"it accepted the connection and did not answer within {timeout_s:g} s") from error
    except (ConnectionError, EOFError) as error:
        connection.close()
        raise NotOurDoorError("it accepted the connection and ended it") from error
    except BaseException:
        connection.close()
        raise


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Read exactly so many bytes, however slowly they come, until the deadline."""
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
        if time.monotonic() > deadline:
            raise TimeoutError
    return data


def _me(rank: int | None) -> str:
    return f"rank {rank}" if rank is not None else "this process"


def _proof(secret: bytes, word: bytes, doors: bytes, knockers: bytes, told: bytes = b"") -> bytes:
    return hmac.new(secret, word + doors + knockers + told, hashlib.sha256).digest()


def _check_secret(secret: bytes) -> None:
    if not secret:
        raise UsageError(explain("the secret of a door is empty", fix="give secrets.token_bytes(32) to all ranks"))
