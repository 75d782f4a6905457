"""A door in front of a store: it admits the ranks that know the secret of the run, and relays them to the store on loopback.

PyTorch's ``TCPStore`` has no secret: a program that reaches its port can read and set every key. So a store that several nodes
share listens on loopback only, and its node opens a ``Door`` on the network; ranks of other nodes call ``pass_through``.

[Note: the handshake] The client and the door each send a magic word and 32 random bytes; then the client
sends HMAC-SHA256(secret, "knock" + the door's bytes + its own). If that is right, the door sends the port of its store and
HMAC-SHA256(secret, "door" + the same bytes + the port). So each side proves that it knows the secret, the secret is never
sent, and no answer can be replayed: not later, because the bytes are fresh, nor back to its sender, because the words differ.
All later bytes are relayed unchanged and unencrypted.

[Note: strangers] A stranger is a client that has not proved yet that it knows the secret. It costs one connection and 72 bytes
for at most ``HANDSHAKE_S``. When there are more than ``_MAX_STRANGERS``, the oldest is dropped: a real rank needs milliseconds.
A rank that is dropped all the same, because many strangers came in these milliseconds, knocks again.
No client waits for another: one asyncio thread serves all connections of a door, and reads no faster than the receiver reads.
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
from dataclasses import dataclass

from guozhuang.errors import UsageError, WorldError, explain
from guozhuang.net import client
from guozhuang.net.relay import Relay, relay_both_ways

HANDSHAKE_S = 5.0
LATER_S = 30.0  # limit in seconds for each connection after the first one: a door under a flood is tried again so long
_MAGIC = b"GZ-DOOR1"
_NONCE_BYTES = 32
_LET_IN, _REFUSED = b"Y", b"N"
_MAX_STRANGERS = 128
_MAX_NAMED = 256
_log = logging.getLogger("guozhuang")


class NotOurDoorError(Exception):
    """The program that listens at an address is not a ``Door`` of this run; the text says what that program did instead."""


class WrongSecretError(NotOurDoorError):
    """The ``Door`` at an address belongs to another run: it does not know the secret of this run."""


class Door:
    """A listener that relays clients that know the secret to a store on loopback, in a thread of its own until ``close``.

    Args:
        listener: a bound and listening socket on the interface that other nodes can reach; the door owns it from now on.
        store_port: the TCP port on which the store listens on 127.0.0.1.
        secret: shared by all ranks of the run, at least one byte; safe from 16 random bytes up.

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
        if len(self._strangers) >= _MAX_STRANGERS:  # drop the oldest client that gave no proof yet
            oldest = next(iter(self._strangers))
            why = f"{_MAX_STRANGERS} other connections began before its handshake was done"
            self._log_once(self._strangers.pop(oldest), why)
            oldest.cancel()
        self._strangers[task] = writer
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                why_not = await self._examine(reader, writer)
        except TimeoutError:
            why_not = f"it did not finish the handshake within {HANDSHAKE_S:g} s"
        except (OSError, EOFError):
            why_not = "it disconnected during the handshake"
        finally:
            self._strangers.pop(task, None)
        if why_not:
            self._log_once(writer, why_not)
            return
        try:
            inside = await asyncio.open_connection("127.0.0.1", self._store_port)
        except OSError:
            _log.warning("a rank passed the door, but no store listens on loopback port %d", self._store_port)
            return
        await relay_both_ways(reader, writer, inside)

    async def _examine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Do the door's side of the handshake; return "" if the client knows the secret, else the reason for refusing it."""
        if await reader.readexactly(len(_MAGIC)) != _MAGIC:
            return "it did not begin the handshake of a rank"
        theirs, ours = await reader.readexactly(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        writer.write(_MAGIC + ours)
        proof = await reader.readexactly(hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, _proof(self._secret, b"knock", ours, theirs)):
            writer.write(_REFUSED)
            return "it does not know the secret of this run"
        port_bytes = self._store_port.to_bytes(2, "big")
        writer.write(_LET_IN + port_bytes + _proof(self._secret, b"door", ours, theirs, port_bytes))
        return ""

    def _log_once(self, writer: asyncio.StreamWriter, why: str) -> None:
        peer = str((writer.get_extra_info("peername") or ("an unknown address",))[0])
        # Log once per address and cause, not per address: after a port scan from a host, log its ranks' wrong secret too.
        if (peer, why) not in self._named and len(self._named) < _MAX_NAMED:
            self._named.add((peer, why))
            where = "{}:{}".format(*self.address)
            _log.warning("refused a connection from %s to %s: %s (logged once for this address)", peer, where, why)


@dataclass(frozen=True)
class OpenDoor:
    """A connection through a ``Door`` that accepted this process, and the door's address; a context manager that closes it.

    Attributes:
        connection: a connection that passed the door's handshake; the door relays it to the store.
        host: name or address at which the door was found.
        port: the door's TCP port.
        store_port: the TCP port of the store, which processes on the door's own node can use directly.
    """

    connection: socket.socket
    host: str
    port: int
    store_port: int

    def __enter__(self) -> socket.socket:
        return self.connection

    def __exit__(self, *_: object) -> None:
        self.connection.close()


class Passage(tuple[str, int]):
    """The loopback ``(host, port)`` of a listener that relays its connections through a ``Door``; ``close`` ends the relay."""

    _relay: Relay
    _over: threading.Event  # ends the tries of connections that are not through the door yet

    @property
    def host(self) -> str:
        """The loopback address at which the listener accepts connections."""
        return self[0]

    @property
    def port(self) -> int:
        """The TCP port at which the listener accepts connections."""
        return self[1]

    def close(self) -> None:
        """Stop listening, end every connection and the thread. A second call does nothing."""
        self._over.set()
        self._relay.close()


def pass_through(
    host: str, port: int, secret: bytes, timeout_s: float, *, rank: int | None = None, log_notices: bool = True
) -> Passage:
    """Open a listener on loopback of this node whose connections are relayed through the door at ``host:port``.

    The door need not be open yet: this process retries until the time is over. Any number of processes may call this.

    Args:
        host: name or address of the node that has the door.
        port: the door's TCP port.
        secret: the secret of the run, the same as the door's.
        timeout_s: limit in seconds for the first connection; the limit of each later one is ``LATER_S``.
        rank: the rank of this process, for log and errors.
        log_notices: whether to log notices while the connection takes long.

    Returns:
        Host and port for ``torch.distributed.TCPStore``, relayed until their ``close`` method is called.

    Raises:
        UsageError: the secret is empty.
        WorldError: no door that knows the secret answered in time; raised at once where a door refuses the secret.
    """
    deadline, over = time.monotonic() + timeout_s, threading.Event()
    seen = ["the name is not resolved yet"]

    def still() -> str:
        return f"{client.who(rank)} waits for the door at {host}:{port}: {seen[0]}" if log_notices else ""

    try:
        first = client.attempt(timeout_s + 1.0, lambda: _knock_again(host, port, secret, deadline, over, seen), still)
    except WrongSecretError as error:
        fix = "start all ranks from one launcher, or give all of them the same GUOZHUANG_SECRET"
        raise WorldError(
            explain(f"the door at {host}:{port} refuses this process: {error}", rank=rank, fix=fix)
        ) from error
    except client.OverdueError:
        first = None
    finally:
        over.set()
    if first is None:
        what = f"could not pass the door at {host}:{port} within {timeout_s:g} s: {seen[0]}"
        fix = "check that the node that keeps the store is up, its name or address, and that no firewall stands between"
        raise WorldError(explain(what, rank=rank, fix=fix))
    return passage_from(first, secret)


def passage_from(first: OpenDoor, secret: bytes) -> Passage:
    """Return a ``Passage`` through the ``Door`` that accepted the connection ``first``.

    Args:
        first: the result of ``knock``; the passage owns its connection from now on, and uses it for its first client.
        secret: the secret that was given to ``knock``.
    """
    waiting, host, port = [first], first.host, first.port
    over = threading.Event()

    async def follow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        through, seen = waiting.pop() if waiting else None, [""]
        if through is None:
            arguments = (host, port, secret, time.monotonic() + LATER_S, over, seen)
            try:
                through = await asyncio.get_running_loop().run_in_executor(None, _knock_again, *arguments)
            except WrongSecretError as error:
                seen = [str(error)]
        if through is None:
            _log.warning("could not pass the door at %s:%d again: %s", host, port, seen[0])
            return
        await relay_both_ways(reader, writer, await asyncio.open_connection(sock=through.connection))

    def drop() -> None:
        while waiting:
            waiting.pop().connection.close()

    try:
        listener = socket.create_server(("127.0.0.1", 0))
    except BaseException:
        drop()
        raise
    passage = Passage(listener.getsockname()[:2])
    passage._over = over
    passage._relay = Relay(listener, follow, "guozhuang passage", drop)
    return passage


def _knock_again(
    host: str, port: int, secret: bytes, deadline: float, over: threading.Event, seen: list[str]
) -> OpenDoor | None:
    """Call ``knock`` again and again until the door opens; return None at the deadline, or when ``over`` is set.

    A door under a flood of strangers refuses ranks too, see [Note: strangers].

    Args:
        host, port, secret: as for ``knock``.
        deadline: a time of ``time.monotonic``.
        over: ends the tries early.
        seen: its first item is replaced by the reason why the last try failed.

    Raises:
        WrongSecretError: the door does not know our secret; there is no further try.
    """
    for left_s in client.tries(deadline, over):
        try:
            return knock(host, port, secret, min(HANDSHAKE_S, left_s))
        except WrongSecretError:
            raise
        except NotOurDoorError as error:
            seen[0] = str(error)
        except OSError as error:
            seen[0] = client.why_no_connection(error)
    return None


def knock(host: str, port: int, secret: bytes, timeout_s: float) -> OpenDoor:
    """Connect to the ``Door`` at ``host:port`` and prove to it that we know the secret; see [Note: the handshake].

    Args:
        host: name or address.
        port: TCP port.
        secret: the secret of the run.
        timeout_s: limit for connection and handshake together, in seconds.

    Raises:
        OSError: no program listens at the address, or the host cannot be reached.
        WrongSecretError: the door does not know our secret.
        NotOurDoorError: the program at the address is not a door: it is silent, or answers something else.
        UsageError: the secret is empty.
    """
    _check_secret(secret)
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        if connection.getsockname() == connection.getpeername():
            # TCP allows a socket to connect to itself, which happens by chance with ports of the ephemeral range.
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
        port_bytes = _receive(connection, 2, deadline)
        proof = _receive(connection, hashlib.sha256().digest_size, deadline)
        if not hmac.compare_digest(proof, _proof(secret, b"door", theirs, ours, port_bytes)):
            raise WrongSecretError("it claims to know the secret of this run, and does not")
        connection.settimeout(None)
        return OpenDoor(connection, host, port, int.from_bytes(port_bytes, "big"))
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
    """Read exactly ``num_bytes`` bytes, in any number of parts, before the deadline."""
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


def _proof(secret: bytes, word: bytes, doors: bytes, knockers: bytes, port_bytes: bytes = b"") -> bytes:
    return hmac.new(secret, word + doors + knockers + port_bytes, hashlib.sha256).digest()


def _check_secret(secret: bytes) -> None:
    if not secret:
        raise UsageError(explain("the secret of a door is empty", fix="give secrets.token_bytes(32) to all ranks"))
