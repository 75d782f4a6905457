"""The doors of the host of ``horovodrun``, through which processes on other hosts reach a store of this process."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Sequence

from guozhuang.net import interfaces
from guozhuang.net.door import Door

_SECRET_BYTES = 32
_MAX_DOORS = 16
_LOOPBACK = "127.0.0.1"
_log = logging.getLogger("guozhuang")


class Doors:
    """The doors of this host, one on each of its addresses, from the first ``open`` on.

    Args:
        store_port: the port of the store on loopback.
        names: the network interfaces to use; empty: all; None: loopback only.

    Attributes:
        secret: the bytes that a connecting host must know to be let in.
    """

    def __init__(self, store_port: int, names: Sequence[str] | None) -> None:
        self._store_port, self._names = store_port, names
        self._doors: list[Door] = []
        self.secret = secrets.token_bytes(_SECRET_BYTES)

    def open(self) -> list[tuple[str, int]]:
        """Open the doors if need be; return the address and port of each, loopback last, since no other host can reach it.

        Raises:
            UsageError: an interface that was named does not exist, or has no address.
        """
        if not self._doors:
            for address in [*self._addresses(), _LOOPBACK]:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                try:
                    where = socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM)[0][4]
                    listener = socket.create_server(where, family=family)
                except OSError as error:
                    _log.info("no door on %s: %s", address, error)
                    continue
                self._doors.append(Door(listener, self._store_port, self.secret))
        return [door.address for door in self._doors]

    def close(self) -> None:
        """Close the doors, and all connections through them."""
        for door in self._doors:
            door.close()
        self._doors = []

    def _addresses(self) -> list[str]:
        known = interfaces.addresses()
        if self._names is None:
            found = []
        elif self._names:
            found = [interfaces.named(name).address for name in self._names]
        else:
            found = [each for name, own in known.items() if not interfaces.is_local_bridge(name) for each in own]
        usable = [each for each in dict.fromkeys(found) if interfaces.is_reachable(each)]
        return sorted(usable, key=lambda address: ":" in address)[:_MAX_DOORS]
