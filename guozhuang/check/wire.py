"""Lines of JSON over TCP, and listeners that let in only who knows a word. Every call has a limit.

The word travels in clear text, as everything of a check does; it keeps out what knocks at every port, and another check.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

_MOST_BYTES = 16 << 20  # of a line: nobody has more to say
_KNOCK_S = 2.0  # who connects must say who it is within this


class _HasFile(Protocol):
    def fileno(self) -> int: ...


F = TypeVar("F", bound=_HasFile)


def readable(sockets: Iterable[F], limit_s: float) -> list[F]:
    """Those of which there is something to read, or whose other side is gone; none if the limit passes first."""
    with selectors.DefaultSelector() as selector:  # select() itself knows no more than 1024 files
        for each in sockets:
            selector.register(each, selectors.EVENT_READ, each)
        return [key.data for key, _ in selector.select(max(limit_s, 0.0))]


class Line:
    """A connection that carries one JSON object per line.

    Args:
        connection: connected; closed with this object.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._held = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """For selectors."""
        return self.connection.fileno()

    def send(self, limit_s: float = _KNOCK_S, **words: Any) -> None:
        """Send one object.

        Raises:
            OSError: the other side is gone, or does not take it within the limit.
        """
        self.connection.settimeout(limit_s)
        self.connection.sendall(json.dumps(words).encode() + b"\n")

    def receive(self, limit_s: float) -> dict[str, Any]:
        """Wait for one object.

        Raises:
            TimeoutError: none came in time; what came of it is kept.
            OSError: the other side is gone, or speaks another language.
        """
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._held:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not readable([self.connection], left_s):
                raise TimeoutError(f"no word within {limit_s:g} s")
            got = self.connection.recv(1 << 16)
            if not got:
                raise ConnectionError("the connection ended")
            self._held += got
            if len(self._held) > _MOST_BYTES:
                raise ConnectionError("the other side speaks another language")
        line, _, self._held = self._held.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            raise ConnectionError("the other side speaks another language") from None
        if not isinstance(found, dict):
            raise ConnectionError("the other side speaks another language")
        return found

    def has_word(self) -> bool:
        """Whether a whole line is here already, so that no selector would tell."""
        return b"\n" in self._held

    def close(self) -> None:
        """Close; the other side notices."""
        self.connection.close()


def listen(address: str) -> socket.socket:
    """Listen at a free port of an address of this host.

    Raises:
        OSError: it is no address of this host.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def call(address: str, port: int, limit_s: float, **words: Any) -> Line:
    """Connect and say the first words.

    Raises:
        OSError: nobody listens there, or it cannot be reached within the limit.
    """
    line = Line(socket.create_connection((address, port), timeout=limit_s))
    try:
        line.send(limit_s, **words)
    except BaseException:
        line.close()
        raise
    return line


def answer(listener: socket.socket, word: str, limit_s: float) -> tuple[Line, dict[str, Any]]:
    """Wait for somebody who knows the word; others are sent away.

    Raises:
        TimeoutError: nobody came in time.
    """
    deadline = time.monotonic() + limit_s
    while (left_s := deadline - time.monotonic()) > 0:
        if not readable([listener], left_s):
            break
        with contextlib.suppress(OSError):
            line = Line(listener.accept()[0])
            try:
                said = line.receive(min(_KNOCK_S, left_s))
            except OSError:
                line.close()
                continue
            if hmac.compare_digest(str(said.get("word")).encode(), word.encode()):
                return line, said
            line.close()
    raise TimeoutError(f"nobody connected within {limit_s:g} s")
