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
_KNOCK_BYTES = 4096  # and in no more than this
_MOST_CALLERS = 256  # who have not said yet who they are; of more the oldest go


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
        while not self.has_word():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not readable([self.connection], left_s):
                raise TimeoutError(f"no word within {limit_s:g} s")
            self.take_in()
        line, _, self._held = self._held.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            raise ConnectionError("the other side speaks another language") from None
        if not isinstance(found, dict):
            raise ConnectionError("the other side speaks another language")
        return found

    def take_in(self, most_bytes: int = _MOST_BYTES) -> None:
        """Keep what has arrived, for :meth:`receive`; only where there is something to read.

        Raises:
            OSError: the other side is gone, or says more than ``most_bytes`` in one line.
        """
        got = self.connection.recv(1 << 16)
        if not got:
            raise ConnectionError("the connection ended")
        self._held += got
        if len(self._held) > most_bytes and not self.has_word():
            raise ConnectionError("the other side speaks another language")

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


class Callers:
    """Those who connected to a listener and have not said yet who they are: all are heard at once, each has two seconds.

    Who says nothing, or the wrong thing, holds nobody up: a port of a cluster is knocked at by scanners and by what
    belongs to other runs.

    Args:
        listener: stays open when this is closed.
        word: what a caller must know.
    """

    def __init__(self, listener: socket.socket, word: str) -> None:
        self._listener = listener
        self._word = word.encode()
        self._waiting: dict[Line, float] = {}  # until when

    def next(self, limit_s: float) -> tuple[Line, dict[str, Any]]:
        """Wait for somebody who knows the word; others are sent away.

        Raises:
            TimeoutError: nobody came in time.
        """
        deadline = time.monotonic() + limit_s
        while (now := time.monotonic()) < deadline:
            for line in [line for line, until in self._waiting.items() if until <= now]:
                self._send_away(line)
            until = min([deadline, *self._waiting.values()])
            heard: list[socket.socket | Line] = [self._listener, *self._waiting]
            for each in readable(heard, until - now):
                if not isinstance(each, Line):
                    self._let_in()
                elif each in self._waiting and (said := self._heard(each)) is not None:
                    return each, said
        raise TimeoutError(f"nobody connected within {limit_s:g} s")

    def close(self) -> None:
        """Send away who is left."""
        for line in list(self._waiting):
            self._send_away(line)

    def _let_in(self) -> None:
        for _ in range(_MOST_CALLERS):  # all who wait, because a turn costs the more the more of them there are
            with contextlib.suppress(OSError):
                line = Line(self._listener.accept()[0])
                if len(self._waiting) >= _MOST_CALLERS:
                    self._send_away(next(iter(self._waiting)))
                self._waiting[line] = time.monotonic() + _KNOCK_S
            if not readable([self._listener], 0.0):
                break

    def _heard(self, line: Line) -> dict[str, Any] | None:
        """What somebody says who knows the word; None as long as that is open, or if it does not."""
        try:
            line.take_in(_KNOCK_BYTES)
            if not line.has_word():
                return None
            said = line.receive(0.0)
        except OSError:
            self._send_away(line)
            return None
        if hmac.compare_digest(str(said.get("word")).encode(), self._word):
            del self._waiting[line]
            return said
        self._send_away(line)
        return None

    def _send_away(self, line: Line) -> None:
        del self._waiting[line]
        line.close()


def answer(listener: socket.socket, word: str, limit_s: float) -> tuple[Line, dict[str, Any]]:
    """Wait for the one caller who knows the word; whoever else is there by then is sent away.

    Raises:
        TimeoutError: nobody came in time.
    """
    with contextlib.closing(Callers(listener, word)) as callers:
        return callers.next(limit_s)
