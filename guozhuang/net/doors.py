"""``Door`` listeners on the host of a launcher, through which processes on other hosts reach the store that it serves."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence

from guozhuang.net import client, interfaces
from guozhuang.net.door import Door, NotOurDoorError, Passage, knock, passage_from

_SECRET_BYTES = 32
_MAX_DOORS = 16
_KNOCK_S = 5.0
_log = logging.getLogger("guozhuang")


class Doors:
    """The ``Door`` listeners of this host, one on each of its addresses. The first call of ``open`` creates them.

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
        """Open a ``Door`` on each address unless done before; return their addresses and ports, the loopback one last.

        Raises:
            UsageError: an interface that was named does not exist, or has no address.
        """
        if not self._doors:
            for address in [*self._addresses(), interfaces.LOOPBACK]:
                try:
                    listener = interfaces.listen_at(address)
                except OSError as error:
                    _log.info("no door on %s: %s", address, error)
                    continue
                self._doors.append(Door(listener, self._store_port, self.secret))
        return [door.address for door in self._doors]

    def close(self) -> None:
        """Close the ``Door`` listeners, and all connections through them."""
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


def enter(doors: Sequence[tuple[str, int]], secret: bytes, limit_s: float = 0.0) -> tuple[Passage, str]:
    """Return a ``Passage`` to the store behind the first ``Door`` that accepts this process, and the address of that door.

    Args:
        doors: address and port of each door, in the order in which to try them.
        secret: the secret of the run.
        limit_s: the number of seconds for which to try all doors again and again.

    Raises:
        NotOurDoorError: no door let this process in; the text gives the reason for each.
    """
    refused: list[str] = []
    for _ in client.tries(time.monotonic() + limit_s):
        refused = []
        for host, port in doors:
            try:
                return passage_from(knock(host, port, secret, _KNOCK_S), secret), host
            except (OSError, NotOurDoorError) as error:
                refused.append(f"{host} port {port}: {error}")
    raise NotOurDoorError("; ".join(refused))
